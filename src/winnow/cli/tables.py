"""`winnow methods`: what there is to choose from."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from .console import Json, command, show

app = typer.Typer()


@command(app)
def methods(as_json: Json = False) -> None:
    """List every method with what it does, its paper, file and options."""
    from ..run.catalogue import all_methods

    show(all_methods(), as_json, _render)


def _render(found: list[dict[str, Any]]) -> RenderableType:
    lines: list[Text] = []
    field = ""
    for m in found:
        if m["field"] != field:
            field = m["field"]
            lines.append(Text.from_markup(f"\n[bold]{field}[/]"))
        lines.append(Text.from_markup(f"  [cyan]{m['name']}[/]  {escape(m['summary'])}"))
        options = ", ".join(f"{k}={v}" for k, v in m["options"].items())
        if "provides" in m:
            lines.append(Text(f"    provides: {', '.join(m['provides'])}", style="dim"))
        lines.append(Text(f"    {m['file']}" + (f"  options: {options}" if options else ""), style="dim"))
    return Group(*lines)
