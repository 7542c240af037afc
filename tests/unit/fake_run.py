"""A run without a model: the loop, its methods and the ledger are real; rollouts and updates are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from winnow.config import RunConfig, validate
from winnow.loop import Hooks, Loop
from winnow.record.ledger import Ledger
from winnow.run.build_methods import build_collector, build_methods
from winnow.run.resolved import Options
from winnow.types import Decision, EnvStep, Fate, Group, Job, Prompt, Rollout, Verdict, Visit

Outcome = list[float | None] | Verdict
"""The rewards of a group, None where a sibling was pruned; or the verdict it was cut with."""


def rollout(
    sibling: int, reward: float | None, version: int = 0, fate: Fate | None = None, reason: str = ""
) -> Rollout:
    return Rollout(
        sibling=sibling,
        prompt_ids=(1,),
        token_ids=np.array([2]),
        action_mask=np.ones(1, bool),
        sampler_logp=-np.ones(1, np.float32),
        versions=np.array([version], np.int32),
        reward=reward,
        fate=fate,
        reason=reason,
    )


def finished(visit: Visit, outcome: Outcome, version: int = 0, size: int = 2, first: int = 0) -> Group:
    if isinstance(outcome, Verdict):
        members = [rollout(first + i, None, version, Fate.CUT, outcome.reason) for i in range(size)]
        return Group(visit, members, [Decision("gate", EnvStep(10), outcome)])
    members = [
        rollout(i, r, version, None if r is not None else Fate.PRUNED, "" if r is not None else "pruned")
        for i, r in enumerate(outcome, first)
    ]
    return Group(visit, members)


class FakeSampler:
    """Finishes whatever was started at the next poll; remembers how many groups each round started."""

    def __init__(self, outcome: Callable[[Visit, int], Outcome]) -> None:
        self.outcome = outcome
        self.version = 0
        self.rounds: list[tuple[int, int]] = []
        """(policy version, groups) of each round."""
        self._started: list[Job] = []

    @property
    def pending(self) -> int:
        return len(self._started)

    def launch(self, job: Job) -> None:
        self._started.append(job)

    def poll(self) -> list[Group]:
        started, self._started = self._started, []
        self.rounds.append((self.version, len(started)))
        return [finished(j.visit, self.outcome(j.visit, j.size), self.version, j.size, j.first) for j in started]

    def spent(self) -> dict[str, float]:
        return {}

    def publish(self, weights: Any, rules: Any, version: int) -> None:
        self.version = version

    def make_room(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> list[Group]:
        return []


class FakeStep:
    """An update: remembers the batches, and skips those without a signal, as the real one does."""

    def __init__(self) -> None:
        self.batches: list[list[Group]] = []
        self.scale = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)

    def __call__(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        self.batches.append(list(groups))
        return {"updated": float(any(np.ptp([r.reward for r in g.rollouts if r.reward is not None]) for g in groups))}


class FakeRun:
    """`outcome(visit, size)` says how each group ends."""

    def __init__(
        self, path: Path, outcome: Callable[[Visit, int], Outcome], config: dict[str, Any], prompts: int = 40
    ) -> None:
        c: RunConfig = validate({"model": "none", "env": "none"} | config)
        self.config = c
        self.prompts = [Prompt(f"p{i}", i, text="") for i in range(prompts)]
        self.methods = build_methods(c, Options.from_config(c), self.prompts)
        self.sampler, self.update = FakeSampler(outcome), FakeStep()
        self.ledger = Ledger.open(path)
        self.ledger.set_meta("max_lag", str(c.max_lag))
        self.metrics: list[dict[str, float]] = []
        m = self.methods
        self.collector = build_collector(c, m, self.sampler, self.ledger, {"train": self.prompts})
        hooks = Hooks(
            published=lambda step: None,
            evaluate=lambda step: None,
            profile=lambda step: None,
            record=lambda step, metrics, groups: self.metrics.append(metrics),
            save=lambda step, force: None,
            should_stop=lambda: False,
        )
        learner = SimpleNamespace(weights=dict, metrics=dict)
        self.loop = Loop(self.collector, self.sampler, learner, self.update, hooks)  # type: ignore[arg-type]

    def run(self) -> FakeRun:
        """To the end; the ledger has proved its account."""
        self.loop.run()
        self.loop.close()
        self.ledger.set_meta("finished", "true")
        result = self.ledger.verify()
        assert result.ok, result.problems
        return self
