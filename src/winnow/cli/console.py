"""Shared parts of all commands: consoles, errors, answers, settings and common arguments.

A command is a function under `@command(app)` in its family's file. Configuration keys are always `key=value`; an option
names a file or selects what to show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.errors import ExpectedError
from ..base.sanitize import redact, visible

if TYPE_CHECKING:
    from ..config import RunConfig

EXPECTED = (ValueError, OSError, FloatingPointError, ExpectedError)  # ValueError: ConfigError and the tasks' own
"""Errors that a user can cause or should see; the command prints them without a traceback."""
out, err = Console(markup=False), Console(stderr=True, markup=False)  # paths and data are not markup

Command = TypeVar("Command", bound=Callable[..., None])
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON on standard output, nothing else.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value; dots reach into sections: filter.atol=1e-6")]
Run = Annotated[Path, typer.Argument(help="A run directory.")]
Model = Annotated[str, typer.Argument(help="A run directory, a Hugging Face directory, or a hub name.")]
Config = Annotated[Path | None, typer.Option(help="YAML file to take task and sampling from.")]


def command(app: typer.Typer, name: str | None = None) -> Callable[[Command], Command]:
    """Add a function to `app`: expected errors become one message and exit code 1, an interrupt exits with 130."""

    def add(run: Command) -> Command:
        @wraps(run)
        def called(**given: Any) -> None:
            try:
                run(**given)
            except KeyboardInterrupt as interrupt:
                err.print(str(interrupt) or "interrupted", style="yellow", highlight=False)
                raise typer.Exit(130) from None
            except Exception as error:
                if not isinstance(error, EXPECTED):
                    raise
                err.print(f"error: {visible(redact(str(error)))}", style="red", highlight=False, soft_wrap=True)
                raise typer.Exit(1) from None

        app.command(name)(called)
        return run

    return add


def progress_console(as_json: bool) -> Console:
    """Return the console for progress: with `--json`, standard output is for the answer only."""
    return err if as_json else out


def show(found: Any, as_json: bool, render: Callable[[Any], RenderableType] | None = None) -> None:
    """Print an answer as JSON, or as `render` draws it; default: one line per key."""
    if as_json:
        print(json.dumps(found))
    else:
        shown = (render or lines)(found)
        out.print(shown, highlight=False, soft_wrap=isinstance(shown, str | Text))


def lines(values: Mapping[str, Any]) -> Table:
    """Return a table with one line per key."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def run_config(path: Path, overrides: Sequence[str] | None) -> RunConfig:
    """Read a run's configuration and check all that needs no model, before the imports of one, which take seconds."""
    from ..config import load_config

    config = load_config(path, overrides or ())
    from ..methods.tables import options_of, task_options  # half a second

    options_of(config)
    task_options(config.env)
    return config


def settings(
    overrides: Sequence[str] | None, config: Path | None = None, model: str = "", **defaults: Any
) -> dict[str, Any]:
    """Read settings from `defaults`, then a YAML file, then overrides. `model`: maybe a run, into whose sections dotted
    overrides reach."""
    from ..config import read_settings
    from ..record.records import LEDGER, read_config

    run, keys = Path(model), {o.partition(".")[0] for o in overrides or () if "." in o.partition("=")[0]}
    if model and keys and (run / LEDGER).exists():
        defaults |= {key: section for key, section in read_config(run).items() if key in keys}
    return read_settings(config, overrides or (), defaults)
