"""Blocks of prompts: ten prompts in blocks of four, which leaves two for the last, with three passes over each."""

from __future__ import annotations

import pytest

from winnow.methods.select import SELECTORS
from winnow.methods.select.stream import StreamSelector
from winnow.types import Prompt

PROMPTS = [Prompt(f"p{i}", i, text=str(i)) for i in range(10)]


def build(name: str) -> StreamSelector:
    selector: StreamSelector = SELECTORS[name]().build(PROMPTS, 7)
    selector.in_blocks(4, 3)
    return selector


def test_a_block_is_passed_over_before_the_next_one() -> None:
    selector = SELECTORS["uniform"]().build(PROMPTS, 7)
    whole = [v.prompt.ordinal for v in selector.select(10)]
    selector = build("uniform")
    passes = [*whole[:4] * 3, *whole[4:8] * 3, *whole[8:] * 3]
    visits = selector.select(30)
    assert [v.prompt.ordinal for v in visits] == passes
    assert [v.epoch for v in visits] == [*[0] * 4, *[1] * 4, *[2] * 4] * 2 + [0, 0, 1, 1, 2, 2]
    assert {v.epoch for v in selector.select(12)} == {3, 4, 5}, "passes over the next block of four"


@pytest.mark.parametrize("name", ["uniform", "greso", "backoff", "bayes", "thompson"])
def test_no_prompt_has_an_epoch_twice_and_the_calls_do_not_matter(name: str) -> None:
    visits = build(name).select(40)
    assert len({(v.epoch, v.prompt.ordinal) for v in visits}) == len(visits)
    one_by_one, parts = build(name), []
    while len(parts) < len(visits):
        parts += one_by_one.select(1)
    assert parts == visits
