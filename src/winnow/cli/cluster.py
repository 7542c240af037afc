"""`winnow cluster`: checks a Ray cluster before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .console import Json, command, show

app = typer.Typer(name="cluster", no_args_is_help=True, help="Look at a Ray cluster.")


@app.callback()
def family() -> None:
    """Keep `check` a subcommand."""


@command(app)
def check(
    address: Annotated[str, typer.Option(help="Cluster to join.")] = "auto",
    shared: Annotated[Path | None, typer.Option(help="Directory that ranks would write to; also tried.")] = None,
    as_json: Json = False,
) -> None:
    """Try every node: versions, devices, ports, object store, a shared directory. Exit code 1 if something is wrong."""
    from ..study.doctor import check as check_cluster

    found = check_cluster(address, shared)
    show(found, as_json, _render)
    if found["problems"]:
        raise typer.Exit(1)


def _render(found: dict[str, Any]) -> RenderableType:
    table = Table("node", "CPUs", "GPUs", "memory", "object store", "devices")
    for node in found["nodes"]:
        numbers = (f"{node['cpus']:g}", f"{node['gpus']:g}", f"{node['memory_gib']} GiB", f"{node['store_gib']} GiB")
        table.add_row(node["node"], *numbers, ", ".join(node["devices"]) or "-")
    lines = [Text(problem, style="red") for problem in found["problems"]] or [Text("nothing is wrong", style="green")]
    return Group(table, *lines)
