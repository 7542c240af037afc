"""Costs of a training step on this machine: the work of real steps, and seconds fitted to it.

Seconds of a step are a sum over its work: so many for each decode step, for each row decoded, and so on (`WORK`).
Tokens that siblings have in common are one row of decoding and one token of a prefix tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np

from ..types import Fate, Group, Rollout
from .simulate import squares

WORK = {
    "generate": ("decode_steps", "rows", "context", "tokens", "prompt_tokens", "groups"),
    "update": ("steps", "tree_tokens", "trained_tokens"),
    "rest": ("steps", "groups"),
}
"""Phase -> the work that its seconds are a sum over. `rows`: decoded; `context`: positions that these attend to;
`tokens`: sampled; `rest`: publishing and booking."""
TRIMMED = 0.1
"""Share of steps with the largest errors that a fit leaves out: another process has interrupted them."""
REUSED = 2 / 3
"""Worth of a group that is trained again, relative to a new one: on Countdown with `reuse.updates: 2`, one seed."""
Work = dict[str, float]


def add(work: Work, more: Work, times: float = 1.0) -> None:
    for name, amount in more.items():
        work[name] = work.get(name, 0.0) + times * amount


class Shape(NamedTuple):
    """The work of one group."""

    length: int
    """Decode steps of its longest rollout."""
    rows: float
    context: float
    tokens: float
    prompt_tokens: int

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Shape:
        """Return the shape of siblings of one segment each."""
        prompt, lengths = len(rollouts[0].prompt_ids), [len(rollout.token_ids) for rollout in rollouts]
        nodes: dict[tuple[int, int], int] = {}
        context = 0
        for rollout in rollouts:
            node = 0
            for depth, token in enumerate(rollout.token_ids[:-1].tolist()):  # the last token is not read
                before = len(nodes)
                node = nodes.setdefault((node, token), before + 1)
                context += (prompt + depth + 1) * (len(nodes) - before)
        return cls(max(lengths), len(nodes), context, sum(lengths), prompt)

    def scaled(self, times: float) -> Shape:
        """Return the shape of a group of `times` as many siblings, as if they had nothing more in common."""
        return Shape(self.length, times * self.rows, times * self.context, times * self.tokens, self.prompt_tokens)

    def generated(self) -> Work:
        return {**self._asdict(), "groups": 1.0}

    def trained(self, size: int) -> Work:
        return {
            "tree_tokens": self.prompt_tokens + self.rows,
            "trained_tokens": size * self.prompt_tokens + self.tokens,
        }


@dataclass
class Seen:
    """A finished group of a real run, as far as a simulation needs it."""

    prompt: str
    right: list[bool]
    """Of each sibling."""
    shapes: dict[int, Shape]
    """Of its first siblings, by their number."""

    @classmethod
    def of(cls, group: Group, right: Sequence[bool]) -> Seen:
        siblings, size = group.siblings, len(group.siblings)
        sizes = sorted({size, *(2**i for i in range(1, size.bit_length()))})
        return cls(group.prompt.id, list(right), {n: Shape.of(siblings[:n]) for n in sizes})


class Shapes:
    """Shapes of groups by size and share of right answers: groups without a signal have more in common."""

    def __init__(self, seen: Iterable[Seen]) -> None:
        by_size: dict[int, list[tuple[float, int, Shape]]] = {}
        for number, group in enumerate(seen):
            for size, shape in group.shapes.items():
                by_size.setdefault(size, []).append((float(np.mean(group.right[:size])), number, shape))
        self._by_size = {size: sorted(found) for size, found in by_size.items()}
        self._shares = {size: np.array([share for share, *_ in found]) for size, found in self._by_size.items()}
        self._taken = 0

    def next(self, size: int, right: float) -> Shape:
        """Return the shape of a group of which `right` siblings are right: in turn one of those that are most alike."""
        known = min(self._by_size, key=lambda n: (abs(np.log(n / size)), n))
        shares, share = self._shares[known], right / size
        nearest = float(shares[np.abs(shares - share).argmin()])
        low, high = np.searchsorted(shares, [nearest - 1e-9, nearest + 1e-9])
        self._taken += 1
        shape = self._by_size[known][low + self._taken % (high - low)][2]
        return shape if known == size else shape.scaled(size / known)


@dataclass
class Step:
    """A training step of a real run."""

    work: Work
    seconds: dict[str, float]
    """By phase."""
    signal: float
    """Squared deviations of the rewards of the groups that it trained on from their means."""


@dataclass
class Recorder:
    """A callback that counts the work of each step."""

    clock: Callable[[], float] = time.perf_counter
    finished: list[Group] = field(default_factory=list)
    """Groups that finished in the last step."""
    _waiting: list[Group] = field(default_factory=list)
    _trained: list[Group] = field(default_factory=list)

    def on_step_end(self, args: Any, state: Any, control: Any, groups: Sequence[Group], **more: Any) -> None:
        self.finished = list(groups)
        self._trained, still = [], []
        for group in [*self._waiting, *groups]:
            fates = {rollout.fate for rollout in group.rollouts}
            if Fate.TRAINED in fates:
                self._trained.append(group)
            elif None in fates:  # carried to a later step
                still.append(group)
        self._waiting = still

    def observe(self, trainer: Any) -> Step:
        """Run a step of `trainer`, whose callback this is; return its work and seconds."""
        started, decoded = self.clock(), getattr(trainer.engine, "clock", 0)
        metrics = trainer.step()
        whole = self.clock() - started
        work = {"steps": 1.0, "decode_steps": getattr(trainer.engine, "clock", 0.0) - decoded}
        for group in self.finished:
            add(work, Shape.of(group.siblings).generated())
        for group in filter(trainer.methods.judge.teaches, self._trained):
            add(work, Shape.of(group.siblings).trained(len(group.siblings)))
        times = {name: metrics.get(f"seconds/{name}", 0.0) for name in ("generate", "update", "reuse")}
        seconds = {"generate": times["generate"], "update": times["update"] + times["reuse"]}
        signal = sum(squares(group.known_rewards()) for group in self._trained)
        again = REUSED * metrics.get("reuse/groups", 0.0) / max(1, len(self._trained))
        return Step(work, seconds | {"rest": whole - sum(times.values())}, signal * (1 + again))


@dataclass(frozen=True)
class Costs:
    """Seconds of each kind of work, by phase."""

    seconds: Mapping[str, Mapping[str, float]]

    @classmethod
    def fitted(cls, steps: Sequence[Step]) -> Costs:
        """Fit the costs of every phase to steps of several settings."""
        return cls({phase: _fitted(names, steps, phase) for phase, names in WORK.items()})

    def of(self, work: Mapping[str, float], phase: str | None = None) -> float:
        """Return the predicted seconds of one phase, or of all."""
        phases = WORK if phase is None else [phase]
        return sum(cost * work.get(name, 0.0) for each in phases for name, cost in self.seconds[each].items())


def _fitted(names: Sequence[str], steps: Sequence[Step], phase: str) -> dict[str, float]:
    """Return costs >= 0 with the least relative errors; again without the worst steps."""
    work_SW = np.array([[step.work.get(name, 0.0) for name in names] for step in steps], dtype=np.float64)
    seconds_S = np.maximum([step.seconds[phase] for step in steps], 1e-9)
    whole_S = np.array([sum(step.seconds.values()) for step in steps])
    weight_S = 1 / np.maximum(seconds_S, 0.01 * whole_S)  # the error of a phase counts by its share of the step
    cost_W = _nonnegative(work_SW * weight_S[:, None], seconds_S * weight_S)
    error_S = np.abs((work_SW @ cost_W - seconds_S) * weight_S)
    kept = np.argsort(error_S, kind="stable")[: max(len(names), int(np.ceil((1 - TRIMMED) * len(steps))))]
    cost_W = _nonnegative((work_SW * weight_S[:, None])[kept], (seconds_S * weight_S)[kept])
    return dict(zip(names, cost_W.tolist(), strict=True))


def _nonnegative(a_SW: np.ndarray, b_S: np.ndarray) -> np.ndarray:
    """Return x >= 0 with the least |a x - b|, over all subsets of columns, which are few."""
    best_W, least = np.zeros(a_SW.shape[1]), float(b_S @ b_S)
    columns = range(a_SW.shape[1])
    scale_W = np.maximum(np.abs(a_SW).max(axis=0), 1e-12)
    for some in chain.from_iterable(combinations(columns, n) for n in range(1, len(columns) + 1)):
        part = list(some)
        x, *_ = np.linalg.lstsq(a_SW[:, part] / scale_W[part], b_S, rcond=1e-9)
        error = a_SW[:, part] @ (x / scale_W[part]) - b_S
        if (x >= 0).all() and float(error @ error) < least * (1 - 1e-9):
            least = float(error @ error)
            best_W = np.zeros(len(columns))
            best_W[part] = x / scale_W[part]
    return best_W
