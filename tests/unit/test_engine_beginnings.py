"""What prompts begin with alike goes through the model once: the same results, for less."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from winnow.base.noise import noise_key
from winnow.engine import LocalEngine, Request, SamplingParams
from winnow.engine.local import beginnings
from winnow.engine.local.backend import MASK_ELEMENTS, PREFILL_TOKENS, passes
from winnow.engine.local.beginnings import shared_beginnings

from ..builders.engines import Counted, make_engine, require_equal
from .engine_models import FUSED, GENERIC, VOCAB, make_model, plain_logits, plain_logp, run

SYSTEM, OTHER = (tuple(1 + (step * i) % (VOCAB - 3) for i in range(n)) for step, n in ((7, 40), (11, 31)))
TAILS = [tuple(1 + (5 * i + j) % 50 for j in range(1 + i % 4)) for i in range(10)]


def requests_of(prompts: list[tuple[int, ...]], n: int = 2) -> list[Request]:
    params = SamplingParams(5)
    return [Request((i, s), p, params, noise_key(0, i, s)) for i, p in enumerate(prompts) for s in range(n)]


def prompts_of(*systems: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(*system, *tail) for system in systems for tail in TAILS]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), max_size=12), st.integers(1, 12))
@example([(0, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0, 0)], 2)
@example([(0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 1), (0, 0, 1, 0)], 2)
def test_beginnings_against_the_definition(prompts: list[tuple[int, ...]], least: int) -> None:
    found = shared_beginnings(prompts, least)
    assert len(found) == len(set(found))

    def served_by(tokens: tuple[int, ...], some: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
        n = len(tokens)
        return {p for p in some if p[:n] == tokens and n < len(p) <= 2 * n}

    left = set(prompts)
    for tokens in sorted(found, key=len):  # the shortest has all that it can
        served = served_by(tokens, left)
        assert len(tokens) * (len(served) - 1) >= least
        left -= served
    for tokens in {tuple(commonprefix([a, b])) for a in left for b in left if a != b}:
        assert len(tokens) * (len(served_by(tokens, left)) - 1) < least, "nothing is left that would have paid"


def commonprefix(both: list[tuple[int, ...]]) -> list[int]:
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False))]


@pytest.mark.cases(one_in=4)
@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_the_same_as_without_and_as_a_plain_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(name)
    requests = requests_of([*prompts_of(SYSTEM, OTHER), (3, 4)])
    monkeypatch.setattr(beginnings, "SAVED_TOKENS", {"cpu": 100})
    with_ = make_engine(model, slots=64)
    monkeypatch.setattr(beginnings, "SAVED_TOKENS", {"cpu": 1 << 30})
    without = make_engine(model, slots=64)
    counted, counted_without = Counted(with_), Counted(without)
    found = run(with_, requests)
    require_equal(found, run(without, requests))
    assert counted.prefilled == 40 + 31 + 2, "both beginnings, and the prompt that has none"
    assert counted.extended == 2 * sum(map(len, TAILS))
    assert (counted_without.extended, counted_without.prefilled) == (
        0,
        sum({r.prompt_ids: len(r.prompt_ids) for r in requests}.values()),
    )
    for request in requests[::7]:
        answer = found[request.id]
        logits = plain_logits(model, request.prompt_ids, answer.token_ids)
        np.testing.assert_allclose(answer.logp, plain_logp(logits, request.params, answer.token_ids), atol=1e-4)


def engine_that_counts(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[LocalEngine, Counted]:
    monkeypatch.setattr(beginnings, "SAVED_TOKENS", {"cpu": 100})
    engine = make_engine("qwen2", **options)
    return engine, Counted(engine)


def test_prompts_that_come_later_have_it_too_until_the_engine_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counted = engine_that_counts(monkeypatch, slots=4)
    run(engine, requests_of(prompts_of(SYSTEM), n=1))
    assert counted.prefilled == 40
    assert counted.extended == sum(map(len, TAILS))
    run(engine, requests_of(prompts_of(SYSTEM)[:1]))
    assert counted.prefilled == 40 + 40 + len(TAILS[0]), "an idle engine has forgotten it"


def test_new_weights_forget_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counted = engine_that_counts(monkeypatch, slots=4)
    requests, other = requests_of(prompts_of(SYSTEM), n=1), make_model("qwen2", seed=1)
    engine.submit(requests[:5])
    engine.step()
    engine.load_weights(other.state_dict(), 1)
    before = counted.prefilled
    found = run(engine, requests[5:])
    assert counted.prefilled > before
    answer = found[requests[-1].id]
    logits = plain_logits(other, requests[-1].prompt_ids, answer.token_ids)
    np.testing.assert_allclose(answer.logp, plain_logp(logits, SamplingParams(5), answer.token_ids), atol=1e-4)


def test_computed_tokens_hold_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counted = engine_that_counts(monkeypatch, slots=32)
    found = run(engine, requests_of(prompts_of(SYSTEM)))
    computed = [finished.num_computed_tokens or 0 for finished in found.values()]
    assert sum(computed) == counted.prefilled + counted.extended + counted.decoded


def test_drafts_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = engine_that_counts(monkeypatch, slots=32)
    requests = requests_of(prompts_of(SYSTEM), n=1)
    answers = run(plain, requests)
    drafted, counted = engine_that_counts(monkeypatch, slots=32)
    drafts = [replace(r, draft=tuple(answers[r.id].token_ids.tolist())) for r in requests]
    found = run(drafted, drafts)
    require_equal(found, answers)
    assert (counted.prefilled, counted.read) == (40, 4 * len(requests))
    assert all(finished.num_reused_tokens for finished in found.values())


def test_fixed_slots_compute_every_prompt_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counted = engine_that_counts(monkeypatch, slots=32, fixed_slots=True, max_length=64)
    run(engine, requests_of(prompts_of(SYSTEM), n=1))
    assert (counted.prefilled, counted.extended) == (sum(map(len, prompts_of(SYSTEM))), 0)


def test_a_longer_prompt_does_not_keep_others_from_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counted = engine_that_counts(monkeypatch, slots=32)
    long = (*SYSTEM, *range(1, 50))
    run(engine, requests_of([*prompts_of(SYSTEM), long], n=1))
    assert (counted.prefilled, counted.extended) == (40 + len(long), sum(map(len, TAILS)))


def test_an_engine_that_cancelling_leaves_idle_has_forgotten_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_that_counts(monkeypatch, slots=4)
    requests = requests_of(prompts_of(SYSTEM), n=1)
    engine.submit(requests)
    for _ in range(5):  # those that started end together
        engine.step()
    assert not engine.sequences.table.n
    assert engine.pending == len(requests) - 4
    engine.cancel([request.id for request in requests])
    assert not engine.pending
    last = requests[-1]
    fresh, _ = engine_that_counts(monkeypatch, slots=4)
    np.testing.assert_array_equal(run(engine, [last])[last.id].logp, run(fresh, [last])[last.id].logp)


def test_the_one_that_was_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginnings, "MOST_KEPT", 2)
    engine, counted = engine_that_counts(monkeypatch, slots=10)
    third = tuple(1 + (13 * i) % (VOCAB - 3) for i in range(35))
    long = replace(requests_of([(9, 9)], n=1)[0], id="runs", params=SamplingParams(60))
    engine.submit([long])
    for system in (SYSTEM, OTHER, SYSTEM, third):
        engine.submit(replace(r, id=(counted.decoded, r.id)) for r in requests_of(prompts_of(system)[:6], n=1))
        for _ in range(5):
            engine.step()
    before = counted.prefilled
    assert before == 2 + 40 + 31 + 35
    engine.submit([replace(requests_of(prompts_of(SYSTEM)[7:8], n=1)[0], id="again")])
    engine.step()
    assert counted.prefilled == before, "it had been used after the other"
    assert engine.pending


@given(st.lists(st.tuples(st.integers(1, 6000), st.integers(0, 6000)), max_size=30), st.booleans())
def test_a_pass_is_bounded_and_of_similar_lengths(items: list[tuple[int, int]], mixed: bool) -> None:
    groups = passes(items, lambda item: item, mixed)
    assert sorted(item for group in groups for item in group) == sorted(items)
    for group in groups:
        new, before = zip(*group, strict=True)
        assert max(new) <= (2 * min(new) + 16 if mixed else min(new))
        assert max(before) <= 2 * min(before) + 16
        if len(group) > 1:
            computed = max(new) * len(group)
            assert computed <= PREFILL_TOKENS
            assert not any(before) or computed * (max(before) + max(new)) <= MASK_ELEMENTS
