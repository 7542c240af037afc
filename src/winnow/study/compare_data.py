"""Data of run directories for a comparison: curves, figures, and which runs are seeds of one method."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..config import RunConfig
from ..config.options import MethodSpec
from ..record.account import is_hosted
from ..record.ledger import Ledger
from ..record.proof import FATES, sampled_tokens
from ..record.records import LEDGER, METRICS, read_config
from ..record.resume_keys import MAY_CHANGE_ON_RESUME, MEMORY_OPTIONS
from .report_data import Row, merge_steps, read_lines

PASSED = "eval/pass@1"
_DEFAULTS = {name: f.default for name, f in RunConfig.model_fields.items() if not f.is_required()}
"""Defaults for keys that runs of earlier versions do not have."""
_OF_A_SEED = {"seed", "output_dir", "run_name", "model"} | (
    MAY_CHANGE_ON_RESUME - {"max_steps", "eval_steps", "sync", "learner", "engine"}
)
"""Keys that may differ between seeds of one method, between machines or after a resume, without effect on results."""
_OPTIONS_OF_A_SEED = {"selector": frozenset({"profile"}), "engine": MEMORY_OPTIONS}
"""Options of methods that may differ like these keys."""
_METHODS = [name for name, f in RunConfig.model_fields.items() if f.annotation == MethodSpec]


@dataclass(frozen=True, slots=True)
class Point:
    """One held-out evaluation, and the cost of training so far."""

    step: int
    tokens: float
    rollouts: float
    passed: float


@dataclass(frozen=True)
class RunData:
    """One run directory. `tokens` and `rollouts` are all those sampled in training, whatever their fate."""

    path: Path
    config: dict[str, Any]
    finished: bool
    solved: bool
    """Ended before `max_steps`, with nothing left to learn."""
    curve: tuple[Point, ...]
    pass_at: dict[int, float]
    """The last evaluation's pass@k, by k."""
    tokens: float
    rollouts: float
    zero_variance: float | None
    """Zero-variance share of the groups rolled out in the last tenth of the steps."""
    evaluation_tokens: float
    """Tokens sampled for evaluations, and for profiles made during training."""
    notes: list[str] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))


def read_run_data(path: Path) -> RunData:
    """Read a run.

    Raises RunDirectoryError if `path` is no run directory, ConfigError if never evaluated, LedgerError if damaged.
    """
    notes: list[str] = []
    config = read_config(path)
    if "success_reward" in config:  # written by version 0.2
        least = config.pop("success_reward")
        config["success"] = None if least == 1 else {"function": None, "at_least": least}
    rows = merge_steps(read_lines(path / METRICS, notes))
    curve = _curve(rows)
    if not curve:
        remedy = "train it with eval_steps set"
        if is_hosted(path):
            remedy = "its evaluations are those of TRL or verl, so compare them there"
        elif any("eval/avg@n" in row for row in rows):
            remedy = "nothing told right answers from others; train it with success set"
        raise ConfigError(f"{path}: has no held-out evaluation to compare ({PASSED}); {remedy}")
    last = [row for row in rows if "eval/avg@n" in row or PASSED in row][-1]
    if PASSED not in last:
        raise ConfigError(f"{path}: right answers became unknown during the run; train it with success set")
    found = {name: re.fullmatch(r"eval/pass@([0-9]+)", name) for name in last}
    with Ledger.open(path / LEDGER, read_only=True) as ledger:
        totals = ledger.totals()
        finished, solved = (ledger.get_meta(key) == "true" for key in ("finished", "solved"))
        saved, planned = ledger.get_meta("saved"), config.get("max_steps")
    last_step, evaluated = int(saved) if saved else planned, curve[-1].step
    if finished and not solved and evaluated != last_step:
        if rows[-1]["step"] == last_step != planned:
            notes.append(f"It was ended at step {last_step} of {planned}; its last evaluation is of {evaluated}.")
        else:
            taken = f"the run took {last_step} steps, but the last evaluation in it is of {evaluated}"
            notes.append(f"{METRICS} is damaged: {taken}.")
    return RunData(
        path=path,
        config=config,
        finished=finished,
        solved=solved,
        curve=tuple(curve),
        pass_at={int(m[1]): last[name] for name, m in found.items() if m},
        tokens=sampled_tokens(totals),
        rollouts=sum(totals[fate]["rollouts"] for fate in FATES),
        zero_variance=_zero_variance(rows),
        evaluation_tokens=totals["evaluation"]["tokens"],
        notes=[f"{path}: {note}" for note in notes],
    )


def _curve(rows: Sequence[Row]) -> list[Point]:
    points, rollouts = [], 0.0
    for row in rows:
        rollouts += row.get("rollouts/sampled", _groups(row) * row.get("groups/size_mean", 0.0))
        if PASSED in row:
            points.append(Point(int(row["step"]), row["num_tokens"], rollouts, row[PASSED]))
    return points


