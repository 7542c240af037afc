"""Rewards that are always the same name their cause: prints, variables that workers do not see, a None."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from winnow.config import validate
from winnow.env.rewards.rewarder import Rewarder
from winnow.record.failures import FailureWatch
from winnow.record.watchdogs import Watchdogs
from winnow.tasks.agents import with_agent
from winnow.types import Group, Prompt, Visit

from ..builders.groups import make_group
from ..builders.requests import ask
from ..builders.tool_rollouts import roll
from ..builders.tools import OneTurn, make_tokenizer

JUDGES = """
import os, sys

def swallows(completions, **kwargs):
    scores = []
    for completion in completions:
        try:
            scores.append(float(os.environ["JUDGE_API_KEY"] == completion))
        except Exception as error:
            print("judge failed:", type(error).__name__)
            scores.append(0.0)
    return scores

def silent(completions, **kwargs):
    return [float(bool(os.environ.get("JUDGE_API_KEY"))) for c in completions]

def warns(completions, **kwargs):
    print("no quota left", file=sys.stderr)
    return [0.0] * len(completions)

def score(data_source, solution_str, ground_truth, extra_info=None):
    print("cannot parse", end="")
    return 0.0
"""
HIDDEN = "JUDGE_API_KEY is set here, but reward functions given by name do not see it: add reward_env: [JUDGE_API_KEY]"


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("swallows", f"it printed: judge failed: KeyError; {HIDDEN}"),
        ("silent", HIDDEN),
        ("warns", "it printed: no quota left"),
        ("score", "it printed: cannot parse"),
    ],
)
def test_a_judge_in_a_worker_is_heard(name: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    rewarder = Rewarder([f"{tmp_path}/judges.py:{name}"])
    rollouts = [replace(r, fate=None, reward=None) for r in make_group(0, [0.0, 0.0], [3, 4]).rollouts]
    group = Group(Visit(0, 0, Prompt("p", 0, text="x", columns={"data_source": "d", "ground_truth": "1"})), rollouts)
    rewarder.start(group)
    assert rewarder.done(wait=True) == [group]
    rewarder.close()
    assert [r.reward for r in group.rollouts] == [0.0, 0.0]
    assert [r.printed for r in group.rollouts] == [{name: printed}] * 2
    row = {"step": 1.0, f"rewards/{name}/mean": 0.0, f"rewards/{name}/std": 0.0}
    dogs = Watchdogs(validate({"model": "m", "env": "countdown"}), functions=[name])
    assert list(dogs.observe(row, [group])) == []
    (said,) = dogs.observe(row | {"step": 2.0}, [group])
    assert f"Possible causes: in 2 of 2 rollouts {printed}; " in said


def test_an_agent_that_returns_nothing_is_named_at_once() -> None:
    def forgets(base_url, prompt):
        ask(base_url, prompt)

    rollouts, _ = roll(make_tokenizer(), with_agent(OneTurn(), forgets), [["a"], ["b"]])
    group = Group(Visit(0, 0, OneTurn().train[0]), rollouts)
    note = "agent forgets returned None, and no reward function is given: its reward is 0"
    watch = FailureWatch()
    (said,) = watch.observe([group])
    assert said.startswith(f"2 of 2 rollouts: {note}; first at prompt ")
    assert list(watch.observe([group])) == []
    row = {"rewards/env/mean": 0.0, "rewards/env/std": 0.0}
    dogs = Watchdogs(validate({"model": "m", "env": "countdown"}))
    assert list(dogs.observe(row | {"step": 1.0}, [group])) == []
    (said,) = dogs.observe(row | {"step": 2.0}, [group])
    assert said.startswith("the environment, or the agent, gave 0 to every completion of 2 steps in a row")
    assert said.endswith(f"Possible causes: in 2 of 2 rollouts {note}")


def test_a_function_that_always_returns_none_is_named() -> None:
    dogs = Watchdogs(validate({"model": "m", "env": "countdown"}), functions=["style", "right"])
    row = {"reward": 0.5, "rewards/right/mean": 0.5, "rewards/right/std": 0.5}
    said = [list(dogs.observe(row | {"step": float(step)})) for step in range(1, 7)]
    assert said[:4] == [[]] * 4
    assert said[4] == [
        "reward_funcs: style returned None for every completion of 5 steps in a row, so it adds nothing; ignore this "
        "if it is meant for other rows"
    ]
    assert said[5] == []
