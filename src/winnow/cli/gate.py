"""`winnow gate`: gates over recorded groups, before anything is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

HEADINGS = {
    "groups": "n",
    "zero_variance": "zero",
    "spearman_rho": "rho",
    "p_value": "p",
    "precision": "prec.",
    "safe_pct": "safe %",
    "raw_pct": "raw %",
    "measured_pct": "meas. %",
    "kept_norm": "|A| kept",
}
"""Heading of a column for people, where it is not the key."""

app = typer.Typer(
    name="gate", no_args_is_help=True, help="Replay mid-trajectory gates over a table of recorded groups."
)

TABLE = "CSV, JSONL or Parquet: K, task_id, reward_var and signals; one row a group and K. Or a run directory."


Recorded = Annotated[Path, typer.Argument(metavar="TABLE", help=TABLE)]
Steps = Annotated[str | None, typer.Option("--k", help="Evaluation steps, e.g. 10,15; all in the file otherwise.")]
Columns = Annotated[
    list[str] | None, typer.Option("--map", help="name=column, for a column of another name. May be repeated.")
]
Picture = Annotated[Path | None, typer.Option(help="Draw it too: .png, .svg or .pdf; needs the extra 'gate'.")]
Horizon = Annotated[int, typer.Option("--t-max", min=2, help="The most environment steps an episode may take.")]


@command(app)
def sweep(
    table: Recorded,
    k: Steps = None,
    columns: Columns = None,
    picture: Picture = None,
    as_json: Json = False,
    signal: Annotated[str, typer.Option(help="Which signal.")] = "prefix_edit_distance",
    thresholds: Annotated[str, typer.Option(help="Cut below these.")] = "0.05,0.08,0.10,0.12,0.14,0.18",
    t_max: Horizon = 30,
    termination: Annotated[
        str | None,
        typer.Option(help="Also by the share that has ended: 0.9 (or at least), and:0.9, mirror:0.1 (or at most)."),
    ] = None,
) -> None:
    """Show for each threshold what it would have cut: how precisely, and for what saving."""
    from ..methods.gate.divergence import RULES
    from ..study.gate_effect import sweep as run
    from ..study.gate_tables import can_be_cut

    *named, limit = (termination or "or:").split(":")
    rule = next((r for r in RULES if named in ([], [r])), None)
    if rule is None:
        expected = ", ".join(f"{r}:SHARE" for r in RULES)
        raise ConfigError(f"--termination {termination}: expected a share, or {expected}")
    ended = None
    if termination:
        ended, *more = _numbers(limit, "--termination")
        if more or ended > 1:
            raise ConfigError(f"--termination {termination}: expected one share in [0, 1]")
    recorded = _recorded(table, k, columns, picture)
    rows = run(recorded, signal, _numbers(thresholds, "--thresholds"), t_max, ended, rule)
    if picture is not None:
        from ..study.gate_pictures import heat_map

        heat_map(rows, picture)

    def render(shown: Any) -> RenderableType:
        said = [Text(f"{can_be_cut(at)}; as in the paper, all are counted", style="dim") for at in recorded.values()]
        return Group(_rows(shown), *said)

    first = ("k", "signal", "threshold")
    show([_present({key: getattr(row, key) for key in first} | asdict(row)) for row in rows], as_json, render)


@command(app)
def correlate(
    table: Recorded,
    k: Steps = None,
    columns: Columns = None,
    picture: Picture = None,
    as_json: Json = False,
    by: Annotated[str | None, typer.Option(help="`task_type`: each type alone.")] = None,
) -> None:
    """Show how well each signal knows which groups will have no reward variance."""
    from ..study.gate_tables import correlate as run

    if by not in (None, "task_type"):
        raise ConfigError(f"--by {by}: only task_type")
    if by and picture:
        raise ConfigError("--picture shows all groups together; leave out --by, or give a table of one type")
    recorded = _recorded(table, k, columns, picture)
    found = run(recorded, by_task_type=by is not None)
    if picture is not None:
        from ..study.gate_pictures import separation

        separation(recorded, found, picture)
    rows = [asdict(row) for row in found]
    show([{key: v for key, v in row.items() if by or key != "task_type"} for row in rows], as_json, _rows)


@command(app)
def calibrate(
    table: Annotated[Path | None, typer.Argument(help="As for sweep.")] = None,
    run_dir: Annotated[Path | None, typer.Option("--from", help="Run directory, in place of the table.")] = None,
    k: Steps = None,
    columns: Columns = None,
    picture: Picture = None,
    precision: Annotated[
        float | None, typer.Option(min=0, max=1, help="Least share of the cuts that must be right (0.8).")
    ] = None,
    signal_loss: Annotated[
        float | None, typer.Option(min=0, max=1, help="Or: most teaching groups that may be cut.")
    ] = None,
    as_json: Json = False,
    or_rule: Annotated[bool, typer.Option("--or-rule", help="Try termination limits too.")] = False,
    per_task_type: Annotated[bool, typer.Option("--per-task-type", help="Signal and steps for each type.")] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Most evaluation steps, chosen together.")] = 1,
    t_max: Horizon = 30,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="YAML file for the gate's section.")] = None,
) -> None:
    """Choose signal, step and threshold that save most within a bound, and check them on held-out groups."""
    from ..study.gate_calibration import calibrate as run
    from ..study.gate_calibration import config_section, lines
    from ..study.gate_search import Bound, Search

    given = table or run_dir
    if given is None or (table and run_dir):
        raise ConfigError("give one of a table and --from RUN_DIRECTORY")
    if precision is not None and signal_loss is not None:
        raise ConfigError("--precision and --signal-loss are two ways to set one bound; give one of them")
    if precision is None and signal_loss is None:
        precision = 0.8
    search = Search(Bound(precision, signal_loss), t_max, steps, or_rule, per_task_type)
    if (steps > 1 or per_task_type) and picture:
        raise ConfigError("--picture shows one step for all groups; leave it out, or --steps and --per-task-type")
    recorded = _recorded(given, k, columns, picture)
    if output is not None:
        check_output(output)
    found = run(recorded, search)
    if output is not None:
        output.write_text(config_section(found), encoding="utf-8")
    if picture is not None:
        from ..study.gate_pictures import pareto

        pareto(found, search.tried(recorded), picture)

    def render(_: Any) -> RenderableType:
        shown: list[RenderableType] = [*map(Text, lines(found)), Text(config_section(found), style="cyan")]
        if found.random is not None:
            arms = [_arm("gate", found.chosen), _arm("at random", found.random), _arm("oracle", found.oracle)]
            shown.insert(0, _rows(arms))
        return Group(*shown)

    show(asdict(found), as_json, render)


def _arm(name: str, row: Any) -> dict[str, Any]:
    keys = ("cut", "tp", "fp", "precision", "recall", "safe_pct", "raw_pct", "measured_pct", "kept_norm")
    return _present({"arm": name} | {key: getattr(row, key) for key in keys})


def _recorded(table: Path, k: str | None, columns: Sequence[str] | None, picture: Path | None) -> dict[int, Any]:
    """The table, at the evaluation steps asked for; a picture that could not be drawn is an error before the work."""
    from ..study.gate_tables import read_recorded

    mapping = {}
    for given in columns or ():
        name, separator, column = given.partition("=")
        if not (name and separator and column):
            raise ConfigError(f"--map {given}: expected name=column")
        mapping[name] = column
    if picture is not None:
        from ..study.gate_pictures import check

        check(picture)
    recorded = read_recorded(table, mapping)
    if k is None:
        return recorded
    wanted = _numbers(k, "--k")
    for step in wanted:
        if step not in recorded:
            raise ConfigError(f"{table}: there is no K = {step:g}; it has {', '.join(map(str, recorded))}")
    return {step: at for step, at in recorded.items() if step in wanted}


def _numbers(text: str, option: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not 0 <= x < float("inf") for x in found):
        raise ConfigError(f"{option} {text}: expected numbers separated by commas, e.g. 10,15 or 0.10,0.12")
    return found


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without `measured_pct` where the table has no data for it."""
    return {key: v for key, v in row.items() if v is not None or key != "measured_pct"}


def _rows(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A table; above it, the columns in which no row differs."""
    shared = ("k", "signal", "groups", "zero_variance")
    same = [key for key in rows[0] if key in shared and len({row[key] for row in rows}) == 1]
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for key in rows[0]:
        if key not in same:
            heading = HEADINGS.get(key, key)
            text = isinstance(rows[0][key], str)
            shown.add_column(heading, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in rows:
        shown.add_row(*(_cell(key, v) for key, v in row.items() if key not in same))
    above = [Text(", ".join(f"{key} = {_cell(key, rows[0][key])}" for key in same), style="dim")] if same else []
    return Group(*above, shown)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    if key.endswith("_pct") or key in ("groups", "cut", "tp", "fp", "zero_variance"):
        return f"{value:.1f}"
    return f"{value:.2g}" if key == "p_value" else f"{value:.3f}" if key != "threshold" else f"{value:g}"
