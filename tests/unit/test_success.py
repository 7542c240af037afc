"""What counts as right: the default, a function that decides, and when nothing says it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.methods.gate.arrol.gate import Arrol
from winnow.methods.gate.base import GateContext
from winnow.methods.group_kind import GroupJudge
from winnow.methods.select.greso import Greso
from winnow.methods.select.pass_rate import PassRateBand
from winnow.methods.success import Success, default_success
from winnow.record.failures import FailureWatch
from winnow.rollout.evaluate import summarize
from winnow.run.build_methods import build_success
from winnow.run.standalone import evaluate_model
from winnow.types import Fate, Group, GroupKind, Prompt, Rollout, Visit

PROMPTS = [Prompt(f"p{i}", i, text="") for i in range(4)]


def group_of(*rewards: dict[str, float | None], number: int = 0) -> Group:
    """Siblings with these rewards by function; the reward is their sum, absent where there is none."""
    rollouts = []
    for i, by_function in enumerate(rewards):
        values = [value for value in by_function.values() if value is not None]
        one = np.zeros(1)
        rollout = Rollout(i, (1,), one.astype(np.int64), one == 0, one, one.astype(np.int32), rewards=dict(by_function))
        rollout.reward = sum(values) if values else None
        rollout.fate = None if values else Fate.FAILED
        rollouts.append(rollout)
    return Group(Visit(number, 0, PROMPTS[number % 4]), rollouts)


def test_an_environment_cannot_decide_where_there_is_none(tiny_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="success: function: 'env' is the reward of an environment, and this task"):
        Trainer(config=tiny_config | {"success": "env"})
    with pytest.raises(ConfigError, match="success: function: 'env' is the reward of an environment, and this task"):
        evaluate_model(tiny_config["model"], tiny_config | {"success": "env"})


WRONG, RIGHT = {"format": 1.0, "correct": 0.0}, {"format": 0.0, "correct": 1.0}
FUNCTIONS = {"format": "format", "correct": "correct"}


def success_of(
    given: Any,
    functions: dict[str, str] = FUNCTIONS,
    weights: list[float] | None = None,
    env: object = None,
    *,
    gives_reward: bool = True,
) -> Success:
    task: Any = SimpleNamespace(train=PROMPTS, make_env=lambda prompt: env, needs_reward_funcs=not gives_reward)
    return build_success(validate({"model": "m", "env": "countdown", "success": given}), task, functions, weights)


@pytest.mark.parametrize(
    ("functions", "weights", "undecided"),
    [
        ([], None, ""),
        (["a"], None, ""),
        (["a"], [1.0], ""),
        (["a"], [0.5], "reward_weights: [0.5]"),
        (["a", "b"], None, "2 reward functions: a, b"),
        (["a", "b"], [1.0, 0.0], "2 reward functions: a, b"),
    ],
)
def test_a_default_only_where_it_can_be_meant(functions: list[str], weights: Any, undecided: str) -> None:
    assert default_success(functions, weights).undecided == undecided


def test_that_right_answers_are_unknown_is_reported_once() -> None:
    watch = FailureWatch(success=default_success(["a", "b"], None))
    (said,) = watch.observe([])
    assert said.startswith("success: undecided (2 reward functions: a, b); set ")
    assert list(watch.observe([])) == []


def test_a_function_decides_for_kinds_and_pass_at_k() -> None:
    """Format 1 + correctness 0, and the reverse: the same reward, and only one of them is right."""
    judge = GroupJudge(success_of({"function": "correct"}))
    for group, kind, passed in (
        (group_of(WRONG, WRONG), GroupKind.HARD, 0.0),
        (group_of(RIGHT, RIGHT), GroupKind.EASY, 1.0),
        (group_of(RIGHT, WRONG), GroupKind.HARD, 0.5),
    ):
        assert judge.kind(group) is kind
        assert summarize([group], judge.success)["pass@1"] == passed


@pytest.mark.parametrize("given", [{"at_least": 0.9}, 0.9])
def test_the_least_reward_of_a_right_answer(given: Any) -> None:
    group = group_of({"r": 0.95}, {"r": 0.95})
    assert GroupJudge(success_of(given, {"r": "r"})).kind(group) is GroupKind.EASY
    assert summarize([group], success_of(given, {"r": "r"}))["pass@1"] == 1.0
    assert summarize([group], success_of(None, {"r": "r"}))["pass@1"] == 0.0


def test_while_undecided_nothing_is_called_right_or_wrong() -> None:
    judge = GroupJudge(success_of(None))
    group = group_of(WRONG, WRONG)
    assert judge.kind(group) is GroupKind.UNKNOWN
    found = summarize([group], judge.success)
    assert found["avg@n"] == 1.0
    assert not [name for name in found if name.startswith("pass@")]


def test_a_reward_above_the_default_shows_that_it_is_not_meant() -> None:
    success = success_of(None, {"r": "r"})
    judge, group = GroupJudge(success), group_of({"r": 1.0}, {"r": 1.0})
    success.observe(group.rollouts)
    assert judge.kind(group) is GroupKind.EASY
    success.observe(group_of({"r": 2.0}, {"r": None}).rollouts)
    assert judge.kind(group_of({"r": 1.0}, {"r": 1.0})) is GroupKind.UNKNOWN
    assert group.kind is GroupKind.EASY, "a group is judged once"
    assert "a reward of 2, above 1" in str(success)
    declared = success_of(1, {"r": "r"})
    declared.observe(group_of({"r": 2.0}).rollouts)
    assert not declared.undecided


def test_a_rollout_that_the_function_does_not_judge_is_left_out() -> None:
    success = success_of("correct")
    group = group_of(RIGHT, {"format": 1.0, "correct": None}, {"format": None, "correct": None})
    assert [success.right(rollout) for rollout in group.rollouts] == [True, None, None]
    assert summarize([group], success)["pass@1"] == 1.0


def test_functions_by_the_name_that_they_were_given_by() -> None:
    functions = {"my_rewards.py:correct": "correct", "correct": "correct"}
    assert success_of("my_rewards.py:correct", functions).function == "correct"
    for name in ("env", "env/solver"):
        assert success_of(name, {}, env=object()).function == name
        for env, gives_reward in ((None, True), (object(), False)):
            with pytest.raises(ConfigError, match=f"'{name}' is the reward of an environment, and this task has none "):
                success_of(name, functions, env=env, gives_reward=gives_reward)
    with pytest.raises(ConfigError, match=r"success: function: unknown reward function 'corect'.*correct"):
        success_of("corect")


def test_the_key_of_version_0_2_still_works() -> None:
    c = validate({"model": "m", "env": "countdown", "success_reward": 0.5})
    assert c.success is not None
    assert (c.success.function, c.success.at_least) == (None, 0.5)
    with pytest.raises(ConfigError, match="success_reward and success"):
        validate({"model": "m", "env": "countdown", "success_reward": 0.5, "success": 1})


def test_greso_takes_equal_rewards_of_unknown_worth_for_hard() -> None:
    selector = Greso(p_hard=0.25).build(PROMPTS, 0, GroupJudge(success_of(None)))
    selector.observe_group(group_of(WRONG, WRONG))
    assert selector.verdict_on(0, True).probability == 0.25


def test_what_counts_right_answers_refuses_to_guess() -> None:
    undecided = GroupJudge(success_of(None))
    with pytest.raises(ConfigError, match=r"gates: arrol .* undecided .*2 reward functions"):
        Arrol().build(GateContext("arrol", 0, undecided))
    assert Arrol(balance="distinct").build(GateContext("arrol", 0, undecided))
    with pytest.raises(ValueError, match="refresh_steps"):
        PassRateBand(refresh_steps=2).build(PROMPTS, 0, undecided)
