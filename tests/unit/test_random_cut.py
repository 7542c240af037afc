"""The control gate: cuts its share, keyed by prompt and epoch, and says with what probability."""

from __future__ import annotations

import pytest

from winnow.methods.gate import GateContext
from winnow.methods.gate.random_cut import RandomCut
from winnow.types import EnvStep, GroupView, Prompt, Verdict, Visit

from ..gates import ask


def decide(seed: int, ordinal: int, epoch: int = 0, number: int = 0, share: float = 0.3) -> Verdict:
    gate = RandomCut(k=4, share=share).build(GateContext("random", seed))
    view = GroupView(Visit(number, epoch, Prompt("p", ordinal, text="")), EnvStep(4), ((),) * 8, ((),) * 8, (True,) * 8)
    return ask(gate, view)


def test_it_cuts_its_share_and_tells_the_probability_of_what_came_out() -> None:
    verdicts = [decide(0, i) for i in range(4_000)]
    assert sum(not v.keep for v in verdicts) / 4_000 == pytest.approx(0.3, abs=0.03)
    assert {(v.keep, v.probability) for v in verdicts} == {(True, 0.7), (False, 0.3)}
    assert {v.reason for v in verdicts if not v.keep} == {"random cut at step 4"}


def test_the_draw_is_keyed_by_seed_prompt_and_epoch_alone() -> None:
    def drawn(**key: int) -> list[bool]:
        return [decide(**{"seed": 0, "ordinal": i, **key}).keep for i in range(64)]

    assert drawn() == drawn(number=7)
    assert drawn() != drawn(seed=1)
    assert drawn() != drawn(epoch=1)


@pytest.mark.parametrize(
    ("options", "words"), [({"k": 0}, "greater than 0 "), ({"share": 0.0}, "share"), ({"share": 1.0}, "share")]
)
def test_what_cannot_be_is_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RandomCut(**options)  # type: ignore[arg-type]
