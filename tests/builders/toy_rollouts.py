"""Build toy environments, gates and a runner for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.engine import LocalEngine, SamplingParams
from winnow.env.base import Env, StepResult
from winnow.env.rewards.rewarder import Rewarder
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.types import EnvStep, Group, GroupView, Job, Prompt, Token, Verdict, Visit

from ..gates import Fake, named
from ..parity import parity_reward


@dataclass
class EchoEnv:
    """Answers every action with a fixed observation; done after `turns` actions, reward = number of actions."""

    turns: int
    fail_at: int | None = None
    steps: int = 0

    def reset(self) -> str | None:
        return " 7"

    def step(self, text: str) -> StepResult:
        self.steps += 1
        if self.steps == self.fail_at:
            raise ConnectionError("the simulator went away")
        done = self.steps >= self.turns
        return StepResult("8 9", float(self.steps) if done else None, done)


@dataclass
class ToyTask:
    """Prompts of Countdown words; environments as a function of how many were made."""

    make: Callable[[int], Env | None] = lambda made: None
    max_turns: int = 5
    name: str = "toy"
    stop: tuple[str, ...] = ()
    made: int = 0
    reward_funcs: Sequence[Any] = (parity_reward,)
    train: list[Prompt] = field(default_factory=lambda: [Prompt(f"p{i}", i, text=f"numbers {i} :") for i in range(8)])
    test: list[Prompt] = field(default_factory=list)

    def make_env(self, prompt: Prompt) -> Env | None:
        self.made += 1
        return self.make(self.made - 1)

    def fingerprint(self) -> str:
        return "toy"


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


def run(
    policy: tuple[Any, Any], task: ToyTask, *, gates: Sequence[Any] = (), size: int = 4, **options: Any
) -> list[Group]:
    engine = LocalEngine(*policy, slots=options.pop("slots", 8), max_length=options.pop("max_length", None))
    sampling = {key: options.pop(key) for key in ("stop", "temperature") if key in options}
    params = SamplingParams(options.pop("max_tokens", 12), **sampling)
    rewarder = Rewarder(task.reward_funcs)
    train = RolloutOptions(params, 32, seed=0, **options)
    runner = RolloutRunner(engine, task, policy[1], rewarder, {"train": train}, named(gates))
    for number, prompt in enumerate(task.train[:3]):
        runner.launch(Job(Visit(number, 0, prompt), size))
    groups: list[Group] = []
    for _ in range(10_000):
        for group in runner.poll():
            groups.append(group)
            for gate in gates:
                gate.observe_group(group)
        if not runner.pending:
            break
    rewarder.close()
    assert runner.pending == 0
    assert engine.pending == 0
    assert len(engine._kept) == 0, "keys and values of ended rollouts"
    assert [g.visit.number for g in groups] == [0, 1, 2], "launch order"
    assert all([r.sibling for r in g.rollouts] == list(range(size)) for g in groups)
    return groups


SHORT_TURNS = ("=", "+", "-", "*", "/", ",")


class HalfGate(Fake):
    """Prunes odd siblings at the third token."""

    at = Token(3)
    needs = frozenset({"hidden"})

    def __init__(self) -> None:
        self.views: list[GroupView] = []
        self.observed: list[Group] = []

    def decide(self, view: GroupView) -> Verdict:
        self.views.append(view)
        assert view.sibling is not None
        return Verdict(view.sibling % 2 == 0, "odd", probability=0.5)

    def observe_group(self, group: Group) -> None:
        self.observed.append(group)


class StepGate(Fake):
    def __init__(self, k: int, keep: bool) -> None:
        self.at, self.needs, self.keep = EnvStep(k), frozenset(), keep
        self.views: list[GroupView] = []

    def decide(self, view: GroupView) -> Verdict:
        self.views.append(view)
        return Verdict(self.keep, "converged")

    def observe_group(self, group: Group) -> None:
        pass
