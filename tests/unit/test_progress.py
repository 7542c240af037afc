"""The progress number of an environment: from its answer to the gate's view, and into the gate's decision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.env.base import StepResult
from winnow.methods.gate import GateContext
from winnow.methods.gate.divergence import Divergence
from winnow.sampler.codec import group_from, group_state
from winnow.types import Fate

from ..builders.toy_rollouts import SHORT_TURNS, EchoEnv, StepGate, ToyTask, run


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


@dataclass
class ProgressEnv(EchoEnv):
    """Says `given[t]` of its t-th answer; nothing after the last."""

    given: tuple[Any, ...] = ()

    def step(self, text: str) -> StepResult:
        result = super().step(text)
        info = {"progress": self.given[self.steps - 1]} if self.steps <= len(self.given) else {}
        return StepResult(result.observation, result.reward, result.done, info)


def task_of(*given: tuple[Any, ...]) -> ToyTask:
    """The i-th sibling of every group of four is given `given[i]`."""
    return ToyTask(make=lambda made: ProgressEnv(4, given=given[made % 4]), stop=SHORT_TURNS)


def test_a_gate_sees_the_last_one_given_and_it_survives_a_checkpoint(policy: Any) -> None:
    gate, task = StepGate(3, True), task_of((0.2, 0.4, 0.6), (0.5,), (), (0, None, 1))
    groups = run(policy, task, gates=[gate], max_tokens=200)
    assert [view.progress for view in gate.views] == [(0.6, 0.5, None, 1.0)] * 3
    again = group_from(group_state(groups[0]), {"train": task.train})
    assert [t.progress for t in again.rollouts[0].turns] == [0.2, 0.4, 0.6, None]


@pytest.mark.parametrize("wrong", [1.5, -0.1, float("nan"), "far", [1]])
def test_what_is_no_number_between_0_and_1_fails_the_rollout(policy: Any, wrong: Any) -> None:
    for group in run(policy, task_of((0.1, wrong), (), (), ()), max_tokens=200):
        failed = group.rollouts[0]
        assert (failed.fate, failed.reward) == (Fate.FAILED, None)
        assert "progress" in failed.reason
        assert all(r.reward == 4.0 for r in group.rollouts[1:])


def test_the_gate_cuts_groups_that_have_not_come_anywhere(policy: Any) -> None:
    gate = Divergence(k=2, threshold=0.0, progress=0.25).build(GateContext("divergence"))
    for best, keep in ((0.25, False), (0.3, True)):
        task = task_of((0.0, best), (0.1,), (), (0.0, 0.0))
        for group in run(policy, task, gates=[gate], max_tokens=200):
            assert group.verdict.keep == keep
            assert keep or group.verdict.reason == "stuck: best progress 0.25 <= 0.25 at step 2"


def test_an_environment_that_gives_none_is_an_error(policy: Any) -> None:
    gate = Divergence(k=2, threshold=0.0, progress=0.25).build(GateContext("divergence"))
    with pytest.raises(ValueError, match=r"prompt 'p.' gave none by step 2; return StepResult\(info="):
        run(policy, task_of((), (), (), ()), gates=[gate], max_tokens=200)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"progress\n.*less than 1 "):
        Divergence(progress=1)
