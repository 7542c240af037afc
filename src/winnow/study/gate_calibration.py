"""Calibration of a gate on recorded groups, with held-out figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

import numpy as np
import yaml

from ..config import ConfigError
from ..methods.gate.divergence import TERMINATION, config_entry
from .gate_effect import Effect, SweepRow, check_horizon, effect
from .gate_search import Choice, Plan, Search
from .gate_tables import Groups, Recorded, can_be_cut, rows_by_type, some

RESAMPLES = 1_000


@dataclass(frozen=True)
class Judged:
    """A plan, and its effect on some groups."""

    plan: Plan
    effect: Effect

    def __str__(self) -> str:
        return f"{self.plan}: {_counts(self.effect)}" if self.plan.cuts else str(self.plan)


@dataclass(frozen=True)
class Calibration:
    """The chosen plan, and the effect of such choices on groups they did not see."""

    bound: str
    t_max: int
    plan: Plan
    chosen: Effect
    """Effect of the plan on all groups, the ones it was chosen on; a `SweepRow` for one step and all groups."""
    folds: tuple[Judged, ...]
    """The choice without each fold, and its effect there."""
    held_out: Effect
    """Effect over all folds: every group is judged by the choice made without it."""
    parts: dict[str, Judged]
    """`together` and `one step`: the choices for all groups; `type ...`: that of a type on its groups. Empty for one
    step and all groups, which alone have what follows."""
    can_be_cut: str = ""
    intervals: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    """95% intervals, by name as in `Effect`. They ignore that the gate was chosen on the same groups."""
    random: Effect | None = None
    """Control arm, in expectation: as many cuts at the same step, at random among the groups that can be cut."""
    oracle: Effect | None = None
    """Oracle: cut exactly the zero-variance groups that can be cut, at the same step."""


def calibrate(recorded: Groups, search: Search, *, folds: int = 5, seed: int = 0) -> Calibration:
    """Choose a plan, and judge every group by the choice made without its fold.

    Raises ConfigError when no plan meets the bound, with fewer groups than folds, when the Ks of the table hold
    different groups, and on missing columns that the search needs.
    """
    groups = aligned(recorded)
    n, t_max = len(next(iter(groups.values()))), search.t_max
    _check(groups, search)
    if n < folds:
        raise ConfigError(f"{n} groups cannot be split into {folds} folds; record more")
    plan = search.plan(groups)
    if not plan.cuts:
        raise ConfigError(
            f"no threshold of any signal has {search.bound} with any cut; allow more, or record more groups"
        )
    fold_N = np.empty(n, int)
    fold_N[np.random.default_rng(seed).permutation(n)] = np.arange(n) % folds
    held_N, parts = np.zeros(n, int), []
    for fold in range(folds):
        mine_M = np.flatnonzero(fold_N == fold)
        choice, mine = search.plan(some(groups, np.flatnonzero(fold_N != fold))), some(groups, mine_M)
        held_N[mine_M] = choice.cut_at(mine)
        parts.append(Judged(choice, effect(mine, held_N[mine_M], t_max)))
    chosen, held_out = (effect(groups, at_N, t_max) for at_N in (plan.cut_at(groups), held_N))
    found = Calibration(str(search.bound), t_max, plan, chosen, tuple(parts), held_out, {})
    if search.most > 1 or search.per_task_type:
        return replace(found, parts=_parts(groups, plan, search))
    assert plan.rest is not None
    [(k, threshold)] = plan.rest.steps.items()
    random, oracle = _arms(chosen, groups[k], t_max)
    return replace(
        found,
        chosen=SweepRow(**asdict(chosen), k=k, signal=plan.rest.signal, threshold=threshold),
        can_be_cut=can_be_cut(groups[k]),
        intervals=_intervals(plan.cut_at(groups) > 0, groups[k], t_max, seed),
        random=random,
        oracle=oracle,
    )


def aligned(recorded: Groups) -> dict[int, Recorded]:
    """Return the same groups in one order at every K. Raises ConfigError when the Ks hold different ones."""
    ks = sorted(recorded)
    first = recorded[ks[0]]
    place = {task: i for i, task in enumerate(first.columns["task_id"])}
    found = {}
    for k in ks:
        at = recorded[k]
        if odd := set(place) ^ set(at.columns["task_id"]):
            raise ConfigError(
                f"{at.source}: K = {first.k} and K = {k} hold different groups, e.g. '{min(odd)}', so their savings "
                "cannot be compared; record every group at every K, or choose one with --k"
            )
        found[k] = at.only(np.argsort([place[task] for task in at.columns["task_id"]]))
    return found


def _check(groups: Groups, search: Search) -> None:
    for at in groups.values():
        check_horizon(at, search.t_max)
        if search.or_rule and (at.left_N is None or TERMINATION not in at.columns):
            raise ConfigError(
                f"{at.source}: the OR rule is chosen by the steps really saved, since who has ended saves none; it "
                f"needs the columns steps, steps_k and {TERMINATION}"
            )
    if search.per_task_type:
        rows_by_type(next(iter(groups.values())))


def _parts(groups: Groups, plan: Plan, search: Search) -> dict[str, Judged]:
    """Return each gate of a plan alone, and the best of one step."""
    found = {"together": _judged(plan.rest, groups, search.t_max)}
    rows = rows_by_type(next(iter(groups.values()))) if plan.types else {}
    for kind, own in plan.types.items():
        found[f"type {kind}"] = _judged(own, some(groups, rows[kind]), search.t_max)
    found["one step"] = _judged(replace(search, most=1).best(groups), groups, search.t_max)
    return found


def _judged(choice: Choice | None, groups: Groups, t_max: int) -> Judged:
    plan = Plan(choice, {})
    return Judged(plan, effect(groups, plan.cut_at(groups), t_max))


def _intervals(cut_N: np.ndarray, at: Recorded, t_max: int, seed: int) -> dict[str, tuple[float, float] | None]:
    """Return a percentile bootstrap over groups (Efron 1979)."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(RESAMPLES):
        rows_N = rng.integers(len(cut_N), size=len(cut_N))
        drawn.append(effect({at.k: at.only(rows_N)}, at.k * cut_N[rows_N], t_max))
    found: dict[str, tuple[float, float] | None] = {}
    for name in ("precision", "recall", "safe_pct", "raw_pct", "kept_norm"):
        values = [getattr(row, name) for row in drawn if getattr(row, name) is not None]
        found[name] = None
        if values:
            low, high = np.quantile(values, [0.025, 0.975])
            found[name] = (float(low), float(high))
    return found


