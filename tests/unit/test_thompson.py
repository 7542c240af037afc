"""Thompson sampling of prompts: one of every set of candidates, by rates drawn from posteriors that forget."""

from __future__ import annotations

import json

import numpy as np
import pytest

from winnow.methods.group_kind import GroupJudge
from winnow.methods.select.bayes import Bayes
from winnow.methods.select.thompson import Thompson, ThompsonSelector
from winnow.methods.success import Success
from winnow.types import Prompt

from ..builders.groups import make_group

PROMPTS = [Prompt(f"p{i}", i, text="") for i in range(403)]


def selector(**options: float) -> ThompsonSelector:
    return Thompson(**options).build(PROMPTS, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("candidates", [2, 4, 7])
def test_every_set_of_candidates_gives_one_however_many_are_asked_for(candidates: int) -> None:
    whole = selector(candidates=candidates).select(150)
    one_by_one = selector(candidates=candidates)
    assert [visit for _ in range(150) for visit in one_by_one.select(1)] == whole
    for epoch in range(whole[-1].epoch):
        keeps = [visit.verdict.keep for visit in whole if visit.epoch == epoch]
        sets = [keeps[first : first + candidates] for first in range(0, len(PROMPTS), candidates)]
        assert [sum(each) for each in sets] == [1] * len(sets)


@pytest.mark.parametrize("asked", [1, 2, 8])
def test_a_set_gives_one_however_much_is_learned_between_calls(asked: int) -> None:
    chosen, rng = selector(), np.random.default_rng(0)
    visits = []
    for step in range(300 // asked):
        if step % 7 == 3:
            saved = json.loads(json.dumps(chosen.state_dict()))
            chosen = selector()
            chosen.load_state_dict(saved)
        visits += chosen.select(asked)
        for visit in visits[-asked:]:
            chosen.observe_group(make_group(visit.prompt.ordinal, rng.integers(0, 2, 8).astype(float).tolist()))
        for prompt in rng.integers(0, len(PROMPTS), 9):
            chosen.observe_group(make_group(int(prompt), [1.0] * 8))
    for epoch in range(visits[-1].epoch):
        keeps = [visit.verdict.keep for visit in visits if visit.epoch == epoch]
        sets = [keeps[first : first + 4] for first in range(0, len(PROMPTS), 4)]
        assert {sum(each) for each in sets} == {1}


def test_right_answers_have_to_be_known() -> None:
    judge = GroupJudge(Success(declared=False, undecided="2 reward functions: a, b"))
    for options in (Thompson(), Bayes()):
        with pytest.raises(ValueError, match="pass rates count right answers, but success is undecided"):
            options.build(PROMPTS, 0, judge)


def test_prompts_near_the_target_are_taken() -> None:
    chosen = selector(keep=1.0)
    for prompt in PROMPTS:
        chosen.observe_group(
            make_group(prompt.ordinal, [[1.0] * 8, [0.0] * 8, [1.0, 0.0] * 4, [0.0] * 8][prompt.ordinal % 4])
        )
    taken = [visit.prompt.ordinal % 4 for visit in chosen.select(300) if visit.verdict.keep]
    assert np.mean(np.array(taken) == 2) > 0.6, "a quarter without the posteriors"
    easier = selector(keep=1.0, target=1.0)
    easier.load_state_dict(chosen.state_dict() | {"visits": 0})
    assert np.mean([visit.prompt.ordinal % 4 == 0 for visit in easier.select(300) if visit.verdict.keep]) > 0.6


def test_a_posterior_forgets_when_its_prompt_is_visited_again() -> None:
    chosen = selector(keep=0.5)
    chosen.observe_group(make_group(5, [1.0, 1.0, 0.0, None]))
    assert (chosen.right_N[5], chosen.wrong_N[5]) == (2, 1)
    chosen.observe_group(make_group(5, [None, None]))
    assert (chosen.right_N[5], chosen.wrong_N[5]) == (2, 1), "failed rollouts are absent"
    chosen.observe_group(make_group(5, [0.0, 0.0]))
    assert (chosen.right_N[5], chosen.wrong_N[5]) == (1, 2.5)
    assert chosen.right_N.sum() == 1
