"""The command `winnow`. Every subcommand is a thin layer over the Python API."""

from __future__ import annotations

import typer

from . import cluster, evaluate, gate, models, prepare, record, tables, train

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Post-train language models with group-relative RL and pay only for rollouts that teach.",
)
for family in (train, evaluate, prepare, models, record, gate, cluster, tables):
    app.add_typer(family.app)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