def _arms(chosen: Effect, at: Recorded, t_max: int) -> tuple[Effect, Effect]:
    """Return the effects of random cuts among the groups that can be cut, and of the oracle."""
    possible = at.count(at.running_N)
    random = effect({at.k: at}, at.k * at.running_N, t_max, share=chosen.cut / possible)
    oracle = effect({at.k: at}, at.k * (at.running_N & at.zero_N), t_max)
    return replace(random, cut=chosen.cut, raw_pct=chosen.raw_pct), oracle


def config_section(found: Calibration) -> str:
    """Return the `gates` section of a run's YAML file."""
    rest = found.plan.rest
    entry = config_entry(rest, found.plan.types, None if rest is None else rest.termination)
    e, text = found.chosen, yaml.safe_dump({"gates": [entry]}, sort_keys=False)
    return f"# of {e.groups:g} recorded groups {e.cut:g} cut, {e.tp:g} of them zero-variance ({found.bound})\n{text}"


def lines(found: Calibration) -> list[str]:
    """Return text for the reader: the effect of the choice, and of such choices on unseen groups."""
    folds, held = f"{len(found.folds)} folds", found.held_out
    said = []
    if found.parts:
        said = [f"{name:<10} {part}" for name, part in found.parts.items()]
        if found.plan.types:
            said.insert(-1, f"by type    {_counts(found.chosen)}")
        said.append(f"held out   {_counts(held)} ({folds})")
    else:
        said.append(f"{found.can_be_cut}; only these count as cuts")
        row, intervals = asdict(found.chosen), []
        for name, interval in found.intervals.items():
            if interval is not None and row[name] is not None:
                digits = 1 if name.endswith("_pct") else 3
                intervals.append(f"{name} {row[name]:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]")
        said.append(f"95% over groups, of this gate: {', '.join(intervals)}")
        said.append(f"held out ({folds}): precision {_share(held)}, raw {held.raw_pct:.1f}% from {held.cut:g} cuts")
    return [*said, f"chosen without each fold: {' | '.join(str(fold.plan) for fold in found.folds)}"]


def _counts(row: Effect) -> str:
    return f"{row.cut:g} cut, {row.tp:g} rightly ({_share(row)}), {row.saved_pct:.1f}% saved"


def _share(row: Effect) -> str:
    return "–" if row.precision is None else f"{row.precision:.3f}"
