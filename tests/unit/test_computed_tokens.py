"""Computed tokens: every position that went through the model in generation, counted for some sequence once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.engine import Finished, Request, SamplingParams
from winnow.methods.group_kind import BY_REWARDS
from winnow.record.step_metrics import Tally, TokenTotals
from winnow.types import Group, Prompt, Visit

from ..builders.engines import Counted, make_engine, one
from .engine_models import FUSED, GENERIC, VOCAB, make_model, make_requests, run
from .fake_run import FakeRun, rollout


@pytest.fixture(autouse=True)
def reads_any_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.engine.local.engine.READ_ROWS", 1 << 20)
    monkeypatch.setattr("winnow.rollout.drafts.WORTH_STEPS", 0.0)


def drafted(asked: list[Request], plain: dict[Any, Finished], rng: np.random.Generator) -> list[Request]:
    """A third with the right draft, a third with one that is wrong somewhere, a third without; siblings share some."""
    found = []
    for request in asked:
        tokens = plain[request.id[0], int(rng.integers(2)) and request.id[1]].token_ids[: request.params.max_tokens]
        draft, kind = tokens.copy(), rng.integers(3)
        if kind == 1:
            draft[rng.integers(len(draft))] = rng.integers(VOCAB)
        found.append(replace(request, draft=tuple(draft.tolist()) if kind else ()))
    return found


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("fixed_slots", [False, True])
@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_every_position_that_went_through_the_model_is_counted_once(name: str, fixed_slots: bool) -> None:
    """Random schedules: drafts, siblings with shared rows, few slots, requests that are cancelled or come later."""
    model, rng = make_model(name), np.random.default_rng(3)
    asked = make_requests(5, temperature=0.4)
    plain = run(make_engine(model, slots=32), asked)
    engine = make_engine(model, slots=int(rng.integers(4, 20)), fixed_slots=fixed_slots)
    counted, rows = Counted(engine), []
    decode: Any = engine._backend.decode

    def counting(*args: Any) -> Any:
        rows.append(engine._rows.n)
        return decode(*args)

    engine._backend.decode = counting  # type: ignore[method-assign]
    asked = drafted(asked, plain, rng)
    engine.submit(asked[:8])
    ended: list[Any] = []
    while engine.pending or len(asked) > 8:
        ended += engine.step()
        if asked[8:]:
            engine.submit(asked[8:])
            asked = asked[:8]
            ended += engine.cancel([(0, 1), (2, 0), (4, 3)])
    computed = sum(rows) + counted.prefilled + counted.extended + counted.read
    assert sum(event.num_computed_tokens for event in ended if isinstance(event, Finished)) == computed
    assert counted.read > 0 or name in GENERIC


def test_a_turn_after_another_computes_what_is_new() -> None:
    engine = make_engine("qwen2")
    first = run(engine, [one((1, 2, 3), max_tokens=4, keep=True)])["x"]
    assert first.num_computed_tokens == 3 + 3, "the prompt, and all tokens but the last"
    prompt = (1, 2, 3, *first.token_ids.tolist(), 9, 8)
    assert run(engine, [one(prompt, max_tokens=2)])["x"].num_computed_tokens == 3 + 1


def test_a_draft_counts_whether_it_is_accepted_or_not() -> None:
    engine, params = make_engine("qwen2"), {"params": {"temperature": 0}}
    said = tuple(run(engine, [one(max_tokens=6, **params)])["x"].token_ids.tolist())
    wrong = (*((token + 1) % VOCAB for token in said[:5]), said[5])
    for draft, read, decoded in ((said, 5, 0), (wrong, 5, 5), ((), 0, 5)):
        found = run(engine, [one(max_tokens=6, draft=draft, **params)])["x"]
        assert found.num_computed_tokens == 3 + read + decoded, draft
        assert tuple(found.token_ids.tolist()) == said


def test_what_waits_has_computed_nothing() -> None:
    engine = make_engine("qwen2")
    engine.submit([Request("x", (1, 2), SamplingParams(3), 0)])
    (gone,) = engine.cancel(["x"])
    assert gone.num_computed_tokens == 0


def test_decoded_tokens_are_shown_with_computed_ones_only() -> None:
    """A step of an engine that does not count, or an older run's checkpoint, leaves sampled tokens alone."""
    totals = TokenTotals(num_tokens=0, num_decoded_tokens=0, num_computed_tokens=0)
    visit = Visit(0, 0, Prompt("p", 0, text=""))
    known, unknown = [replace(rollout(0, 1.0), num_computed_tokens=n) for n in (7, None)]
    counts, does_not = Tally(BY_REWARDS), Tally(BY_REWARDS)
    counts.finished(Group(visit, [known]))
    does_not.finished(Group(visit, [unknown]))
    totals = totals.with_step(counts)
    assert totals.metrics() == {"num_tokens": 1, "num_decoded_tokens": 1, "num_computed_tokens": 7}
    assert totals.with_step(does_not).with_step(counts).metrics() == {"num_tokens": 3}


def test_a_checkpoint_of_an_earlier_version_loads(tmp_path: Path) -> None:
    """It has no computed tokens, so the resumed run has none either."""
    run = FakeRun(tmp_path / "ledger.sqlite", lambda visit, size: [0.0, 1.0], {"max_steps": 2, "num_generations": 2})
    state = run.run().collector.state_dict()
    assert state["num_computed_tokens"] is not None
    run.collector.load_state_dict(state)
    assert run.collector.totals.metrics().keys() == {"num_tokens", "num_decoded_tokens", "num_computed_tokens"}
    del state["num_computed_tokens"]
    run.collector.load_state_dict(state)
    assert run.collector.totals.metrics() == {"num_tokens": state["num_tokens"]}
    assert run.collector.state_dict()["num_computed_tokens"] is None