def _zero_variance(rows: Sequence[Row]) -> float | None:
    steps = [row for row in rows if "frac_reward_zero_std" in row]
    late = steps[-max(1, len(steps) // 10) :] if steps else []
    groups = sum(_groups(row) for row in late)
    return sum(row["frac_reward_zero_std"] * _groups(row) for row in late) / groups if groups else None


def _groups(row: Row) -> float:
    return row.get("groups/rolled_out", 0.0)


def methods_of(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Return runs by method, in the order given: their configurations differ only in keys that go with a seed.

    Those keys are `seed`, `output_dir`, `run_name`, `model` (the seed's warm start), a selector's `profile` of that
    model, and keys without effect on results: how a run is saved, checked and reported, and what bounds its memory.
    Raises ConfigError on a seed twice in a method, and on runs of a method that were evaluated at different steps.
    """
    grouped: dict[frozenset[tuple[str, str]], list[RunData]] = {}
    for run in runs:
        grouped.setdefault(_identity(run.config), []).append(run)
    named: dict[str, list[RunData]] = {}
    for members in grouped.values():
        _check_method(members)
        named[_unused(_common_name(members), named)] = members
    return named


def single_runs(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Return every run as its own method, named by its directory."""
    named: dict[str, list[RunData]] = {}
    for run in runs:
        named[_unused(run.path.resolve().name, named)] = [run]
    return named


def namesake_notes(methods: Mapping[str, Sequence[RunData]]) -> list[str]:
    """Return a note for each method that has a number because another one has its name: the keys that differ."""
    notes = []
    for name, runs in methods.items():
        other = re.sub(r" \([0-9]+\)$", "", name)
        differing = _identity(runs[0].config) ^ _identity(methods.get(other, runs)[0].config)
        if differing:
            keys = ", ".join(sorted({key for key, _ in differing}))
            notes.append(f"{name} is a method of its own, as its runs differ from {other}'s in {keys}.")
    return notes


def _identity(config: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the keys that make a method, with their values as JSON."""
    rest = {k: v for k, v in (_DEFAULTS | dict(config)).items() if k not in _OF_A_SEED}
    rest |= {k: {"name": rest[k]} for k in _METHODS if isinstance(rest.get(k), str)}
    for key, free in _OPTIONS_OF_A_SEED.items():
        if isinstance(rest.get(key), dict):
            rest[key] = {k: v for k, v in rest[key].items() if k not in free}
    return frozenset((key, json.dumps(value, sort_keys=True)) for key, value in rest.items())


def _alike(a: RunData, b: RunData) -> bool:
    """Whether two runs were evaluated at the same steps, as far as both went; only a solved run may end earlier."""
    due = [[p.step for p in (run.curve[:-1] if run.solved else run.curve)] for run in (a, b)]
    n = min(map(len, due)) if a.solved or b.solved else max(map(len, due))
    return due[0][:n] == due[1][:n]


def _check_method(runs: Sequence[RunData]) -> None:
    by_seed: dict[int, RunData] = {}
    for run in runs:
        other = by_seed.setdefault(run.seed, run)
        if other is not run:
            raise ConfigError(
                f"{other.path} and {run.path}: the same method with the same seed {run.seed}; keep one, or compare "
                "them without --seeds"
            )
        first = runs[0]
        steps, wanted = [p.step for p in run.curve], [p.step for p in first.curve]
        if not _alike(run, first):
            raise ConfigError(
                f"{first.path} and {run.path}: one method, evaluated at different steps ({_steps(wanted)}; "
                f"{_steps(steps)}); train them alike, or compare them without --seeds"
            )


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:4]))
    return shown if len(steps) <= 4 else f"{shown} ... {steps[-1]}"


def _common_name(runs: Sequence[RunData]) -> str:
    """Return `greso` for greso-s0 and greso-s1, or for greso/s0 and greso/s1."""
    for parts in ([run.path.resolve().name for run in runs], [run.path.resolve().parent.name for run in runs]):
        bare = {re.sub(rf"[-_.](?:seed|s)?[-_.=]?0*{r.seed}$", "", name) for r, name in zip(runs, parts, strict=True)}
        name = bare.pop() if len(bare) == 1 else os.path.commonprefix(parts)  # noqa: RUF071
        name = re.sub(r"(?:^|[-_.])(?:seed|s)?[-_.=]*$", "", name)
        if len(runs) == 1 and re.fullmatch(rf"(?:seed|s)?[-_.=]?0*{runs[0].seed}", name):
            continue
        if name:
            return name
    return "method"


def _unused(name: str, used: Mapping[str, Any]) -> str:
    number = 2
    unused = name
    while unused in used:
        unused, number = f"{name} ({number})", number + 1
    return unused
