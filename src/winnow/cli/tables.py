"""`winnow methods`, `schema` and `doctor`: the available methods, and what this machine can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..base.files import write_json
from .console import Json, Overrides, command, progress_console, settings, show

app = typer.Typer()


@command(app)
def methods(as_json: Json = False) -> None:
    """List every method with what it does, its paper, file and options."""
    from ..run.resolved import all_methods

    show(all_methods(), as_json, _render)


@command(app)
def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of the configuration, with which editors complete and check YAML.

    With the Red Hat YAML extension: `# yaml-language-server: $schema=winnow.schema.json` on a file's first line.
    """
    from .schema import config_schema

    show(config_schema(), as_json, lambda found: Text(json.dumps(found, indent=2)))


@command(app)
def doctor(
    overrides: Overrides = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure what a run does here: minutes on a GPU.")] = False,
    model: Annotated[str | None, typer.Option(help="With --measure: a model; else one is made.")] = None,
    output: Annotated[Path | None, typer.Option("--out", help="With --measure: a file for the report.")] = None,
    as_json: Json = False,
) -> None:
    """Show what this machine can do, and how to add what is missing.

    With --measure `key=value` arguments are settings of a run: lora.r=16, dtype=float32.
    """
    if not measure:
        if overrides or model or output:
            raise ValueError("doctor: --model, --out and key=value arguments need --measure")
        from ..study.doctor import examine

        show(examine(), as_json, _findings)
        return
    values = settings(overrides)
    from ..study.measure import measure as measured  # takes seconds

    console = progress_console(as_json)
    report = measured(model, values, lambda line: console.print(line, highlight=False, soft_wrap=True))
    if output is not None:
        write_json(output, report)
    show(report, as_json, lambda found: Text("all is right" if found["right"] else "something is wrong; see above"))
    if not report["right"]:
        raise typer.Exit(1)


def _findings(found: list[dict[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in found:
        text, remedy = Text(finding["found"]), finding["remedy"]
        if remedy:
            text.append(f"\n{remedy}", style="yellow")
        table.add_row(Text(finding["what"], style="yellow" if remedy else "green"), text)
    return table


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
