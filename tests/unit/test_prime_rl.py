"""Winnow's sampler for prime-rl, in a stand-in that follows prime-rl's interface of curricula."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from winnow.base.errors import ConfigError
from winnow.base.state import StateError
from winnow.integrations.prime_rl import WinnowSampler
from winnow.record.stop_conditions import RunStoppedError

G, STEP = 4, 3


@dataclass
class Task:
    key: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    reward: float
    has_error: bool = False
    rewards: dict[str, Any] = field(default_factory=lambda: {"reward": 1.0})
    trainable: bool = True
    sampled: bool = True

    @property
    def nodes(self) -> list[Any]:
        return [SimpleNamespace(mask=[False]), SimpleNamespace(mask=[self.sampled])]

    @property
    def agent(self) -> Any:
        return SimpleNamespace(trainable=self.trainable)


def episodes(task: Task, traces: Sequence[Trace]) -> list[Any]:
    return [SimpleNamespace(task=task, traces=[trace]) for trace in traces]


class Curriculum:
    """As prime-rl's, with one sampler and no gate: it observes every finalized group."""

    def __init__(self, sampler: WinnowSampler) -> None:
        self.sampler = sampler

    def on_result(self, group: list[Any]) -> bool:
        self.sampler.observe(group)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict(), "gates": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])

    def metrics(self) -> dict[str, float]:
        return {f"sampler/{name}": float(value) for name, value in self.sampler.metrics().items()}


def tasks(count: int = 12) -> list[Task]:
    return [Task(f"task-{n}") for n in range(count)]


def curriculum(selector: Any = "greso", **given: Any) -> Curriculum:
    return Curriculum(WinnowSampler(tasks(), selector, **{"groups_per_step": STEP, "seed": 5} | given))


def advance(run: Curriculum, groups: int, start: int = 0, ahead: int = 2) -> list[str]:
    """Roll out groups, `ahead` of them at a time, as prime-rl does; return their keys. One task of four is always
    solved, one never."""
    keys = []
    for at in range(start, start + groups, ahead):
        drawn = [next(run.sampler) for _ in range(ahead)]
        for task in drawn:
            n = int(task.key.removeprefix("task-"))
            rewards = [float((n * 7 + i + at) % 3 == 0) if n % 4 > 1 else float(n % 4 == 0) for i in range(G)]
            run.on_result(episodes(task, [Trace(reward) for reward in rewards]))
            keys.append(task.key)
    return keys


SELECTORS = ["greso", "backoff", "thompson", "bayes", {"name": "greso", "target": 0.1}]


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_it_learns_and_resumes(selector: Any) -> None:
    whole = curriculum(selector)
    keys = advance(whole, 60)
    taught = [sum(int(key.removeprefix("task-")) % 4 > 1 for key in part) for part in (keys[:24], keys[-24:])]
    assert taught[1] > taught[0]
    first = curriculum(selector)
    again = advance(first, 26)
    state = json.loads(json.dumps(first.state_dict()))
    second = curriculum(selector)
    second.load_state_dict(state)
    again += advance(second, 34, start=26)
    assert again == keys
    assert second.state_dict() == whole.state_dict()
    assert second.metrics() == whole.metrics()
    assert whole.metrics()["sampler/epoch"] > 1


def test_errors_are_absent() -> None:
    run = curriculum()
    task = next(run.sampler)
    unscored, large = Trace(0.0, rewards={"reward": None}), Trace(1e31)
    bad = [Trace(0.0, has_error=True), unscored, large, Trace(math.nan), Trace(0.0, sampled=False)]
    run.on_result(episodes(task, [Trace(1.0), *bad, Trace(1.0)]))
    run.on_result(episodes(task, [Trace(0.0, has_error=True)] * G))
    run.on_result(episodes(task, [Trace(9.0, trainable=False)]))
    z_N = run.sampler._selector.z_N  # type: ignore[attr-defined]
    assert z_N.max() == pytest.approx(2 / 7), "two rewards of seven are known, and equal"
    assert run.sampler._step == 1, "every group counts towards the step"


def test_rollouts_that_do_not_arrive_are_unknown() -> None:
    run = curriculum(group_size=8)
    run.on_result(episodes(next(run.sampler), [Trace(1.0), Trace(1.0)]))
    assert run.sampler._selector.z_N.max() == pytest.approx(2 / 8)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"group_size: must be at least 1 \(got 0\)"):
        curriculum(group_size=0)


def test_an_order_by_what_the_data_of_tasks_have() -> None:
    ordered = [Task(f"task-{n}", {"difficulty": -n, "prompt": [{"role": "user"}]}) for n in range(12)]
    sampler = WinnowSampler(ordered, {"name": "ordered", "by": "difficulty"}, groups_per_step=STEP)
    assert [next(sampler).key for _ in range(3)] == ["task-11", "task-10", "task-9"]


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"selector: unknown name 'gresso'\. Did you mean 'greso'"):
        curriculum("gresso")
    with pytest.raises(ConfigError, match="tasks: a selector needs a finite taskset, not list_iterator"):
        WinnowSampler(iter(tasks()), "greso", groups_per_step=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tasks: two have the key 'a'; keys must differ"):
        WinnowSampler([Task("a"), Task("b"), Task("a")], "greso", groups_per_step=1)
    with pytest.raises(ConfigError, match=r"tasks: none were given"):
        WinnowSampler([], "greso", groups_per_step=1)
    with pytest.raises(ConfigError, match=r"groups_per_step: must be at least 1 \(got 0\)"):
        curriculum(groups_per_step=0)
    run = curriculum()
    with pytest.raises(ConfigError, match="a group has the task 'x', which is not one of the 12 tasks"):
        run.on_result(episodes(Task("x"), [Trace(1.0)]))
    state = run.state_dict()
    with pytest.raises(ConfigError, match=r"saved with other selector \(greso, now bayes\), seed \(5, now 6\)"):
        curriculum("bayes", seed=6).load_state_dict(state)
    other = WinnowSampler(tasks(9), "greso", groups_per_step=STEP, seed=5)
    with pytest.raises(ConfigError, match="saved with other tasks"):
        other.load_state_dict(state["sampler"])
    with pytest.raises(StateError, match=r"sampler\.step"):
        run.sampler.load_state_dict(state["sampler"] | {"step": -1})


def test_a_selector_that_skips_everything() -> None:
    run = curriculum()
    advance(run, 24)
    run.sampler._selector.z_N[:] = 1e6  # type: ignore[attr-defined]
    run.sampler._selector.kind_N[:] = 1  # type: ignore[attr-defined]
    with pytest.raises(RunStoppedError, match=r"the selector skipped the last 1\d,\d+ visits"):
        next(run.sampler)
