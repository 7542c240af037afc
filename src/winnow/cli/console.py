"""What the commands share: consoles, how errors and answers are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.table import Table

out, err = Console(), Console(stderr=True)

P = ParamSpec("P")
R = TypeVar("R")
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON on standard output, nothing else.")]


def clear_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Expected failures become one message and exit code 1; an interrupt exits with 130."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        from .errors import EXPECTED

        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            err.print(str(interrupt) or "interrupted", style="yellow", markup=False, highlight=False)
            raise typer.Exit(130) from None
        except EXPECTED as error:
            err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None

    return wrapped


def show(values: dict[str, Any], *, as_json: bool) -> None:
    """One answer, for a program or for a person."""
    if as_json:
        print(json.dumps(values))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    out.print(table)
