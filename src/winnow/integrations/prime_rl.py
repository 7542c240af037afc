"""Winnow's selectors as a task sampler of prime-rl's curricula.

    sampler = WinnowSampler(tasks, "greso", groups_per_step=32)

It follows the interface of prime-rl's `TaskSampler` (`__next__`, `observe`, `state_dict`, `load_state_dict`,
`metrics`) and imports nothing of prime-rl. It keeps no ledger: prime-rl does not report what becomes of a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ..base.errors import ConfigError
from ..base.state import Count, State, at
from ..config.options import MethodSpec, method, name_of
from ..env.rewards.scores import MAX_REWARD
from ..methods.advantage import ADVANTAGES
from ..methods.group_kind import GroupJudge
from ..methods.select import SELECTORS, StreamSelector
from ..methods.success import Success
from ..record.stop_conditions import nothing_left
from ..types import Fate, Group, Prompt, Rollout, Visit
from .verl_rollouts import without_tokens


class SamplerState(State):
    selector_name: str
    seed: Count
    tasks: Annotated[str, Field(min_length=64, max_length=64)]
    """Digest of the tasks' keys, in order."""
    step: Count
    observed: Count
    """Groups since the last step."""
    selector: dict[str, Any]


class WinnowSampler(Iterator[Any]):
    """Chooses the next task by a selector, which learns from every finalized group.

    `tasks`: a finite taskset, of one environment. `selector`: a name, or `{name: ..., option: value}`.
    `groups_per_step`: groups after which a step is counted, since selectors adjust once a step. `group_size`: rollouts
    of a group; those that do not arrive are then unknown. `at_least`: reward of a right answer. Raises ConfigError
    naming the argument, its value and the remedy.
    """

    def __init__(
        self,
        tasks: Sequence[Any],
        selector: MethodSpec,
        *,
        groups_per_step: int,
        group_size: int | None = None,
        seed: int = 0,
        at_least: float = 1.0,
    ) -> None:
        if not isinstance(tasks, Sequence):
            raise ConfigError(f"tasks: a selector needs a finite taskset, not {type(tasks).__name__}; set num_tasks")
        if not tasks:
            raise ConfigError("tasks: none were given; a selector needs at least one")
        if groups_per_step < 1:
            raise ConfigError(f"groups_per_step: must be at least 1 (got {groups_per_step})")
        if group_size is not None and group_size < 1:
            raise ConfigError(f"group_size: must be at least 1 (got {group_size})")
        self._tasks, self._name, self._seed = tasks, name_of(selector), seed
        self._groups_per_step, self._group_size = groups_per_step, group_size or 0
        keys = [str(task.key) for task in tasks]
        self._ordinals = {key: ordinal for ordinal, key in enumerate(keys)}
        if len(self._ordinals) < len(keys):
            twice = next(key for ordinal, key in enumerate(keys) if self._ordinals[key] != ordinal)
            raise ConfigError(f"tasks: two have the key '{twice}'; keys must differ")
        self._digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()
        advantage = method(ADVANTAGES, "grpo", "advantage")
        self._judge = GroupJudge(Success(at_least=at_least), advantage=advantage)
        prompts = [Prompt(key, n, text=key, columns=_columns(tasks[n])) for n, key in enumerate(keys)]
        options = method(SELECTORS, selector, "selector")
        if getattr(options, "refresh_steps", None):
            raise ConfigError("selector: refresh_steps rolls out all prompts periodically, which prime-rl cannot do")
        try:
            self._selector: StreamSelector = options.build(prompts, seed, self._judge)
        except ValueError as error:
            raise ConfigError(f"selector: {error}") from None
        self._epoch_N = np.zeros(len(keys), np.int64)
        """Epoch of each task's last visit."""
        self._step = self._observed = 0
        self._metrics: dict[str, float] = {}

    def __next__(self) -> Any:
        """Return the next task to roll out. Raises RunStoppedError if the selector skips everything."""
        visits = self._selector.select(1)
        if not visits[-1].verdict.keep:
            raise nothing_left(self._step, visits)
        ordinal = visits[-1].prompt.ordinal
        self._epoch_N[ordinal] = visits[-1].epoch
        return self._tasks[ordinal]

    def observe(self, group: Sequence[Any]) -> None:
        """Learn from a finalized group of episodes. Traces that failed are absent, never a reward of 0."""
        key = str(group[0].task.key)
        if key not in self._ordinals:
            raise ConfigError(f"a group has the task '{key}', which is not one of the {len(self._tasks)} tasks")
        ordinal = self._ordinals[key]
        rollouts = [_rollout(sibling, trace) for sibling, trace in enumerate(_trainable(group))]
        if rollouts:
            arrived, missing = len(rollouts), self._group_size - len(group)
            rollouts += [without_tokens(arrived + i, fate=Fate.FAILED) for i in range(missing)]
            visit = Visit(self._selector.visits, int(self._epoch_N[ordinal]), self._selector.prompts[ordinal])
            self._judge.success.observe(rollouts)
            self._selector.observe_group(Group(visit, rollouts))
        self._observed += 1
        if self._observed >= self._groups_per_step:
            self._metrics = self._selector.metrics()
            self._selector.end_step()
            self._step, self._observed = self._step + 1, 0

    def metrics(self) -> dict[str, float]:
        """Return the selector's metrics of its last whole step."""
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for prime-rl's checkpoint, as JSON values."""
        return {
            "selector_name": self._name,
            "seed": self._seed,
            "tasks": self._digest,
            "step": self._step,
            "observed": self._observed,
            "selector": self._selector.state_dict(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore a state. Raises ConfigError for one of other tasks or settings, StateError for what is none."""
        with at("sampler"):
            saved = SamplerState.of(state)
        now = {"selector": self._name, "seed": self._seed}
        there = {"selector": saved.selector_name, "seed": saved.seed}
        if changed := [f"{key} ({there[key]}, now {now[key]})" for key in now if there[key] != now[key]]:
            raise ConfigError(f"checkpoint: saved with other {', '.join(changed)}; go on with the same")
        if saved.tasks != self._digest:
            raise ConfigError("checkpoint: saved with other tasks; go on with the same taskset")
        with at("sampler.selector"):
            self._selector.load_state_dict(saved.selector)
        self._step, self._observed = saved.step, saved.observed


def _columns(task: Any) -> dict[str, Any]:
    """Return the texts and numbers of a task's data."""
    return {name: value for name, value in dict(task.data).items() if isinstance(value, str | int | float)}


def _trainable(group: Sequence[Any]) -> list[Any]:
    return [trace for episode in group for trace in episode.traces if trace.agent.trainable]


def _rollout(sibling: int, trace: Any) -> Rollout:
    """Return a trace as a rollout without tokens, which no selector reads."""
    rollout = without_tokens(sibling)
    scored = any(reward is not None for reward in trace.rewards.values())
    sampled = any(any(node.mask) for node in trace.nodes)  # prime-rl trains on no other
    if trace.has_error or not sampled or not scored or not abs(trace.reward) <= MAX_REWARD:
        rollout.fate = Fate.FAILED
        rollout.reason = f"the trace has an error, no sampled token, or no reward within +-{MAX_REWARD:g}"
    else:
        rollout.reward = float(trace.reward)
    return rollout
