"""The reward runner: what functions are given, how their values are combined, overlap, names."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from winnow.env.prompting import NextMessages
from winnow.env.rewards.rewarder import Rewarder
from winnow.types import Fate, Segment, Turn

from ..builders.rewards import group, scored


def test_text_function_gets_what_it_names_and_nothing_else():
    seen = {}

    def f(completions, prompts, completion_ids, answer, unit="m"):
        seen.update({k: v for k, v in locals().items() if k != "seen"})
        return [1.0, 2.0]

    g = group("a", "b", answer=[4, 2], other="x")
    scored(f, g)
    assert seen == {
        "completions": ["a", "b"],
        "prompts": ["why?", "why?"],
        "completion_ids": [[0, 7], [1, 7]],
        "answer": [[4, 2], [4, 2]],
        "unit": "m",
    }
    assert g.rewards().tolist() == [1.0, 2.0]
    assert g.rollouts[0].rewards == {"f": 1.0}
    assert [r.fate for r in g.rollouts] == [None, None]


@pytest.mark.parametrize("chat", [False, True])
def test_a_rollout_of_several_segments_is_judged_by_all_that_was_sampled(chat):
    seen = []
    g = group("x", chat=chat)
    g.rollouts[0].turns = [Turn("go", None, 0, 1, "eos"), Turn("stop", "end", 1, 2, "eos")]
    g.rollouts[0].later_segments = [Segment(1, (5, 6, 7))]
    scored(lambda completions, completion_ids: seen.extend([*completions, *completion_ids]) or [1], g)
    actions = [{"role": "assistant", "content": text} for text in ("go", "stop")]
    assert seen == [actions if chat else "gostop", [0, 7]]


def test_the_prompt_of_a_later_segment_is_no_part_of_the_completion():
    seen = []
    g = group("x", chat=True)
    again = NextMessages([{"role": role, "content": "Count."} for role in ("system", "user")], continues=None)
    g.rollouts[0].turns = [Turn("go", again, 0, 1, "eos"), Turn("stop", None, 1, 2, "eos")]
    scored(lambda completions: seen.extend(completions) or [1], g)
    assert seen == [[{"role": "assistant", "content": text} for text in ("go", "stop")]]


def test_keyword_function_gets_everything():
    seen = {}

    def f(**kwargs):
        seen.update(kwargs)
        return [0.0]

    rewarder = Rewarder(f)
    rewarder.trainer_state = {"step": 3}
    g = group("a", answer=4)
    rewarder.start(g, environments=["env"])
    assert rewarder.done(wait=True) == [g]
    rewarder.close()
    assert set(seen) == {
        "prompts",
        "completions",
        "completion_ids",
        "answer",
        "environments",
        "trainer_state",
        "log_metric",
        "log_extra",
    }
    assert seen["environments"] == ["env"]
    assert seen["trainer_state"] == {"step": 3}


def test_conversational_completions_are_messages():
    def f(prompts, completions):
        assert prompts[0] == [{"role": "user", "content": "why?"}]
        return [float(len(c[0]["content"])) if c[0]["role"] == "assistant" else -1.0 for c in completions]

    g = group("a", "bb", chat=True)
    scored([f], g)
    assert g.rewards().tolist() == [1.0, 2.0]


def test_turns_of_a_conversation_are_messages_with_what_was_answered():
    seen = []
    g = group("x", chat=True)
    g.rollouts[0].turns = [Turn("go", "seen", 0, 1, "eos"), Turn("stop", "end", 1, 2, "eos")]
    scored(lambda completions: seen.extend(completions) or [1], g)
    assert seen == [
        [
            {"role": "assistant", "content": "go"},
            {"role": "user", "content": "seen"},
            {"role": "assistant", "content": "stop"},
        ]
    ]


def test_weighted_sum_over_functions_that_apply():
    def a(completions):
        return [1.0, None, None]

    def b(completions):
        return [0.5, 0.5, None]

    g = group("x", "y", "z")
    scored([a, b], g, weights=[2.0, -1.0])
    np.testing.assert_array_equal(g.rewards(), [1.5, -0.5, np.nan])
    assert g.rollouts[1].rewards == {"a": None, "b": 0.5}
    assert g.rollouts[2].fate is Fate.FAILED
    assert g.rollouts[2].reason == "no reward function applied"


@pytest.mark.parametrize(
    "value",
    [
        [1, 0.5, True],
        (1.0, 0.5, 1.0),
        np.array([1.0, 0.5, 1.0]),
        torch.tensor([1.0, 0.5, 1.0]),
        [np.float32(1), torch.tensor(0.5), np.bool_(True)],
        [torch.tensor([1.0]), np.array([0.5]), np.int64(1)],
    ],
    ids=["list", "tuple", "numpy", "torch", "scalars", "one-element arrays"],
)
def test_kinds_of_numbers(value):
    g = group("x", "y", "z")
    scored(lambda completions: value, g)
    assert g.rewards().tolist() == [1.0, 0.5, 1.0]


def test_coroutines_run_side_by_side():
    together = 0
    most = 0

    async def slow(completions):
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.05)
        together -= 1
        return [1.0] * len(completions)

    class Judge:
        __name__ = "judge"

        async def __call__(self, completions):
            return [2.0] * len(completions)

    groups = [group("x", "y", number=i) for i in range(8)]
    scored([slow, Judge()], *groups)
    assert all(g.rewards().tolist() == [3.0, 3.0] for g in groups)
    assert most == 8


def test_scoring_overlaps_the_caller_and_comes_back_once():
    gate = threading.Event()

    def f(completions):
        assert gate.wait(20)
        return [1.0]

    rewarder = Rewarder(f)
    first, second = group("x"), group("y", number=1)
    rewarder.start(first)
    rewarder.start(second)
    assert rewarder.done() == []
    with pytest.raises(ValueError, match="being scored already"):
        rewarder.start(first)
    gate.set()
    back = rewarder.done(wait=True)
    while len(back) < 2:
        back += rewarder.done(wait=True)
    assert back[0] is first
    assert back[1] is second
    assert rewarder.done() == rewarder.done(wait=True) == []
    rewarder.close()


def test_only_rollouts_without_fate_and_reward_are_scored():
    seen = []
    g = group("failed", "env", "open")
    g.rollouts[0].fate = Fate.FAILED
    g.rollouts[1].reward = 0.25
    scored(lambda completions: seen.extend(completions) or [1.0], g)
    assert seen == ["open"]
    np.testing.assert_array_equal(g.rewards(), [np.nan, 0.25, 1.0])
    done = group("failed")
    done.rollouts[0].fate = Fate.PRUNED
    scored(lambda completions: 1 / 0, done)
    assert done.rollouts[0].fate is Fate.PRUNED


def test_without_functions_nothing_applies():
    g = group("x")
    scored([], g)
    assert g.rollouts[0].reason == "no reward function applied"


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("exact", {"ground_truth": None}),
        ("exact", {"ground_truth": " "}),
        ("countdown", {"numbers": None, "target": 4, "style": "expression"}),
    ],
)
def test_a_row_without_a_reference_is_no_wrong_answer(name, columns):
    g = group("None", "4", **columns)
    scored(name, g)
    assert {(r.fate, r.reward) for r in g.rollouts} == {(Fate.FAILED, None)}
    assert "reward needs" in g.rollouts[0].reason


def test_blanks_around_the_reference_do_not_count():
    g = group("4\n", "5", ground_truth=" 4 ")
    scored("exact", g)
    assert g.rewards().tolist() == [1.0, 0.0]
