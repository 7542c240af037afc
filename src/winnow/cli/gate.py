"""`winnow gate`: sweep a gate over recorded groups, before anything is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.errors import ConfigError
from ..base.files import check_output
from .console import Json, command, show

app = typer.Typer()

TABLE = "CSV, JSONL or Parquet: K, task_id, reward_var and signals; one row a group and K. Or a run directory."


@command(app)
def gate(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help=TABLE)],
    k: Annotated[
        str | None, typer.Option("--k", help="Evaluation steps, e.g. 10,15; default: all in the file.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--map", help="name=column, for a column of another name. May be repeated.")
    ] = None,
    signal: Annotated[str | None, typer.Option(help="Only this signal; default: all.")] = None,
    thresholds: Annotated[
        str | None, typer.Option(help="Only these, each with a row, e.g. 0.10,0.12; default: the best of all.")
    ] = None,
    precision: Annotated[float, typer.Option(min=0, max=1, help="Least share of the cuts that must be right.")] = 0.8,
    by: Annotated[str | None, typer.Option(help="`task_type`: also a gate for each type.")] = None,
    t_max: Annotated[int, typer.Option("--t-max", min=2, help="Most environment steps of an episode.")] = 30,
    count_ended: Annotated[
        bool, typer.Option("--count-ended", help="Also count groups that ended by step K, as the paper does.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw it too: .png, .svg or .pdf; needs the extra 'gate'.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="YAML file for the gate's section.")] = None,
    as_json: Json = False,
) -> None:
    """Show what each signal and step of a mid-trajectory gate would cut, and choose the best gate."""
    from ..study.gate_sweep import Sweep, config_section, run_sweep
    from ..study.gate_tables import can_be_cut

    if by not in (None, "task_type"):
        raise ConfigError(f"--by {by}: only task_type")
    if picture is not None:
        from ..study.gate_plot import check

        check(picture)
    if output is not None:
        check_output(output)
    given = () if thresholds is None else tuple(_numbers(thresholds, "--thresholds"))
    sweep = Sweep(t_max, precision, signal, given, count_ended)
    recorded = _recorded(table, k, columns)
    swept = run_sweep(recorded, sweep, by_task_type=by is not None)
    if output is not None:
        output.write_text(config_section(swept, precision), encoding="utf-8")
    if picture is not None:
        from ..study.gate_plot import plot

        plot(swept[0], sweep, picture)

    def render(_: Any) -> RenderableType:
        shown: list[RenderableType] = []
        for part in swept:
            shown += _shown(part)
        if not count_ended:
            shown += [Text(can_be_cut(at), style="dim") for at in recorded.values()]
        if any(part.chosen for part in swept):
            shown.append(Text(config_section(swept, precision), style="cyan"))
        return Group(*shown)

    show([asdict(part) for part in swept], as_json, render)


def _recorded(table: Path, k: str | None, columns: Sequence[str] | None) -> dict[int, Any]:
    """Read the table at the evaluation steps asked for."""
    from ..study.gate_tables import read_recorded

    mapping = {}
    for given in columns or ():
        name, separator, column = given.partition("=")
        if not (name and separator and column):
            raise ConfigError(f"--map {given}: expected name=column")
        mapping[name] = column
    recorded = read_recorded(table, mapping)
    if k is None:
        return recorded
    steps = _numbers(k, "--k")
    for step in steps:
        if step not in recorded:
            raise ConfigError(f"{table}: there is no K = {step:g}; it has {', '.join(map(str, recorded))}")
    return {step: at for step, at in recorded.items() if step in steps}


def _numbers(text: str, option: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(not 0 <= x < float("inf") for x in numbers):
        raise ConfigError(f"{option} {text}: expected numbers separated by commas, e.g. 10,15 or 0.10,0.12")
    return numbers


def _shown(part: Any) -> list[RenderableType]:
    """Return a sweep for people: its rows, then the choice with its controls."""
    name = "all groups" if part.task_type is None else f"task_type {part.task_type}"
    title = Text(f"{name}: {part.held_out.groups:g}, {part.held_out.zero:g} of them zero-variance", style="bold")
    rows = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("k", "signal", "auroc", "rho", "below", "cut", "right", "prec.", "saved %", "|A| kept"):
        rows.add_column(heading, justify="left" if heading == "signal" else "right", no_wrap=True)
    for row in part.rows:
        e = row.effect
        below = "–" if row.threshold is None else f"{row.threshold:g}"
        counts = (f"{e.cut:.4g}", f"{e.tp:.4g}", _share(e.precision), f"{e.saved_pct:.1f}", _share(e.kept_norm))
        rows.add_row(str(row.k), row.signal, _share(row.auroc), _share(row.rho), below, *counts)
    lines = [f"chosen     {part.chosen or 'none: no threshold has the precision'}"]
    controls = {"here": part.effect, "held out": part.held_out, "at random": part.at_random, "oracle": part.oracle}
    lines += [f"{name:<10} {effect}" for name, effect in controls.items() if effect is not None]
    return [title, rows, *map(Text, lines)]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
