"""Tables of the claims: columns as data, means over seeds with the intervals of `winnow compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from winnow.methods.intervals import Estimate, mean_interval
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


def value_of(run: Summary, value: Value) -> float | None:
    """None where the run lacks the key."""
    if callable(value):
        return value(run)
    held: Any = run
    for key in value.split("."):
        if isinstance(held, list):
            held = held[int(key)]
        elif isinstance(held, dict):
            held = held.get(key)
        else:
            return None
    return None if held is None else float(held)


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


Curve = list[list[float]]
"""Step, tokens, rollouts and held-out pass@1 of each evaluation."""


def curve_of(run: Summary, axis: str = "tokens") -> Curve | None:
    """The run's curve, with what `axis` names (`seconds`, `sampled`, `rollouts`) as its cost; None if not recorded."""
    if axis == "tokens":
        return list(run["curve"])
    if axis == "rollouts":
        return [[point[0], point[2], *point[2:]] for point in run["curve"]]
    if f"{axis}_at" not in run:
        return None
    return [[point[0], cost, *point[2:]] for point, cost in zip(run["curve"], run[f"{axis}_at"], strict=True)]


def cost_to(curve: Curve, level: float) -> float | None:
    """Cost at which a curve first is at a level of pass@1, as `winnow compare` has it."""
    points = [Point(int(step), cost, rollouts, passed) for step, cost, rollouts, passed in curve]
    return reached_at(points, level, lambda point: point.tokens)


def at_cost(curve: Curve, cost: float) -> float:
    """Held-out pass@1 at a cost, between evaluations by a straight line."""
    return float(np.interp(cost, [point[1] for point in curve], [point[3] for point in curve]))


def merged(old: Mapping[str, list[Summary]], new: Mapping[str, list[Summary]]) -> Figures:
    """Arms and seeds that were not run again keep their figures."""
    both: Figures = {}
    for arm in dict.fromkeys([*old, *new]):
        by_seed = {run["seed"]: run for runs in (old, new) for run in runs.get(arm, [])}
        both[arm] = [by_seed[seed] for seed in sorted(by_seed)]
    return both


def text(value: Estimate | None, form: str = "{:.3f}", scale: float = 1.0) -> str:
    """A mean, with its interval where there are seeds enough; blank without a figure."""
    if value is None:
        return ""
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


def difference(head: str, value: Value) -> Column:
    """Differences to the baseline, whose own row is blank."""
    return _paired(head, value, SIGNED, as_ratio=False, own=False)


def ratio(head: str, value: Value, *, own: bool = True) -> Column:
    """Ratios to the baseline's; `own`: its own row has the ones, too."""
    return _paired(head, value, TWO, as_ratio=True, own=own)


def _paired(head: str, value: Value, form: str, *, as_ratio: bool, own: bool) -> Column:
    def cell(runs: list[Summary], base: list[Summary]) -> str:
        if runs is base and not own:
            return ""
        return text(against(runs, base, value, as_ratio=as_ratio), form)

    return Column(head, cell)


def to_level(head: str, part: float, axis: str = "tokens") -> Column:
    """Cost to a part of the base's final pass@1, as a share of the base's own, of the same seed."""

    def cell(runs: list[Summary], base: list[Summary]) -> str:
        costs, pairs = [], 0
        for run, other in paired(runs, base):
            curve, base_curve = curve_of(run, axis), curve_of(other, axis)
            if curve is None or base_curve is None:
                continue
            pairs += 1
            own, of_base = (cost_to(each, part * base_curve[-1][3]) for each in (curve, base_curve))
            if own and of_base:
                costs.append((own, of_base))
        missed = pairs - len(costs)
        return text(paired_estimate(costs, True), TWO) + (f"; {missed} of {pairs} did not get there" if missed else "")

    return Column(head, cell)


def at_equal_tokens(head: str) -> Column:
    """Difference in pass@1 where the cheaper of a pair ends."""

    def cell(runs: list[Summary], base: list[Summary]) -> str:
        passed = []
        for run, other in paired(runs, base):
            cost = min(run["curve"][-1][1], other["curve"][-1][1])
            passed.append((at_cost(run["curve"], cost), at_cost(other["curve"], cost)))
        return text(paired_estimate(passed, False), SIGNED)

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
        if runs.get(arm):
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
