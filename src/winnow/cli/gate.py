"""`winnow gate`: gates over recorded groups, before anything is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

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


def _command(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """`winnow gate NAME` from a function of one dataclass `o`: its fields are the options."""
    options = get_type_hints(run)["o"]
    hints = get_type_hints(options, include_extras=True)

    @clear_errors
    def command(**given: Any) -> None:
        run(options(**given))

    def parameter(f: Field[Any]) -> Parameter:
        default = Parameter.empty if f.default is MISSING else f.default
        return Parameter(f.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[f.name])

    command.__signature__ = Signature([parameter(f) for f in fields(options)])  # type: ignore[attr-defined]
    command.__annotations__ = {f.name: hints[f.name] for f in fields(options)}
    gate.command(run.__name__, help=run.__doc__)(command)
    return run


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What all of them take."""

    table: Annotated[
        Path,
        typer.Argument(
            help="CSV, JSONL or Parquet: K, task_id, reward_var and signals; one row a group and K. Or a run directory."
        ),
    ]
    k: Annotated[str | None, typer.Option("--k", help="Evaluation steps, e.g. 10,15; all in the file otherwise.")] = (
        None
    )
    columns: Annotated[
        list[str] | None, typer.Option("--map", help="name=column, for a column of another name. May be repeated.")
    ] = None
    picture: Annotated[Path | None, typer.Option(help="Draw it too: .png, .svg or .pdf; needs the extra 'gate'.")] = (
        None
    )
    as_json: Json = False


Horizon = Annotated[int, typer.Option("--t-max", min=2, help="The most environment steps an episode may take.")]


@dataclass(frozen=True, kw_only=True)
class Sweep(Asked):
    signal: Annotated[str, typer.Option(help="Which signal.")] = "prefix_edit_distance"
    thresholds: Annotated[str, typer.Option(help="Cut below these.")] = "0.05,0.08,0.10,0.12,0.14,0.18"
    t_max: Horizon = 30
    termination: Annotated[
        str | None,
        typer.Option(help="Also by the share that has ended: 0.9 (or at least), and:0.9, mirror:0.1 (or at most)."),
    ] = None


@_command
def sweep(o: Sweep) -> None:
    """What each threshold would have cut: how precisely, and for what saving."""
    from ..methods.gate.divergence import RULES
    from ..study.replay import ReplayError
    from ..study.replay import sweep as run

    *named, limit = (o.termination or "or:").split(":")
    rule = next((r for r in RULES if named in ([], [r])), None)
    if rule is None:
        raise ReplayError(
            f"--termination {o.termination}: expected a share, or {', '.join(f'{r}:SHARE' for r in RULES)}"
        )
    ended = None
    if o.termination:
        ended, *more = _numbers(limit, "--termination")
        if more or ended > 1:
            raise ReplayError(f"--termination {o.termination}: expected one share in [0, 1]")
    recorded = _recorded(o)
    rows = run(recorded, o.signal, _numbers(o.thresholds, "--thresholds"), o.t_max, ended, rule)
    if o.picture is not None:
        from ..study.gate_pictures import heat_map

        heat_map(rows, o.picture)
    _rows([_present(asdict(row)) for row in rows], o.as_json)


@dataclass(frozen=True, kw_only=True)
class Correlate(Asked):
    by: Annotated[str | None, typer.Option(help="`task_type`: each type alone.")] = None


@_command
def correlate(o: Correlate) -> None:
    """How well each signal knows which groups will have no reward variance."""
    from ..study.replay import ReplayError
    from ..study.replay import correlate as run

    if o.by not in (None, "task_type"):
        raise ReplayError(f"--by {o.by}: only task_type")
    if o.by and o.picture:
        raise ReplayError("--picture shows all groups together; leave out --by, or give a table of one type")
    recorded = _recorded(o)
    found = run(recorded, by_task_type=o.by is not None)
    if o.picture is not None:
        from ..study.gate_pictures import separation

        separation(recorded, found, o.picture)
    rows = [asdict(row) for row in found]
    _rows([{key: v for key, v in row.items() if o.by or key != "task_type"} for row in rows], o.as_json)


