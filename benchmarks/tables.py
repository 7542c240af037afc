"""Tables of the claims: columns as data, means over seeds with the intervals of `winnow compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from winnow.base.intervals import Estimate, mean_interval
from winnow.study.compare import paired_estimate, reached_at
from winnow.study.compare_data import Point

Summary = dict[str, Any]
"""What the JSON file keeps of one run; has its `seed`."""
Figures = dict[str, list[Summary]]
"""Runs by arm."""
Value = str | Callable[[Summary], float | None]
"""A figure of a run: its key, with dots for keys within (`deployed.greedy`), or a function."""
TWO, SIGNED = "{:.2f}", "{:+.3f}"


@dataclass(frozen=True)
class Column:
    """A cell is made of an arm's runs and the runs of the arm that it is compared with."""

    head: str
    cell: Callable[[list[Summary], list[Summary]], str]


# ---- figures -----------------------------------------------------------------------------------------------------


def value_of(run: Summary, value: Value) -> float | None:
    """None where the run lacks the key."""
    if callable(value):
        return value(run)
    found: Any = run
    for key in value.split("."):
        if found is None:
            return None
        found = found[int(key)] if isinstance(found, list) else found.get(key)
    return None if found is None else float(found)


def over_seeds(runs: Sequence[Summary], value: Value) -> Estimate | None:
    """Mean over the runs that have the figure."""
    values = [value_of(run, value) for run in runs]
    there = [v for v in values if v is not None]
    return mean_interval(there) if there else None


def paired(runs: Sequence[Summary], base: Sequence[Summary]) -> list[tuple[Summary, Summary]]:
    """Pairs of the same seed."""
    by_seed = {run["seed"]: run for run in base}
    return [(run, by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]


def against(runs: Sequence[Summary], base: Sequence[Summary], value: Value, *, as_ratio: bool) -> Estimate | None:
    """Paired differences, or ratios, of the pairs in which both have the figure."""
    pairs = []
    for run, other in paired(runs, base):
        a, b = value_of(run, value), value_of(other, value)
        if a is not None and b is not None:
            pairs.append((a, b))
    return paired_estimate(pairs, as_ratio)


def mean_curve(runs: Sequence[Summary]) -> np.ndarray:
    """float64 [evaluations, 4]: step, tokens, rollouts, pass@1; means over seeds."""
    curve: np.ndarray = np.mean([run["curve"] for run in runs], axis=0)
    return curve


def cost_to(curve: Sequence[Sequence[float]], level: float, axis: str) -> float | None:
    """Cost (`tokens` or `rollouts`) at which a curve of evaluations first is at a level, as `winnow compare` has it."""
    points = [Point(int(step), tokens, rollouts, passed) for step, tokens, rollouts, passed in curve]
    return reached_at(points, level, lambda point: float(getattr(point, axis)))


def merged(old: Mapping[str, list[Summary]], new: Mapping[str, list[Summary]], arms: Sequence[str]) -> Figures:
    """Arms and seeds that were not run again keep their figures."""
    found: Figures = {}
    for arm in arms:
        by_seed = {run["seed"]: run for runs in (old, new) for run in runs.get(arm, [])}
        if by_seed:
            found[arm] = [by_seed[seed] for seed in sorted(by_seed)]
    return found


# ---- text --------------------------------------------------------------------------------------------------------


def text(value: Estimate | None, form: str = "{:.3f}", scale: float = 1.0) -> str:
    """A mean, with its interval where there are seeds enough; a dash for none."""
    if value is None:
        return "–"
    mean = form.format(value.mean * scale)
    if value.low is None or value.high is None:
        return mean
    return f"{mean} ({form.format(value.low * scale)} to {form.format(value.high * scale)})"


def percent(value: Estimate | None) -> str:
    return text(value, "{:.0f}%", 100)


def mean(head: str, value: Value, form: str = "{:.3f}", scale: float = 1.0) -> Column:
    return Column(head, lambda runs, base: text(over_seeds(runs, value), form, scale))


def share(head: str, value: Value) -> Column:
    return mean(head, value, "{:.0f}%", 100)


def difference(head: str, value: Value, *, own: bool = False) -> Column:
    """Differences to the baseline; `own`: its own row has the zeros, too."""
    return _paired(head, value, SIGNED, as_ratio=False, own=own)


def ratio(head: str, value: Value, *, own: bool = True) -> Column:
    """Ratios to the baseline's; `own`: its own row has the ones, too."""
    return _paired(head, value, TWO, as_ratio=True, own=own)


def _paired(head: str, value: Value, form: str, *, as_ratio: bool, own: bool) -> Column:
    def cell(runs: list[Summary], base: list[Summary]) -> str:
        if runs is base and not own:
            return ""
        return text(against(runs, base, value, as_ratio=as_ratio), form)

    return Column(head, cell)


SEEDS = Column("seeds", lambda runs, base: str(len(runs)))


def table_of(
    runs: Figures,
    columns: Sequence[Column],
    arms: Sequence[str] | None = None,
    base: str | Callable[[str], str] = "",
    name: Callable[[str], str] = str,
    head: str = "arm",
) -> str:
    """A row for each of `arms` that has runs; `base` is the arm, or says for each, what they are compared with."""
    rows = []
    for arm in runs if arms is None else arms:
        if arm in runs:
            other = runs.get(base(arm) if callable(base) else base, [])
            rows.append([name(arm), *(column.cell(runs[arm], other) for column in columns)])
    return markdown([head, *(column.head for column in columns)], rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def fill(docs: Path, tables: Mapping[str, str]) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- end -->`. Exits when there is no such place."""
    page = docs.read_text(encoding="utf-8")
    for name, table in tables.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise SystemExit(f"{docs}: has no place for the table '{name}' (<!-- {name} --> ... <!-- end -->)")
        page = before + mark + table + end + after
    docs.write_text(page, encoding="utf-8")
