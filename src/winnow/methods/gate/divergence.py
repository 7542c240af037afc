"""Stop a whole group at an environment step when its trajectories have converged (Zhai and Wang 2026).

Trajectories that agree so far mostly end with the same reward, and such a group teaches nothing. The gate decides at
step k, when every trajectory has taken k steps or ended. It cuts if the group's divergence signal (signals.py) is under
a threshold (eq. 2), or, with the OR rule (eq. 3), if enough trajectories have ended. Beyond the paper: several
evaluation steps with a threshold each, of which the first that fires cuts; thresholds by task type; and a cut of groups
without progress, by the environment's progress number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...config.errors import suggestion
from ...config.options import CHECKED
from ...types import KEEP, EnvStep, GroupKind, GroupView, Verdict
from ..base import RunFacts, refuse_unused
from .base import FixedGate, GateContext
from .signals import SIGNALS, TERMINATION


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
    """Also cut when at least this share of trajectories has ended (the OR rule)."""
    progress: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Also cut when the best progress of a trajectory, as its environment reports it, is at most this."""
    per_task_type: dict[str, float | dict[int, float] | OfType] = field(default_factory=dict)
    """Task type -> a threshold at `k`, its own steps, a `signal` and `steps`, or 0 for never. Other types: as above."""
    task_type: str = "task_type"
    """Column of the prompts that holds the type."""

    def __post_init__(self) -> None:
        if self.steps and (self.k, self.threshold) != (Divergence.k, Divergence.threshold):
            raise ValueError("k and threshold have no effect with steps; remove them, or steps")
        if not self.per_task_type:
            refuse_unused(self, ["task_type"], "without per_task_type; remove it")
        if self.steps and any(own and isinstance(own, (int, float)) for own in self.per_task_type.values()):
            raise ValueError("per_task_type: with steps, a type needs steps of its own, e.g. {heat: {10: 0.1}}, or 0")
        for gate in (self.of_type(), *map(self.of_type, self.per_task_type)):
            if gate.signal not in SIGNALS:
                raise ValueError(f"signal: there is no {gate.signal!r}.{suggestion(gate.signal, list(SIGNALS))}")
            for k, threshold in gate.steps.items():
                if k < 1:
                    raise ValueError(f"k counts environment steps from 1, not {k}")
                if not 0 <= threshold <= 1:
                    raise ValueError(f"the threshold at step {k} must lie in [0, 1], not {threshold}")

    def of_type(self, task_type: str | None = None) -> OfType:
        """Return signal and thresholds for a task type; without steps: never."""
        own = None if task_type is None else self.per_task_type.get(task_type)
        if isinstance(own, OfType):
            return own
        if own is None:
            return OfType(self.signal, self.steps or {self.k: self.threshold})
        if isinstance(own, dict):
            return OfType(self.signal, own)
        return OfType(self.signal, {self.k: own} if own else {})

    def problems(self, run: RunFacts) -> Iterator[str]:
        """Yield task types without a prompt."""
        if not self.per_task_type:
            return
        known = {str(p.columns[self.task_type]) for p in run.prompts if p.columns.get(self.task_type) is not None}
        if unknown := sorted(set(self.per_task_type) - known):
            types = ", ".join(sorted(known)) or "none"
            yield f"per_task_type: no training prompt has {self.task_type} '{unknown[0]}'; types in the data: {types}"

    def build(self, context: GateContext) -> FixedGate:
        return FixedGate(context.name, DivergenceRule(self), SIGNALS.keys())


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

    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def at(self) -> tuple[EnvStep, ...]:
        gates = (self.options.of_type(), *map(self.options.of_type, self.options.per_task_type))
        return tuple(EnvStep(k) for k in sorted({k for gate in gates for k in gate.steps}))

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        """Return one verdict per view. Raises ValueError when `per_task_type` is set and a prompt has no such column,
        or `progress` is set and no trajectory has any."""
        return [self._decide(view) for view in views]

    def _decide(self, view: GroupView) -> Verdict:
        assert isinstance(view.at, EnvStep)
        o, k = self.options, view.at.k
        gate = o.of_type(self._task_type(view))
        threshold, signal = gate.steps.get(k), gate.signal
        there = [i for i, absent in enumerate(view.absent or (False,) * len(view.actions)) if not absent]
        if threshold is None or len(there) < 2:
            return KEEP
        actions, observations = [view.actions[i] for i in there], [view.observations[i] for i in there]
        values = {name: SIGNALS[name](actions, observations, k) for name in {signal, TERMINATION}}
        verdict = self.converged(values, signal, threshold, k)
        if o.progress is not None and verdict.keep:
            verdict = stuck(view, there, o.progress, k)
        return replace(verdict, evidence={signal: values[signal]})

    def converged(self, values: Mapping[str, float], signal: str, threshold: float, k: int) -> Verdict:
        """Cut or keep a group by its signals at step `k`; the reason of a cut names signal, value, threshold and k."""
        value, ended, limit = values[signal], values[TERMINATION], self.options.termination
        if value < threshold:
            reason = f"{signal} {value:.4g} < {threshold:g}"
        elif limit is not None and ended >= limit:
            reason = f"{TERMINATION} {ended:.4g} >= {limit:g}"
        else:
            return KEEP
        return Verdict(False, f"converged: {reason} at step {k}", counts_as=GroupKind.UNKNOWN)

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
