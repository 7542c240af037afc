"""The command `winnow`. Every subcommand is a thin layer over the Python API."""

from __future__ import annotations

from typing import Annotated

import typer

from ..base import __version__
from ..base.machine import quiet_imports
from . import cluster, evaluate, gate, models, prepare, push, record, tables, train, tune

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Post-train language models with group-relative RL and pay only for rollouts that teach.",
)
for family in (train, evaluate, prepare, tune, models, record, push, gate, cluster, tables):
    app.add_typer(family.app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"winnow {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")


@app.callback()
def _options(
    version: Annotated[bool, _VERSION] = False,
) -> None:
    quiet_imports()


if __name__ == "__main__":
    app()
