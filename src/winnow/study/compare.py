"""Methods compared over seeds: means with Student intervals, and paired differences to a baseline.

Runs are paired by seed: a seed's effect on both methods of a pair cancels in their difference. Costs are compared as
ratios (paired in log space, so that half and double weigh alike), everything else as differences.

Tokens to reach the baseline: the level is the final held-out pass@1 of the baseline's run of the same seed. A run
reaches it at its first evaluation at or over the level. The cost is interpolated linearly between that evaluation and
the one before it (on the axis of each cost: tokens, rollouts, steps). A run that stays below has no such cost: it
counts as not reached. Its ratio is missing from the mean, which therefore flatters a method that often fails.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..base.files import from_json
from ..config import RunConfig
from ..config.errors import suggestion
from ..methods.intervals import MIN_SEEDS, Estimate, mean_interval
from .compare_data import Point, RunData, methods_of, namesake_notes, read_run_data, single_runs

SAME_EVALUATION = (
    *("env", "eval_prompts", "eval_generations", "eval_temperature", "eval_top_p", "eval_top_k", "success"),
    *("reward_funcs", "reward_weights", "max_prompt_length", "max_completion_length", "context_length", "stop"),
    *("chat_template", "chat_template_kwargs", "history", "max_segments"),
)
"""Settings that must agree for a comparable pass@1 of two runs."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a run. `better` is 1 (more) or -1 (less)."""

    key: str
    label: str
    ratio: bool
    better: int


@dataclass(frozen=True)
class RunResult:
    """One run's figures by measure; None if undefined (level not reached, not logged)."""

    path: str
    seed: int
    finished: bool
    curve: tuple[Point, ...]
    values: dict[str, float | None]


@dataclass(frozen=True)
class MethodResult:
    """`means` over seeds, and `against` the baseline: paired differences, or ratios where the measure asks for them.

    An estimate's `n` is the number of seeds (pairs) behind it; None means no seeds.
    """

    name: str
    runs: tuple[RunResult, ...]
    means: dict[str, Estimate | None]
    against: dict[str, Estimate | None]
    paired: int
    """Runs with a baseline run of the same seed."""
    reached: int
    """Number of them that reached the baseline's final pass@1."""


@dataclass(frozen=True)
class Comparison:
    baseline: str
    measures: tuple[Measure, ...]
    methods: tuple[MethodResult, ...]
    """Methods in the order given."""
    notes: tuple[str, ...]


def compare(runs: Sequence[str | Path], seeds: bool = True, baseline: str | None = None) -> Comparison:
    """Compare run directories; with `seeds`, runs that differ only in their seed are one method.

    `baseline` names a method; default: the first one given. Without `seeds` every run is a method, compared with the
    baseline's run whatever its seed. With `seeds`, unfinished runs are refused, since a mean over unequal budgets is no
    figure of a method. Without `seeds` they count as far as they got, with a note. Raises ConfigError naming the runs,
    RunDirectoryError, LedgerError, FileNotFoundError.
    """
    if len(runs) < 2:
        raise ConfigError("a comparison needs at least two run directories")
    read = [read_run_data(Path(run)) for run in runs]
    unfinished = [run for run in read if not run.finished]
    if unfinished and seeds:
        names = ", ".join(str(run.path) for run in unfinished)
        raise ConfigError(f"not finished: {names}; finish with `winnow resume`, leave out, or compare without --seeds")
    methods = methods_of(read) if seeds else single_runs(read)
    baseline = baseline or next(iter(methods))
    if baseline not in methods:
        raise ConfigError(f"--baseline: there is no method '{baseline}'.{suggestion(baseline, list(methods))}")
    k = max(set.intersection(*(set(run.pass_at) for run in read)))
    measures = _measures(k)
    pair = (lambda run: run.seed) if seeds else (lambda run: 0)
    levels = {pair(run): run.pass_at[1] for run in methods[baseline]}
    results = {name: [_result(run, k, levels.get(pair(run))) for run in members] for name, members in methods.items()}
    pairs = {name: dict(zip(map(pair, members), results[name], strict=True)) for name, members in methods.items()}
    return Comparison(
        baseline,
        measures,
        tuple(_method(name, pairs[name], pairs[baseline], measures) for name in methods),
        (*(namesake_notes(methods) if seeds else ()), *_notes(methods, pairs, baseline, unfinished)),
    )


def _measures(k: int) -> tuple[Measure, ...]:
    best = [Measure(f"pass@{k}", f"pass@{k} at the end", False, 1)] if k > 1 else []
    return (
        Measure("pass@1", "pass@1 at the end", False, 1),
        *best,
        Measure("best_pass@1", "best pass@1", False, 1),
        Measure("tokens", "tokens sampled", True, -1),
        Measure("rollouts", "rollouts", True, -1),
        Measure("tokens_to_baseline", "tokens to the baseline's pass@1", True, -1),
        Measure("rollouts_to_baseline", "rollouts to it", True, -1),
        Measure("steps_to_baseline", "steps to it", True, -1),
        Measure("zero_variance", "zero-variance groups, last tenth", False, -1),
    )


def _result(run: RunData, k: int, level: float | None) -> RunResult:
    values: dict[str, float | None] = {
        "pass@1": run.pass_at[1],
        f"pass@{k}": run.pass_at[k],
        "best_pass@1": max(p.passed for p in run.curve),
        "tokens": run.tokens,
        "rollouts": run.rollouts,
        "zero_variance": run.zero_variance,
    }
    axes: dict[str, Callable[[Point], float]] = {
        "tokens": lambda p: p.tokens,
        "rollouts": lambda p: p.rollouts,
        "steps": lambda p: float(p.step),
    }
    for name, axis in axes.items():
        values[f"{name}_to_baseline"] = None if level is None else reached_at(run.curve, level, axis)
    return RunResult(str(run.path), run.seed, run.finished, run.curve, values)


