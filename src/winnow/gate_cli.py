"""`winnow gate`: gates over recorded groups, before anything is run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .console import Json, clear_errors, out

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
"""What stands over a column for people, where it is not the key."""

gate = typer.Typer(no_args_is_help=True, help="What a mid-trajectory gate would have done, from a table of groups.")

Input = Annotated[
    Path, typer.Argument(help="CSV or Parquet: K, task_id, reward_var and signals; one row a group and K.")
]
Map = Annotated[
    list[str] | None, typer.Option("--map", help="name=column, for a column of another name. May be repeated.")
]
Ks = Annotated[str | None, typer.Option("--k", help="Evaluation steps, e.g. 10,15; all in the file otherwise.")]
Horizon = Annotated[int, typer.Option("--t-max", min=2, help="The most environment steps an episode may take.")]


@gate.command()
@clear_errors
def sweep(
    table: Input,
    signal: Annotated[str, typer.Option(help="Which signal.")] = "prefix_edit_distance",
    k: Ks = None,
    thresholds: Annotated[str, typer.Option(help="Cut below these.")] = "0.05,0.08,0.10,0.12,0.14,0.18",
    t_max: Horizon = 30,
    termination: Annotated[
        str | None,
        typer.Option(help="Also by the share that has ended: 0.9 (or at least), and:0.9, mirror:0.1 (or at most)."),
    ] = None,
    columns: Map = None,
    as_json: Json = False,
) -> None:
    """What each threshold would have cut: how precisely, and for what saving."""
    from .gate.divergence import RULES
    from .replay import ReplayError
    from .replay import sweep as run

    *named, limit = (termination or "or:").split(":")
    rule = next((r for r in RULES if named in ([], [r])), None)
    if rule is None:
        raise ReplayError(f"--termination {termination}: expected a share, or {', '.join(f'{r}:SHARE' for r in RULES)}")
    ended = _numbers(limit, "--termination")[0] if termination else None
    recorded = _recorded(table, k, columns)
    rows = run(recorded, signal, _numbers(thresholds, "--thresholds"), t_max, ended, rule)
    _rows([_present(asdict(row)) for row in rows], as_json)


@gate.command()
@clear_errors
def correlate(
    table: Input,
    k: Ks = None,
    by: Annotated[str | None, typer.Option(help="`task_type`: each type alone.")] = None,
    columns: Map = None,
    as_json: Json = False,
) -> None:
    """How well each signal knows which groups will have no reward variance."""
    from .replay import ReplayError
    from .replay import correlate as run

    if by not in (None, "task_type"):
        raise ReplayError(f"--by {by}: only task_type")
    found = run(_recorded(table, k, columns), by_task_type=by is not None)
    rows = [asdict(row) for row in found]
    _rows([{key: v for key, v in row.items() if by or key != "task_type"} for row in rows], as_json)


@gate.command()
@clear_errors
def calibrate(
    table: Input,
    precision: Annotated[
        float | None, typer.Option(min=0, max=1, help="Least share of the cuts that must be right (0.8).")
    ] = None,
    signal_loss: Annotated[
        float | None, typer.Option("--signal-loss", min=0, max=1, help="Or: most teaching groups that may be cut.")
    ] = None,
    k: Ks = None,
    t_max: Horizon = 30,
    columns: Map = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="YAML file for the gate's section.")] = None,
    as_json: Json = False,
) -> None:
    """Choose signal, step and threshold that save most within a bound, and check them on held-out groups."""
    from .replay import ReplayError
    from .replay_stats import Bound, config_section, lines
    from .replay_stats import calibrate as run

    if precision is not None and signal_loss is not None:
        raise ReplayError("--precision and --signal-loss are two ways to set one bound; give one of them")
    bound = Bound(0.8 if precision is None and signal_loss is None else precision, signal_loss)
    found = run(_recorded(table, k, columns), bound, t_max)
    if output is not None:
        if not output.parent.is_dir():
            raise FileNotFoundError(f"{output}: its folder does not exist; make it first.")
        output.write_text(config_section(found), encoding="utf-8")
    if as_json:
        print(json.dumps(asdict(found)))
        return
    _rows([_arm("gate", found.chosen), _arm("at random", found.random), _arm("oracle", found.oracle)], False)
    for line in lines(found):
        out.print(line, markup=False, highlight=False)
    out.print(config_section(found), style="cyan", markup=False, highlight=False)


def _arm(name: str, row: Any) -> dict[str, Any]:
    keys = ("cut", "tp", "fp", "precision", "recall", "safe_pct", "raw_pct", "measured_pct", "kept_norm")
    return _present({"arm": name} | {key: getattr(row, key) for key in keys})


def _recorded(table: Path, k: str | None, columns: Sequence[str] | None) -> dict[int, Any]:
    """The table, at the evaluation steps asked for."""
    from .replay import ReplayError, read_recorded

    mapping = {}
    for given in columns or ():
        name, separator, column = given.partition("=")
        if not (name and separator and column):
            raise ReplayError(f"--map {given}: expected name=column")
        mapping[name] = column
    recorded = read_recorded(table, mapping)
    if k is None:
        return recorded
    wanted = _numbers(k, "--k")
    for step in wanted:
        if step not in recorded:
            raise ReplayError(f"{table}: there is no K = {step:g}; it has {', '.join(map(str, recorded))}")
    return {step: at for step, at in recorded.items() if step in wanted}


def _numbers(text: str, option: str) -> list[float]:
    from .replay import ReplayError

    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not 0 <= x < float("inf") for x in found):
        raise ReplayError(f"{option} {text}: expected numbers separated by commas, e.g. 10,15 or 0.10,0.12")
    return found


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the table did not have the data for."""
    return {key: v for key, v in row.items() if v is not None or key != "measured_pct"}


def _rows(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(list(rows)))
        return
    shared = ("k", "signal", "groups", "zero_variance")
    same = [key for key in rows[0] if key in shared and len({row[key] for row in rows}) == 1]
    if same:
        out.print(", ".join(f"{key} = {rows[0][key]}" for key in same), style="dim", highlight=False)
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for key in rows[0]:
        if key not in same:
            heading = HEADINGS.get(key, key)
            text = isinstance(rows[0][key], str)
            shown.add_column(heading, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in rows:
        shown.add_row(*(_cell(key, v) for key, v in row.items() if key not in same))
    out.print(shown)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    if key.endswith("_pct") or key in ("tp", "fp"):
        return f"{value:.1f}"
    return f"{value:.2g}" if key == "p_value" else f"{value:.3f}" if key != "threshold" else f"{value:g}"
