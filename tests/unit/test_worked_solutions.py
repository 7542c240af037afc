"""Worked solutions are right, line by line, and a task in words can be learned from them."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.env.base import Answering, Demonstrator
from winnow.tasks.worked_solutions import VOCABULARY, answer_of, chain_sum, chain_sum_prompt


@given(
    st.integers(-9999, 9999),
    st.lists(st.tuples(st.sampled_from("+-"), st.integers(-9999, 9999)), min_size=1, max_size=6),
)
def test_every_column_and_every_sum_is_right(first: int, rest: list[tuple[str, int]]) -> None:
    expression = f"{first} " + " ".join(f"{sign} {term}" for sign, term in rest)
    text = chain_sum(f"State the final answer to the following arithmetic problem: {expression} =")
    assert answer_of(text) == str(eval(expression))
    assert set(text.split()) <= set(VOCABULARY)
    total = first
    for line, (sign, term) in zip(text.split("|")[:-1], rest, strict=True):
        _, _, columns, result = re.split("[:;]", line)
        total += term if sign == "+" else -term
        assert int(result.replace(" ", "")) == total
        for column in columns.split(","):
            worked, _, digits = column.partition("=")
            shown = int(digits.replace("borrow", "").replace(" ", ""))
            assert eval(worked) == shown - 10 * ("borrow" in digits)


@given(
    st.integers(0, 9999),
    st.lists(st.tuples(st.sampled_from("+-"), st.integers(0, 9999)), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_a_forgotten_carry_is_the_only_mistake_and_is_followed_up(
    first: int, rest: list[tuple[str, int]], seed: int
) -> None:
    draws, slips = random.Random(seed), []
    expression = f"{first} " + " ".join(f"{sign} {term}" for sign, term in rest)
    text = chain_sum(f"...: {expression} =", lambda: slips.append(draws.random() < 0.5) or slips[-1])
    assert set(text.split()) <= set(VOCABULARY)
    if not any(slips):
        assert answer_of(text) == str(eval(expression))
    total, mistaken = first, 0
    for line, (sign, term) in zip(text.split("|")[:-1], rest, strict=True):
        _, _, columns, result = re.split("[:;]", line)
        right = total + (term if sign == "+" else -term)
        total = int(result.replace(" ", ""))
        mistaken += total != right
        for column in columns.split(","):
            worked, _, digits = column.partition("=")
            shown = int(digits.replace("borrow", "").replace(" ", ""))
            assert eval(worked) == shown - 10 * ("borrow" in digits)
    assert answer_of(text) == str(total)
    assert (mistaken > 0) == any(slips)


def test_words_of_a_question() -> None:
    assert chain_sum_prompt("... problem: 23 + 60 - 7 =") == "a 2 b 3 + c 6 d 0 - e 7 ="
    assert answer_of("4 + 5 : 4 + 5 = 9 ; 9 | answer 9") == "9"
    assert answer_of("answer - 1 2") == "-12"
    assert answer_of("4 + 5") is None
    assert answer_of("answer") is None
    assert answer_of("unanswered 7") is None
    assert chain_sum_prompt("...: -5 - -12 + -3 =") == "- a 5 + b 1 c 2 - d 3 ="
    assert answer_of(chain_sum("...: -5 - -12 + -3 =", lambda: False)) == "4"


@pytest.mark.slow
def test_a_task_in_words() -> None:
    pytest.importorskip("reasoning_gym")
    from winnow.tasks.reasoning_gym import ReasoningGymConfig, reasoning_gym_reward

    options = {"min_terms": 2, "max_terms": 3}
    task = ReasoningGymConfig("chain_sum", options, train_size=4, test_size=3, prompt_format="words").build()
    assert isinstance(task, Demonstrator)
    assert isinstance(task, Answering)
    shown = list(itertools.islice(task.demonstrations(0), 50))
    assert shown == list(itertools.islice(task.demonstrations(0), 50))
    assert not {p.text for p in task.test} & {prompt for prompt, _ in shown}
    slipping = ReasoningGymConfig("chain_sum", options, train_size=4, prompt_format="words", slips=0.5).build()
    slipped = list(itertools.islice(slipping.demonstrations(0), 50))
    assert slipped == list(itertools.islice(slipping.demonstrations(0), 50))
    assert [p for p, _ in slipped[:20]] == [p for p, _ in shown[:20]]
    assert 5 < sum(a != b for (_, a), (_, b) in zip(slipped, shown, strict=True)) < 45
    with pytest.raises(ValueError, match=r"slips\n.*less than or equal to 1 "):
        ReasoningGymConfig("chain_sum", slips=1.5)
    completions = [chain_sum(p.columns["question"]) for p in task.train]
    columns = {key: [p.columns[key] for p in task.train] for key in task.train[0].columns}
    assert reasoning_gym_reward(completions, **columns) == [1.0] * 4
    assert reasoning_gym_reward([c + " 1" for c in completions], **columns) != [1.0] * 4
    assert task.answers(task.train[0], [completions[0], "no"]) == [task.train[0].columns["answer"], None]


def test_only_what_can_be_worked_is_put_into_words() -> None:
    from winnow.tasks.reasoning_gym import ReasoningGymConfig

    with pytest.raises(ValueError, match="prompt_format: words is there for chain_sum, not sudoku"):
        ReasoningGymConfig("sudoku", prompt_format="words")