def reached_at(curve: Sequence[Point], level: float, axis: Callable[[Point], float]) -> float | None:
    """Return where on `axis` a curve first reaches `level`, linear between evaluations; None if it stays below."""
    for before, point in zip((None, *curve), curve, strict=False):
        if point.passed >= level:
            if before is None:
                return axis(point)
            share = (level - before.passed) / (point.passed - before.passed)
            return axis(before) + share * (axis(point) - axis(before))
    return None


def _method(
    name: str, runs: Mapping[int, RunResult], baseline: Mapping[int, RunResult], measures: Sequence[Measure]
) -> MethodResult:
    means: dict[str, Estimate | None] = {}
    against: dict[str, Estimate | None] = {}
    for m in measures:
        values = [v for run in runs.values() if (v := run.values[m.key]) is not None]
        means[m.key] = mean_interval(values) if values else None
        if runs is baseline:
            against[m.key] = None
        else:
            both = [(run.values[m.key], baseline[s].values[m.key]) for s, run in runs.items() if s in baseline]
            against[m.key] = paired_estimate([(a, b) for a, b in both if a is not None and b is not None], m.ratio)
    reached = sum(run.values["tokens_to_baseline"] is not None for run in runs.values())
    paired = sum(s in baseline for s in runs)
    return MethodResult(name, tuple(runs.values()), means, against, paired, reached)


def paired_estimate(pairs: Sequence[tuple[float, float]], ratio: bool) -> Estimate | None:
    """Return the mean of a - b over pairs; for a ratio the geometric mean of a / b, over pairs with both over 0."""
    if not ratio:
        return mean_interval([a - b for a, b in pairs]) if pairs else None
    logs = [math.log(a / b) for a, b in pairs if a > 0 and b > 0]
    if not logs:
        return None
    e = mean_interval(logs)
    bounds = [None if x is None else math.exp(x) for x in (e.low, e.high)]
    return Estimate(math.exp(e.mean), bounds[0], bounds[1], e.n)


def _notes(
    methods: Mapping[str, list[RunData]],
    pairs: Mapping[str, Mapping[int, RunResult]],
    baseline: str,
    unfinished: Sequence[RunData],
) -> list[str]:
    """Return the notes that a reader needs with the table."""
    runs = [run for members in methods.values() for run in members]
    notes = [note for run in runs for note in run.notes]
    notes += [f"{run.path} is not finished; it ends at step {run.curve[-1].step}." for run in unfinished]
    for key in SAME_EVALUATION:
        if len({_setting(run.config, key) for run in runs}) > 1:
            notes.append(f"The runs differ in {key}, so their evaluations are not of the same thing.")
    small = [name for name, members in methods.items() if len(members) < MIN_SEEDS]
    if small:
        which = f": {', '.join(small)}" if len(small) < len(methods) else ""
        notes.append(f"No interval is given for fewer than {MIN_SEEDS} seeds{which}.")
    models = {run.seed: run.config.get("model") for run in methods[baseline]}
    for name, members in methods.items():
        lacking = [s for s in pairs[name] if s not in pairs[baseline]]
        if lacking:
            notes.append(f"{name}: {baseline} has no run of seed {', '.join(map(str, lacking))}; not paired.")
        starts = [run.seed for run in members if run.seed in models and run.config.get("model") != models[run.seed]]
        if starts:
            notes.append(f"{name}: starts from another model than {baseline} at seed {', '.join(map(str, starts))}.")
        free = [r.seed for r in pairs[name].values() if r.values["tokens_to_baseline"] == 0]
        if free:
            notes.append(
                f"{name}: at the baseline's final pass@1 before any training at seed {', '.join(map(str, free))}; "
                "such a pair has no cost ratio."
            )
        notes += _profile_costs(name, members)
    return notes


def _setting(config: Mapping[str, Any], key: str) -> str:
    """Return a setting as text; one that a run of an earlier version lacks has its default."""
    field = RunConfig.model_fields[key]
    value = config.get(key, None if field.is_required() else field.get_default(call_default_factory=True))
    return json.dumps({"name": value} if key == "env" and isinstance(value, str) else value, sort_keys=True)


def _profile_costs(name: str, runs: Sequence[RunData]) -> list[str]:
    """Return the cost of pass-rate profiles before training (as their `.meta.json` say) and during it."""
    before, during = [], []
    for run in runs:
        selector = run.config.get("selector")
        if not isinstance(selector, dict):
            continue
        if selector.get("profile"):
            with suppress(OSError, ValueError, KeyError, TypeError):  # a profile from elsewhere has no such file
                meta = from_json(Path(f"{selector['profile']}.meta.json").read_text("utf-8"))
                before.append(float(meta["cost"]["tokens"]))
        if selector.get("refresh_steps"):
            during.append(run.evaluation_tokens)
    notes = []
    if before:
        mean = sum(before) / len(before)
        notes.append(f"{name}: its profiles cost {mean:,.0f} tokens a run on top, not in the table.")
    if during:
        mean = sum(during) / len(during)
        notes.append(
            f"{name}: its profiles during training are not in the table; with the held-out evaluations they cost "
            f"{mean:,.0f} tokens a run."
        )
    return notes
