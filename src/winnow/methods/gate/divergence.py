"""Stop a whole group at an environment step when its trajectories have converged (Zhai and Wang 2026).

Trajectories that agree so far mostly end with the same reward, and such a group teaches nothing. The gate decides at
step k, when every trajectory has taken k steps or ended. It cuts if the group's divergence signal (signals.py) is under
a threshold (eq. 2), or, with the OR rule (eq. 3), if enough trajectories have ended. Beyond the paper: several
evaluation steps with a threshold each, of which the first that fires cuts; thresholds by task type; a cut of groups
without progress, by the environment's progress number; and a threshold refitted during training (refit.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import Field, NonNegativeInt
from pydantic.dataclasses import dataclass

from ...base.options import CHECKED
from ...config import suggestion
from ...types import KEEP, EnvStep, Group, GroupKind, GroupView, Verdict
from ..base import RunFacts
from .base import Gate, GateContext, of_gate
from .refit import Refit
from .signals import SIGNALS, TERMINATION

Rule = Literal["or", "and", "mirror"]
RULES: Final[tuple[Rule, ...]] = ("or", "and", "mirror")


def fires(value: Any, threshold: float, ended: Any = None, limit: float | None = None, rule: Rule = "or") -> np.ndarray:
    """Return whether to cut: bool, of the shape of `value`. Numbers or arrays, one entry per group.

    Without `limit`: value < threshold. With it the termination fraction `ended` counts too. `or` cuts if value <
    threshold or ended >= limit (eq. 3), `and` if both hold. `mirror` cuts if value < threshold or ended <= limit
    (appendix E.9's attempt at groups that fail throughout).
    """
    below: np.ndarray = np.asarray(value) < threshold
    if limit is None:
        return below
    many: np.ndarray = np.asarray(ended) <= limit if rule == "mirror" else np.asarray(ended) >= limit
    return below & many if rule == "and" else below | many


def stuck(view: GroupView, sound: list[int], limit: float, k: int) -> Verdict:
    """Cut a group in which every trajectory's progress is at most `limit`: all will fail. Raises ValueError when no
    environment reports progress."""
    given = [p for p in (view.progress[i] for i in sound if view.progress) if p is not None]
    if not given:
        raise ValueError(
            f"gate divergence: progress is set, but the environment of prompt '{view.visit.prompt.id}' gave none by "
            f'step {k}; return StepResult(info={{"progress": NUMBER}}), or remove progress'
        )
    if max(given) > limit:
        return KEEP
    reason = f"stuck: best progress {max(given):.4g} <= {limit:g} at step {k}"
    return Verdict(False, reason, counts_as=GroupKind.HARD)


@dataclass(frozen=True)
class OfType:
    """Gate of one task type: its own signal and thresholds by evaluation step."""

    signal: str
    steps: dict[int, float]


@dataclass(frozen=True, config=CHECKED)
class Divergence:
    """Cut a group whose trajectories agree at an environment step (Zhai and Wang 2026)."""

    signal: str = "prefix_edit_distance"
    k: int = 10
    threshold: float = 0.12
    steps: dict[int, float] = field(default_factory=dict)
    """Several evaluation steps with their thresholds, in place of `k` and `threshold`."""
    termination: Annotated[float, Field(gt=0, le=1)] | None = None
    """Limit on the share of ended trajectories; with it, that share counts too."""
    rule: Literal["or", "and"] = "or"
    progress: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Also cut when the best progress of a trajectory, as its environment reports it, is at most this."""
    per_task_type: dict[str, float | dict[int, float] | OfType] = field(default_factory=dict)
    """Task type -> a threshold at `k`, its own steps, a `signal` and `steps`, or 0 for never. Other types: as above."""
    task_type: str = "task_type"
    """Column of the prompts that holds the type."""
    refit_every: NonNegativeInt = 0
    """Refit the threshold every so many optimizer steps, from observed groups; 0: never. Needs `audit`."""
    precision: Annotated[float, Field(gt=0, le=1)] = 0.8
    """With `refit_every`: lowest share of cuts that must be right."""

    def __post_init__(self) -> None:
        for signal in (self.signal, *map(self.signal_of, self.per_task_type)):
            if signal not in SIGNALS:
                raise ValueError(f"signal: there is no {signal!r}.{suggestion(signal, list(SIGNALS))}")
        if self.steps and (self.k, self.threshold) != (Divergence.k, Divergence.threshold):
            raise ValueError("k and threshold have no effect with steps; remove them, or steps")
        if self.rule == "and" and self.termination is None:
            raise ValueError("rule: and needs termination, the share of trajectories that must have ended")
        self._check_refit()
        if self.task_type != Divergence.task_type and not self.per_task_type:
            raise ValueError("task_type has no effect without per_task_type; remove it")
        if self.steps and any(own and isinstance(own, (int, float)) for own in self.per_task_type.values()):
            raise ValueError("per_task_type: with steps, a type needs steps of its own, e.g. {heat: {10: 0.1}}, or 0")
        for plan in (self.plan(), *map(self.plan, self.per_task_type)):
            for k, threshold in plan.items():
                if k < 1:
                    raise ValueError(f"k counts environment steps from 1, not {k}")
                if not 0 <= threshold <= 1:
                    raise ValueError(f"the threshold at step {k} must lie in [0, 1], not {threshold}")

    def _check_refit(self) -> None:
        if self.precision != Divergence.precision and not self.refit_every:
            raise ValueError("precision has no effect without refit_every; remove it")
        for name in ("steps", "termination", "progress", "per_task_type"):
            if self.refit_every and getattr(self, name) != getattr(DEFAULTS, name):
                raise ValueError(f"refit_every chooses one threshold, at k; remove {name}, or refit_every")

    def plan(self, task_type: str | None = None) -> dict[int, float]:
        """Return step -> threshold, for a task type."""
        own = self.per_task_type.get(task_type) if task_type is not None else None
        if own is None:
            return self.steps or {self.k: self.threshold}
        if isinstance(own, OfType):
            return own.steps
        if isinstance(own, dict):
            return own
        return {self.k: own} if own else {}

    def signal_of(self, task_type: str | None) -> str:
        own = self.per_task_type.get(task_type) if task_type is not None else None
        return own.signal if isinstance(own, OfType) else self.signal

    def problems(self, run: RunFacts) -> Iterator[str]:
        """Yield task types without a prompt, and a refit without data."""
        if self.refit_every and run.config.audit is None:
            yield "refit_every needs audits, to see what the gate cuts; set audit: {epsilon: 0.2}, or remove it"
        if not self.per_task_type:
            return
        known = {str(p.columns[self.task_type]) for p in run.prompts if p.columns.get(self.task_type) is not None}
        if unknown := sorted(set(self.per_task_type) - known):
            there = ", ".join(sorted(known)) or "none"
            yield f"per_task_type: no training prompt has {self.task_type} '{unknown[0]}'; there: {there}"

    def build(self, context: GateContext) -> DivergenceGate:
        return DivergenceGate(self, context)


DEFAULTS: Final = Divergence()


def config_entry(rest: OfType | None, types: Mapping[str, OfType | None]) -> dict[str, Any]:
    """Return a run's `gates` entry for gates of one step each, of all groups and by task type; None: never."""
    own: dict[str, Any] = {}
    for kind, gate in types.items():
        own[kind] = 0 if gate is None else {"signal": gate.signal, "steps": gate.steps}
    if rest is None:
        k = min(k for gate in types.values() if gate is not None for k in gate.steps)
        entry: dict[str, Any] = {"name": "divergence", "k": k, "threshold": 0.0}
    else:
        [(k, threshold)] = rest.steps.items()
        entry = {"name": "divergence", "signal": rest.signal, "k": k, "threshold": threshold}
    return entry | ({"per_task_type": own} if own else {})


@dataclass(frozen=True)
class DivergenceRule:
    """Decides by the signals of the siblings present; siblings that failed or were pruned are no evidence."""

    options: Divergence
    threshold: float | None = None
    """Refitted threshold; None: that of the options."""

    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def at(self) -> tuple[EnvStep, ...]:
        plans = (self.options.plan(), *map(self.options.plan, self.options.per_task_type))
        return tuple(EnvStep(k) for k in sorted({k for plan in plans for k in plan}))

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        """Return one verdict per view. Raises ValueError when `per_task_type` is set and a prompt has no such column,
        or `progress` is set and no trajectory has any."""
        return [self._decide(view) for view in views]

    def _decide(self, view: GroupView) -> Verdict:
        assert isinstance(view.at, EnvStep)
        o, k, kind = self.options, view.at.k, self._task_type(view)
        threshold, signal = o.plan(kind).get(k), o.signal_of(kind)
        there = [i for i, absent in enumerate(view.absent or (False,) * len(view.actions)) if not absent]
        if threshold is None or len(there) < 2:
            return KEEP
        if self.threshold is not None:
            threshold = self.threshold
        actions, observations = [view.actions[i] for i in there], [view.observations[i] for i in there]
        values = {name: SIGNALS[name](actions, observations, k) for name in {signal, TERMINATION}}
        verdict = self.converged(values, signal, threshold, k)
        if o.progress is not None and verdict.keep:
            verdict = stuck(view, there, o.progress, k)
        return replace(verdict, evidence={signal: values[signal]})

    def converged(self, values: Mapping[str, float], signal: str, threshold: float, k: int) -> Verdict:
        """Cut or keep a group by its signals at step `k`; the reason of a cut names signal, value, threshold and k."""
        o, value, ended = self.options, values[signal], values[TERMINATION]
        if not fires(value, threshold, ended, o.termination, o.rule):
            return KEEP
        found = [f"{signal} {value:.4g} < {threshold:g}"] if value < threshold else []
        if o.termination is not None and (o.rule == "and" or not found):
            found.append(f"{TERMINATION} {ended:.4g} >= {o.termination:g}")
        return Verdict(False, f"converged: {' and '.join(found)} at step {k}", counts_as=GroupKind.UNKNOWN)

    def _task_type(self, view: GroupView) -> str | None:
        if not self.options.per_task_type:
            return None
        prompt, column = view.visit.prompt, self.options.task_type
        if column not in prompt.columns:
            raise ValueError(
                f"gate divergence: per_task_type looks for column '{column}', but prompt '{prompt.id}' has only "
                f"{', '.join(prompt.columns) or 'none'}; set task_type to the column that holds the type"
            )
        return str(prompt.columns[column])


class DivergenceGate(Gate):
    """Counts decisions, and with `refit_every` moves the threshold."""

    def __init__(self, options: Divergence, context: GateContext) -> None:
        self.options = options
        self.name = context.name
        self.judge = context.judge
        self.refit = Refit(options.threshold, options.refit_every, options.precision) if options.refit_every else None
        self._values: dict[str, list[float]] = {}
        """Signal -> its value at each decision."""
        self._cut = 0

    def rule(self) -> DivergenceRule:
        return DivergenceRule(self.options, None if self.refit is None else self.refit.threshold)

    def observe(self, group: Group) -> None:
        """With `refit_every`, learn from groups with a decision that ran to their end."""
        taken = [d.verdict for d in of_gate(group.decisions, self.name)]
        judged = [(signal, verdict) for verdict in taken for signal in SIGNALS if signal in verdict.evidence]
        for signal, verdict in judged:  # audits have their own entries in the evidence
            self._values.setdefault(signal, []).append(verdict.evidence[signal])
            self._cut += verdict.removes
        members = group.siblings
        if self.refit is not None and judged and all(r.reward is not None for r in members):
            value = judged[-1][1].evidence[self.options.signal]
            zero_variance = self.judge.by_rewards(group).zero_variance
            decisions = list(group.decisions)
            for rollout in members:
                decisions += rollout.decisions
            self.refit.observe(value, zero_variance, math.prod(d.verdict.probability for d in decisions))

    def end_step(self) -> None:
        self._values, self._cut = {}, 0
        if self.refit is not None:
            self.refit.end_step()

    def metrics(self) -> dict[str, float]:
        """Return metrics of decisions on this step's groups: their number, the share cut, each signal's mean.

        Empty without decisions. With `refit_every` also the threshold, and the number of groups for the next refit.
        """
        found = dict(self.refit.metrics()) if self.refit is not None else {}
        if asked := sum(map(len, self._values.values())):
            found |= {"asked": float(asked), "cut_share": self._cut / asked}
            found |= {signal: float(np.mean(values)) for signal, values in self._values.items()}
        return {f"gate/{self.name}/{name}": value for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.refit is None else self.refit.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.refit is not None:
            self.refit.load_state_dict(state)
