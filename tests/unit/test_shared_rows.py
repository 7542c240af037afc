"""Siblings with the same tokens so far have one row of the cache, and go through the model once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, Reached, Request, SamplingParams
from winnow.engine.local.cache import CacheRows

from ..builders.engines import Counted, make_engine, require_equal
from .engine_models import EOS, FUSED, GENERIC, VOCAB, make_model, run

Tokens = tuple[int, ...]


class World:
    """Sequences and a cache that holds what was written to its rows; every sequence must find its own tokens there."""

    def __init__(self) -> None:
        self.rows = CacheRows()
        self.cache: dict[int, Tokens] = {}
        self.said: list[Tokens] = []
        self.started = 0

    def start(self, beginnings: list[int]) -> None:
        self.started += 100
        tokens = [(self.started + beginning,) for beginning in beginnings]
        rows, found = self.rows.append([(token, 1) for (token,) in tokens])
        assert len(set(found)) == len(found) == rows.stop - rows.start
        self.cache |= {row: (token,) for row, (token, _) in zip(range(rows.start, rows.stop), found, strict=True)}
        self.said += tokens

    def step(self, drawn: list[int]) -> None:
        """Decode: all say one more token; those in a row write it once."""
        self.arrange()
        for row, (first, columns) in enumerate(self.rows.prompts(self.rows.first_M).T.tolist()):
            assert first <= row
            assert self.cache[first][:columns] == self.cache[row][:columns]
        last = [tokens[-1] for tokens in self.said]
        for row, first in enumerate(self.rows.first_M.tolist()):
            assert self.rows.of_N[first] == row
            self.cache[row] += (last[first],)
        self.said = [(*tokens, token) for tokens, token in zip(self.said, drawn, strict=True)]

    def arrange(self) -> None:
        last = np.array([tokens[-1] for tokens in self.said], dtype=np.int64)
        targets, sources = self.rows.arrange(last)
        self.cache |= dict(zip(targets.tolist(), [self.cache[s] for s in sources.tolist()], strict=True))
        assert self.rows.n == len(set(self.said)), "no two rows for the same tokens, no row for nobody"
        assert sorted(set(self.rows.of_N.tolist())) == list(range(self.rows.n))

    def remove(self, gone: list[int]) -> None:
        rest = len(self.said) - len(gone)
        targets = [row for row in gone if row < rest]
        sources = [row for row in range(rest, len(self.said)) if row not in gone]
        for target, source in zip(targets, sources, strict=True):
            self.said[target] = self.said[source]
        del self.said[rest:]
        self.rows.remove(np.array(targets, dtype=np.int64), np.array(sources, dtype=np.int64), rest)

    def sort(self, rng: np.random.Generator) -> None:
        self.arrange()
        order = rng.permutation(self.rows.n)
        self.rows.sort(order)
        self.cache = {row: self.cache[source] for row, source in enumerate(order.tolist())}

    def check(self) -> None:
        for tokens, row in zip(self.said, self.rows.of_N.tolist(), strict=True):
            assert self.cache[row] == (tokens[0], *tokens[:-1]), "all but the last token, after the beginning"


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocabulary=st.sampled_from([1, 2, 50]))
def test_rows_hold_what_their_sequences_have_said(seed: int, vocabulary: int) -> None:
    rng, world = np.random.default_rng(seed), World()
    for _ in range(30):
        action = rng.integers(4)
        if action == 0 and len(world.said) < 20:
            world.start(rng.integers(0, 3, rng.integers(1, 6)).tolist())
            world.step(rng.integers(0, vocabulary, len(world.said)).tolist())
        elif action == 1 and world.said:
            gone = rng.permutation(len(world.said))[: rng.integers(1, len(world.said) + 1)]
            world.remove(sorted(gone.tolist()))
        elif action == 2:
            world.sort(rng)
        else:
            world.step(rng.integers(0, vocabulary, len(world.said)).tolist())
        world.check()


def siblings(prompts: list[Tokens], n: int = 6, **params: Any) -> list[Request]:
    given = SamplingParams(**{"max_tokens": 12, "temperature": 0.4} | params)
    return [Request((i, k), p, given, noise_key(1, i, k)) for i, p in enumerate(prompts) for k in range(n)]


def alone(model: Any, asked: list[Request], **options: Any) -> dict[Any, Finished]:
    """What each request gets from an engine that runs nothing else."""
    engine = make_engine(model, **options)
    return {id_: finished for request in asked for id_, finished in run(engine, [request]).items()}


def require_counts(found: dict[Any, Finished], prompt_of: Any, decoded: int) -> None:
    """By brute force: one row of a step for each prompt with distinct tokens after it, the last token never fed."""
    said = {id_: f.token_ids.tolist() for id_, f in found.items()}
    fed = [(prompt_of(id_), tuple(tokens[:n])) for id_, tokens in said.items() for n in range(1, len(tokens))]
    assert decoded == len(set(fed))
    assert sum(f.num_reused_tokens for f in found.values()) == len(fed) - decoded


PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11), (1, 2, 3, 4)]


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_siblings_that_say_the_same_are_decoded_once(name: str) -> None:
    model, asked = make_model(name), siblings(PROMPTS)
    engine = make_engine(model, slots=64)
    counted = Counted(engine)
    found = run(engine, asked)
    require_equal(found, alone(model, asked))
    require_counts(found, lambda id_: id_[0], counted.decoded)
    assert sum(f.num_reused_tokens for f in found.values()) > 0
    assert run(engine, asked)[0, 0].token_ids.tolist() == found[0, 0].token_ids.tolist()


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("slots", [3, 10])
def test_siblings_that_find_no_slot_at_first(slots: int, fixed: bool) -> None:
    """They start later, so they have no row with those before them; some rows move when others end."""
    model = make_model("qwen3")
    asked = [replace(r, params=replace(r.params, max_tokens=4 + 7 * (i % 3))) for i, r in enumerate(siblings(PROMPTS))]
    found = run(make_engine(model, slots=slots, fixed_slots=fixed), asked)
    require_equal(found, alone(model, asked, slots=slots, fixed_slots=fixed))


def test_siblings_may_differ_in_all_but_their_tokens() -> None:
    """Temperatures, filters, penalties, ends, and what they report."""
    model, engine = make_model("llama-tied"), make_engine("llama-tied", slots=64)
    more: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.2, "top_k": 2},
        {"temperature": 0.2, "repetition_penalty": 1.2},
        {"temperature": 0.3, "max_tokens": 5},
        {"temperature": 0.3, "stop": ("w9",)},
        {},
    ]
    asked = [
        replace(
            r,
            params=replace(r.params, **more[i % 6]),
            raw_logp=i % 3 == 0,
            last_hidden=i % 4 == 0,
            report_at=(2, 4) if i % 5 == 0 else (),
        )
        for i, r in enumerate(siblings(PROMPTS))
    ]
    require_equal(run(engine, asked), alone(model, asked))


def test_new_weights_and_cancelled_siblings_meanwhile() -> None:
    model, other = make_model("qwen2"), make_model("qwen2", seed=1)
    asked = siblings([PROMPTS[2]], n=8, temperature=0.1)
    cancelled = {r.id for r in asked[:6:2]}

    def found(rows: list[list[Request]]) -> dict[Any, Finished]:
        done: dict[Any, Finished] = {}
        for some in rows:
            engine = make_engine(model, slots=8)
            engine.submit(some)
            for _ in range(3):
                engine.step()
            engine.load_weights(other.state_dict(), 1)
            done |= {f.id: f for f in engine.cancel(r.id for r in some if r.id in cancelled)}
            engine.step()
            done |= run(engine)
        return done

    together = found([asked])
    apart = found([asked[:2], asked[2:4], asked[4:6], asked[6:7], asked[7:]])
    assert {f.stop_reason for f in together.values()} == {"cancelled", "length"}
    require_equal(together, apart)
    assert all(set(f.versions.tolist()) == {0, 1} for id_, f in together.items() if id_ not in cancelled)
    assert sum(f.num_reused_tokens for f in together.values()) > sum(f.num_reused_tokens for f in apart.values())


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_turns_after_the_same_turns_are_started_and_decoded_once(name: str) -> None:
    """Agents whose actions and observations were the same so far."""
    model, n = make_model(name), 6
    engine, plain = make_engine(model, slots=16), make_engine(model, slots=16)
    counted = Counted(engine)
    texts = dict.fromkeys(range(n), PROMPTS[2])
    extended = decoded = 0
    for turn in range(3):
        params = SamplingParams(4, temperature=0.3)
        asked = [Request(k, text, params, noise_key(3, k, turn), keep=turn < 2) for k, text in texts.items()]
        found = run(engine, asked)
        require_equal(found, {i: f for r in asked for i, f in run(plain, [replace(r, keep=False)]).items()})
        require_counts(found, lambda k, texts=dict(texts): texts[k], counted.decoded - decoded)
        if turn:
            assert counted.extended - extended == 3 * len(set(texts.values())), "the last token and the observation"
        extended, decoded = counted.extended, counted.decoded
        texts = {k: (*text, *found[k].token_ids.tolist(), 9, 8) for k, text in texts.items()}
    assert 1 < len(set(texts.values())) <= n
    assert len(engine._kept) == 0


@pytest.mark.parametrize("name", ["qwen2", "qwen3-tied"])
def test_a_draft_of_several_siblings_is_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.engine.local.engine.READ_ROWS", 1 << 20)
    model, engine = make_model(name), make_engine(name, slots=64)
    asked = siblings(PROMPTS)
    plain = run(engine, asked)
    backend: Any = engine._backend
    prefill, tokens = backend.prefill, []
    backend.prefill = lambda prompts, drafts: tokens.extend(drafts) or prefill(prompts, drafts)
    guess = {i: tuple(plain[i, 0].token_ids.tolist()) for i in range(len(PROMPTS))}
    counted = Counted(engine)
    found = run(engine, [replace(r, draft=guess[r.id[0]]) for r in asked])
    require_equal(found, alone(model, asked))
    assert sorted(tokens) == sorted(len(draft) - 1 for draft in guess.values())
    said = {id_: f.token_ids.tolist() for id_, f in found.items()}
    accepted = {
        id_: next((n for n, (a, b) in enumerate(zip(t, guess[id_[0]], strict=False)) if a != b), len(t) - 1)
        for id_, t in said.items()
    }
    fed = [(i[0], tuple(t[:n])) for i, t in said.items() for n in range(accepted[i] + 1, len(t))]
    assert counted.decoded == len(set(fed))


def test_a_sequence_that_ends_leaves_its_row_to_the_others() -> None:
    model = make_model("qwen2", eos_token_id=EOS)
    asked = siblings([(1, 2)], n=16, temperature=1.0, max_tokens=30)
    found = run(make_engine(model, slots=16), asked)
    assert len({f.stop_reason for f in found.values()}) > 1
    require_equal(found, alone(model, asked))


def test_events_are_those_of_siblings_alone() -> None:
    model = make_model("qwen3")
    asked = [replace(r, report_at=(1, 3), raw_logp=True) for r in siblings([PROMPTS[0]], temperature=0.2)]

    def reached(some: list[Request], engine: LocalEngine) -> dict[Any, Reached]:
        engine.submit(some)
        events: list[Any] = []
        while engine.pending:
            events += engine.step()
        return {(e.id, e.n): e for e in events if isinstance(e, Reached)}

    together = reached(asked, make_engine(model))
    engine = make_engine(model)
    apart = {key: event for request in asked for key, event in reached([request], engine).items()}
    assert together.keys() == apart.keys()
    for key, event in together.items():
        np.testing.assert_allclose(event.logp, apart[key].logp, atol=2e-4)
        np.testing.assert_allclose(event.hidden, apart[key].hidden, atol=2e-3)


def test_a_vocabulary_is_no_limit_of_row_numbers() -> None:
    rows = CacheRows()
    rows.append([(i, 1) for i in range(1000)])
    rows.arrange(np.full(1000, VOCAB * 10**6))
    assert rows.n == 1000