@dataclass(frozen=True, kw_only=True)
class Calibrate(Asked):
    table: Annotated[Path | None, typer.Argument(help="As for sweep.")] = None  # type: ignore[assignment]
    run: Annotated[Path | None, typer.Option("--from", help="Run directory, in place of the table.")] = None
    precision: Annotated[
        float | None, typer.Option(min=0, max=1, help="Least share of the cuts that must be right (0.8).")
    ] = None
    signal_loss: Annotated[
        float | None, typer.Option("--signal-loss", min=0, max=1, help="Or: most teaching groups that may be cut.")
    ] = None
    or_rule: Annotated[bool, typer.Option("--or-rule", help="Try termination limits too.")] = False
    per_task_type: Annotated[bool, typer.Option("--per-task-type", help="A threshold for each task type.")] = False
    t_max: Horizon = 30
    output: Annotated[Path | None, typer.Option("-o", "--output", help="YAML file for the gate's section.")] = None


@_command
def calibrate(o: Calibrate) -> None:
    """Choose signal, step and threshold that save most within a bound, and check them on held-out groups."""
    from ..study.replay import ReplayError
    from ..study.replay_stats import Bound, Search, config_section, lines
    from ..study.replay_stats import calibrate as run

    given = o.table or o.run
    if given is None or (o.table and o.run):
        raise ReplayError("give one of a table and --from RUN_DIRECTORY")
    if o.precision is not None and o.signal_loss is not None:
        raise ReplayError("--precision and --signal-loss are two ways to set one bound; give one of them")
    bound = Bound(0.8 if o.precision is None and o.signal_loss is None else o.precision, o.signal_loss)
    recorded = _recorded(replace(o, table=given))
    found = run(recorded, bound, o.t_max, or_rule=o.or_rule, per_task_type=o.per_task_type)
    if o.output is not None:
        if not o.output.parent.is_dir():
            raise FileNotFoundError(f"{o.output}: its folder does not exist; make it first.")
        o.output.write_text(config_section(found), encoding="utf-8")
    if o.picture is not None:
        from ..study.gate_pictures import pareto

        pareto(found, list(Search(bound, o.t_max, o.or_rule).candidates(recorded)), o.picture)
    if o.as_json:
        print(json.dumps(asdict(found)))
        return
    _rows([_arm("gate", found.chosen), _arm("at random", found.random), _arm("oracle", found.oracle)], False)
    for line in lines(found):
        out.print(line, markup=False, highlight=False)
    out.print(config_section(found), style="cyan", markup=False, highlight=False)


def _arm(name: str, row: Any) -> dict[str, Any]:
    keys = ("cut", "tp", "fp", "precision", "recall", "safe_pct", "raw_pct", "measured_pct", "kept_norm")
    return _present({"arm": name} | {key: getattr(row, key) for key in keys})


def _recorded(o: Asked) -> dict[int, Any]:
    """The table, at the evaluation steps asked for."""
    from ..study.replay import ReplayError, read_recorded

    mapping = {}
    for given in o.columns or ():
        name, separator, column = given.partition("=")
        if not (name and separator and column):
            raise ReplayError(f"--map {given}: expected name=column")
        mapping[name] = column
    if o.picture is not None:
        from ..study.gate_pictures import check

        check(o.picture)
    recorded = read_recorded(o.table, mapping)
    if o.k is None:
        return recorded
    wanted = _numbers(o.k, "--k")
    for step in wanted:
        if step not in recorded:
            raise ReplayError(f"{o.table}: there is no K = {step:g}; it has {', '.join(map(str, recorded))}")
    return {step: at for step, at in recorded.items() if step in wanted}


def _numbers(text: str, option: str) -> list[float]:
    from ..study.replay import ReplayError

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
        out.print(", ".join(f"{key} = {_cell(key, rows[0][key])}" for key in same), style="dim", highlight=False)
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
    if key.endswith("_pct") or key in ("groups", "cut", "tp", "fp", "zero_variance"):
        return f"{value:.1f}"
    return f"{value:.2g}" if key == "p_value" else f"{value:.3f}" if key != "threshold" else f"{value:g}"
