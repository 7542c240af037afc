"""What all commands share: consoles, errors, answers, settings and the arguments they have in common.

A command is a function under `@command(app)` of its family's file. What a configuration can say is `key=value`
everywhere; an option names a file or says what to show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

out, err = Console(), Console(stderr=True)

Command = TypeVar("Command", bound=Callable[..., None])
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON on standard output, nothing else.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value; dots reach into sections: filter.atol=1e-6")]
Model = Annotated[str, typer.Argument(help="A run directory, a Hugging Face directory, or a hub name.")]
Config = Annotated[Path | None, typer.Option(help="YAML file to take task and sampling from.")]
Run = Annotated[Path, typer.Argument(help="A run directory.")]


def command(app: typer.Typer, name: str | None = None) -> Callable[[Command], Command]:
    """Add a function to `app`: expected failures become one message and exit code 1, an interrupt exits with 130."""

    def add(run: Command) -> Command:
        @wraps(run)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            from .errors import EXPECTED

            try:
                run(*args, **kwargs)
            except KeyboardInterrupt as interrupt:
                err.print(str(interrupt) or "interrupted", style="yellow", markup=False, highlight=False)
                raise typer.Exit(130) from None
            except EXPECTED as error:
                err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
                raise typer.Exit(1) from None

        app.command(name)(wrapped)
        return run

    return add


def progress_console(as_json: bool) -> Console:
    """The console for what is said on the way: with `--json`, standard output is for the answer alone."""
    return err if as_json else out


def show(found: Any, as_json: bool, render: Callable[[Any], RenderableType] | None = None) -> None:
    """Print an answer as JSON, or as `render` draws it; without `render`, one line a key."""
    if as_json:
        print(json.dumps(found))
    else:
        shown = (render or _lines)(found)
        out.print(shown, highlight=False, soft_wrap=isinstance(shown, str | Text))


def _lines(values: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def settings(overrides: Sequence[str] | None, config: Path | None = None, **defaults: Any) -> dict[str, Any]:
    """Settings from `defaults`, then a YAML file, then overrides."""
    from ..config import read_settings

    return read_settings(config, overrides or (), defaults)
