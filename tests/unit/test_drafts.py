"""Drafts: an engine that reads them gives the same rollouts for fewer decode steps, and a run resumes with them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from winnow.base.errors import ConfigError
from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, Reached, Request, SamplingParams
from winnow.rollout.drafts import likeliest
from winnow.rollout.in_flight import Flight, Sibling, siblings_of
from winnow.rollout.options import RolloutOptions, check_drafts
from winnow.sampler.codec import job_from, job_state
from winnow.sampler.drafts import ROLLOUT_BYTES, TURN_BYTES, Drafts, DraftsState
from winnow.types import Draft, Group, Job, Prompt, Rollout, Turn, Visit

from ..builders.engines import Counted, make_engine, require_equal
from .engine_models import EOS, FUSED, GENERIC, VOCAB, make_model, run

PROMPTS = [Prompt(f"p{i}", i, text="") for i in range(9)]


@pytest.fixture(autouse=True)
def _read_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.engine.local.engine.READ_ROWS", 1 << 20)
    monkeypatch.setattr("winnow.rollout.drafts.WORTH_STEPS", 0.0)


def requests(n: int = 12, **params: Any) -> list[Request]:
    """Requests of some prompts with two siblings each."""
    prompts = [tuple(1 + (3 * i + j) % (VOCAB - 3) for j in range(3 + i)) for i in range(n // 2)]
    given = SamplingParams(**{"max_tokens": 20} | params)
    return [Request((i, k), prompt, given, noise_key(4, i, k)) for i, prompt in enumerate(prompts) for k in range(2)]


def finished(engine: LocalEngine, asked: list[Request]) -> dict[Any, Finished]:
    engine.submit(asked)
    return run(engine)


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}]
)
@pytest.mark.parametrize("name", list(FUSED))
def test_a_draft_changes_nothing_but_what_is_decoded(name: str, params: dict[str, Any]) -> None:
    """Drafts that are right throughout, up to a place, or nowhere; more of them than slots."""
    model, rng = make_model(name), np.random.default_rng(0)
    with_, without = make_engine(model, slots=5), make_engine(model, slots=5)
    asked = [replace(r, raw_logp=True, last_hidden=True) for r in requests(**params)]
    plain = finished(without, asked)
    drafted = []
    for number, request in enumerate(asked):
        draft = plain[request.id].token_ids.copy()
        if number % 3 == 1:
            draft[len(draft) // 2] = (draft[len(draft) // 2] + 1) % VOCAB
        if number % 3 == 2:
            draft = rng.integers(0, VOCAB, 1 + number)
        drafted.append(replace(request, draft=tuple(draft.tolist()) if number != 3 else ()))
    found = finished(with_, drafted)
    require_equal(plain, found)
    accepted = [found[r.id].num_reused_tokens for r in asked]
    for number, request in enumerate(asked):
        length = len(plain[request.id].token_ids)
        if number != 3 and number % 3 < 2:
            wanted = length - 1 if number % 3 == 0 else length // 2
            assert accepted[number] == min(wanted, length - 1)
    assert accepted[3] == 0
    assert (found[asked[0].id].versions == with_.version).all()


def test_a_sequence_ends_and_reports_where_it_does_without_a_draft() -> None:
    model = make_model("qwen2")
    plain = finished(make_engine(model), requests())
    engine, fresh = make_engine(model), make_engine(model)
    reached: list[list[Reached]] = []
    for each, drafts in ((engine, True), (fresh, False)):
        each.submit(
            replace(r, report_at=(3, 11), draft=tuple(plain[r.id].token_ids.tolist()) if drafts else ())
            for r in requests()
        )
        events = []
        while each.pending:
            events += each.step()
        reached.append(sorted((e for e in events if isinstance(e, Reached)), key=lambda e: (e.id, e.n)))
        ended = {e.id: e for e in events if isinstance(e, Finished)}
        require_equal(plain, ended)
        if drafts:
            assert {e.num_reused_tokens for e in ended.values()} == {2}, "a reported token is drawn by itself"
    for one, other in zip(*reached, strict=True):
        assert (one.id, one.n) == (other.id, other.n)
        np.testing.assert_allclose(one.logp, other.logp, atol=2e-4)


def test_a_draft_that_passes_an_end_is_accepted_up_to_it() -> None:
    """EOS in the middle of a draft, which no rollout has: the sequence ends there all the same."""
    model = make_model("qwen2")
    model.generation_config.eos_token_id = [EOS, 7, 9]
    engine = make_engine(model)
    plain = finished(engine, requests(60, max_tokens=60))
    ended = [f for f in plain.values() if f.stop_reason == "eos" and len(f.token_ids) > 1]
    assert ended, "none of the sequences ended by itself"
    asked = {r.id: r for r in requests(60, max_tokens=60)}
    drafted = [replace(asked[f.id], draft=(*f.token_ids.tolist(), *([1] * (60 - len(f.token_ids))))) for f in ended]
    found = finished(engine, drafted)
    require_equal({f.id: f for f in ended}, found)
    assert any(f.num_reused_tokens for f in found.values())


@pytest.mark.parametrize("name", list(GENERIC))
def test_other_models_decode_every_token(name: str) -> None:
    engine = make_engine(make_model(name))
    assert "drafts" not in engine.provides
    asked = requests()[::2]  # no siblings, which would be decoded together
    plain = finished(engine, asked)
    found = finished(engine, [replace(r, draft=tuple(plain[r.id].token_ids.tolist())) for r in asked])
    require_equal(plain, found)
    assert not any(f.num_reused_tokens for f in found.values())


def test_a_draft_with_fixed_slots_does_not_depend_on_others() -> None:
    engine = make_engine(make_model("qwen3"), slots=6, fixed_slots=True)
    plain = finished(engine, requests())
    drafted = [replace(r, draft=tuple(plain[r.id].token_ids.tolist()[:9])) for r in requests()]
    together = finished(engine, drafted)
    for request in drafted:
        alone = finished(engine, [request])[request.id]
        np.testing.assert_array_equal(alone.logp, together[request.id].logp)


def test_impossible_drafts_are_refused() -> None:
    engine = make_engine(make_model("qwen2"))
    request = requests()[0]
    for draft, what in (((1, VOCAB + 9), "token 69"), ((1,) * 21, "21 tokens")):
        with pytest.raises(ValueError, match=f"the draft has {what}, outside the vocabulary"):
            engine.submit([replace(request, draft=draft)])


def test_a_run_that_would_save_nothing_is_refused() -> None:
    options = RolloutOptions(SamplingParams(8), 8, 0, drafts=True)
    check_drafts([replace(options, drafts=False)], frozenset())
    check_drafts([options], frozenset({"drafts"}))
    with pytest.raises(ConfigError, match="speculative: this engine decodes every token"):
        check_drafts([options], frozenset())
    biased = make_engine(make_model("llama-bias"))
    with pytest.raises(ConfigError, match=r"\(LlamaForCausalLM has model.layers.0.mlp.down_proj.bias\)"):
        check_drafts([options], biased.provides, biased.no_drafts)
    penalty = replace(options, params=SamplingParams(8, repetition_penalty=1.1))
    with pytest.raises(ConfigError, match="speculative: with repetition_penalty"):
        check_drafts([penalty], frozenset({"drafts"}))


def group(ordinal: int, epoch: int, tokens: list[list[int]], turns: tuple[tuple[int, int], ...] = ()) -> Group:
    """A group of rollouts with these tokens; `turns`: where each begins and ends, by default one of all tokens."""
    rollouts = []
    for i, ids in enumerate(tokens):
        n = len(ids)
        rollout = Rollout(i, (1,), np.array(ids), np.ones(n, bool), np.zeros(n, np.float32), np.zeros(n, np.int32))
        rollout.turns = [Turn("", None, start, stop, "eos") for start, stop in turns or [(0, n)]]
        rollouts.append(rollout)
    return Group(Visit(ordinal, epoch, PROMPTS[ordinal]), rollouts)


def drafts_of(drafts: Drafts, visit: Visit) -> tuple[Draft, ...]:
    return drafts.job(visit, 2, 0).drafts


def test_drafts_are_the_turns_of_the_last_rollouts() -> None:
    drafts = Drafts(on=True)
    assert drafts.job(Visit(0, 0, PROMPTS[2]), 2, 0) == Job(Visit(0, 0, PROMPTS[2]), 2)
    drafts.observe(group(2, 0, [[5, 6], [7]]))
    drafts.observe(group(2, 1, [[8, 9, 1, 1, 10]], ((0, 2), (4, 5))))  # the environment wrote 1, 1
    assert drafts.job(Visit(9, 2, PROMPTS[2]), 3, 1) == Job(Visit(9, 2, PROMPTS[2]), 3, "train", 1, (((8, 9), (10,)),))
    assert drafts_of(drafts, Visit(9, 2, PROMPTS[3])) == ()
    off = Drafts()
    off.observe(group(2, 0, [[5, 6]]))
    assert off.state_dict() == Drafts().state_dict()
    assert off.job(Visit(9, 7, PROMPTS[2]), 3, 0) == Job(Visit(9, 7, PROMPTS[2]), 3)


def test_siblings_that_join_a_group_have_drafts_from_it() -> None:
    drafts = Drafts(on=True)
    for epoch, tokens in ((0, [[1], [2], [3]]), (1, [[5, 6], [7, 8]])):
        drafts.observe(group(2, epoch, tokens))
    assert drafts.job(Visit(9, 1, PROMPTS[2]), 2, 2).drafts == (((5, 6),), ((7, 8),))
    drafts.observe(group(2, 1, [[5, 6], [7, 8], [9]]))
    assert drafts.job(Visit(9, 2, PROMPTS[2]), 2, 0).drafts == (((5, 6),), ((7, 8),), ((9,),))


def test_a_visit_that_fails_takes_no_drafts_away() -> None:
    drafts = Drafts(on=True)
    drafts.observe(group(2, 0, [[5, 6], [7, 8]]))
    before = drafts.state_dict()
    failed = group(2, 1, [[], []])
    for rollout in failed.rollouts:
        rollout.turns = []
    drafts.observe(failed)
    drafts.observe(replace(failed, visit=Visit(3, 1, PROMPTS[3])))
    assert drafts.state_dict() == before


DRAFTS: tuple[Draft, ...] = (((1, 2), (3,), (4,)), ((1, 2), (3,), (5, 6)), ((1, 9), (3,), (5, 7)), ((8,), (1, 2), (9,)))


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ((), (1, 2)),  # the most frequent
        (((1, 2), (3,)), (4,)),  # what followed these turns
        (((1, 9), (3,)), (5, 7)),
        (((7,), (1, 2)), (3,)),  # what mostly followed the last turn
        (((7,), (9,)), ()),
        (((1, 2), (3,), (5, 6)), ()),
    ],
)
def test_a_turn_is_guessed(said: Draft, wanted: tuple[int, ...]) -> None:
    job = Job(Visit(0, 0, PROMPTS[0]), 4, drafts=DRAFTS)
    flight = Flight(job, siblings_of(job, greedy=False), [])
    sibling = flight.siblings[0]
    speak(sibling, said)
    assert flight.draft(sibling) == wanted
    assert replace(flight, job=replace(job, drafts=())).draft(sibling) == ()


def speak(sibling: Sibling, said: Draft) -> None:
    """Let it have sampled these turns."""
    for i, tokens in enumerate(said):
        n = len(tokens)
        sibling.sampled(Finished(0, np.array(tokens), np.zeros(n), np.zeros(n, int), "eos", 0.0))
        sibling.append(np.array([50]), False, np.zeros(1), np.full(1, -1))
        sibling.rollout.turns.append(Turn("", None, i, i, "eos"))


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ((), (1, 2)),  # a first turn that another one has ended
        (((1, 2),), (3,)),  # after the same turn
        (((8,), (3,)), (4,)),  # after the same last turn
        (((5,), (6,), (5,)), (6,)),  # as it did before itself
        (((1, 2), (3,), (4,)), ()),  # as far as any
    ],
)
def test_turns_of_siblings_in_flight_are_drafts(said: Draft, wanted: tuple[int, ...]) -> None:
    job = Job(Visit(0, 0, PROMPTS[0]), 3)
    flight = Flight(job, siblings_of(job, greedy=False), [])
    speak(flight.siblings[0], ((1, 2), (3,), (4,)))
    speak(flight.siblings[1], said)
    assert flight.draft(flight.siblings[1]) == wanted


def test_the_likeliest_draft() -> None:
    assert likeliest([], 8) == ()
    assert likeliest([(3, 1), (2, 2, 5), (2, 1), (2, 2), (2, 2), (3,)], 8) == (2, 2, 5)
    assert likeliest([(1,), (1, 2, 3), (1, 2, 4), (1, 2, 3)], 1) == (1, 2, 3)


def test_a_draft_ends_one_token_behind_those_worth_reading() -> None:
    """By the chance that one of the siblings gets there; the last token is not read."""
    drafts = [(1, 2, 3, 4)] * 4 + [(1, 2, 7, 4)] * 3 + [(1, 9)]
    assert likeliest(drafts, 1) == (1, 2, 3)  # 7.5/8 and 6.5/8, but 3.5/8
    assert likeliest(drafts, 2) == (1, 2, 3, 4)
    assert likeliest([(5, 6), (7, 8), (9, 9)], 1) == (5,)


def test_a_draft_that_saves_too_few_steps_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.rollout.drafts.WORTH_STEPS", 2.0)
    drafts = [(1, 2, 3, 4)] * 8  # each token with a chance of 7.5/8
    assert likeliest(drafts, 8) == (1, 2, 3, 4)  # 4 * 0.597
    assert likeliest(drafts, 16) == ()  # 4 * 0.356
    assert likeliest([(1, 2)] * 8, 1) == ()


def test_drafts_are_read_while_few_rows_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests()
    plain = finished(make_engine(make_model("qwen2")), asked)
    drafted = [replace(r, draft=tuple(plain[asked[0].id].token_ids.tolist())) for r in asked]
    for rows, reads in ((len(asked) // 2, True), (len(asked) // 2 - 1, False)):  # two siblings have one prompt
        monkeypatch.setattr("winnow.engine.local.engine.READ_ROWS", rows)
        engine = make_engine(make_model("qwen2"), slots=64)
        counted = Counted(engine)
        require_equal(plain, finished(engine, drafted))
        prompts = {r.prompt_ids: len(r.prompt_ids) + (len(r.draft) - 1) * reads for r in drafted}
        assert counted.prefilled + counted.read == sum(prompts.values())


def test_the_oldest_drafts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.sampler.drafts.MAX_DRAFT_BYTES", 4 * (ROLLOUT_BYTES + TURN_BYTES + 10))
    drafts = Drafts(on=True)
    for ordinal in (0, 1, 0, 2):
        drafts.observe(group(ordinal, 0, [[1, 2, 3], [4, 5]]))
    assert [bool(drafts_of(drafts, Visit(9, 1, PROMPTS[i]))) for i in range(3)] == [True, False, True]


def test_drafts_survive_a_checkpoint_and_a_message() -> None:
    drafts = Drafts(on=True)
    for ordinal in range(5):
        drafts.observe(group(ordinal, ordinal % 2, [[ordinal] * (1 + k) for k in range(ordinal)]))
    drafts.observe(group(5, 1, [[1, 2, 3, 4], [5, 6, 7, 8]], ((0, 1), (2, 4))))
    again = Drafts(on=True)
    again.load(DraftsState.of(json.loads(json.dumps(drafts.state_dict()))))
    assert again.state_dict() == drafts.state_dict()
    for ordinal in range(7):
        job = drafts.job(Visit(0, 1, PROMPTS[ordinal]), 9, 0)
        assert again.job(Visit(0, 1, PROMPTS[ordinal]), 9, 0) == job
        assert job_from(json.loads(json.dumps(job_state(job))), {"train": PROMPTS}) == job
    broken = drafts.state_dict() | {"tokens": Drafts().state_dict()["tokens"]}
    with pytest.raises(ValueError, match="drafts: lengths add up to"):
        again.load(DraftsState.of(broken))
    columns = {"ordinals": [3], "rollouts": [1], "lengths": [2]}
    gap = DraftsState(**{k: np.array(v, np.uint32) for k, v in columns.items()}, tokens=np.array([5, 6], np.int32))
    with pytest.raises(ValueError, match="drafts: prompt 3 has a rollout 1, but none before it"):
        again.load(gap)


def test_a_stop_string_that_is_not_completed_ends_no_draft() -> None:
    model = make_model("qwen2")
    asked = requests(stop=("w1 w9 w9 w9", "w3 w4 w5 w6"))
    plain = finished(make_engine(model), asked)
    assert {f.stop_reason for f in plain.values()} == {"length"}
    found = finished(make_engine(model), [replace(r, draft=tuple(plain[r.id].token_ids.tolist())) for r in asked])
    require_equal(plain, found)
    assert {f.num_reused_tokens for f in found.values()} == {19}


def test_mixed_reports_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of drafts are computed some at a time; only some of the requests want more than tokens."""
    monkeypatch.setattr("winnow.engine.local.engine.DRAFT_LOGITS", 7 * VOCAB)
    model = make_model("llama-tied")
    asked = [replace(r, raw_logp=i % 2 == 0) for i, r in enumerate(requests(temperature=0.7))]
    plain = finished(make_engine(model), asked)
    require_equal(
        plain, finished(make_engine(model), [replace(r, draft=tuple(plain[r.id].token_ids.tolist())) for r in asked])
    )


def test_siblings_share_the_pass_over_their_prompt_and_draft() -> None:
    """Also those that wait for a slot meanwhile."""
    engine, prompt = make_engine(make_model("qwen2"), slots=4), tuple(range(1, 50))
    asked = [Request(k, prompt, SamplingParams(9), noise_key(k)) for k in range(6)]
    plain = finished(engine, asked)
    backend: Any = engine._backend
    prefill, computed = backend.prefill, []
    backend.prefill = lambda prompts, drafts: computed.extend(map(len, prompts)) or prefill(prompts, drafts)
    draft = tuple(plain[0].token_ids.tolist())
    found = finished(engine, [replace(r, draft=draft) for r in asked])
    require_equal(plain, found)
    assert computed == [49 + len(draft) - 1]
    assert found[0].num_reused_tokens >= len(draft) - 1
