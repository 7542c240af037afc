"""The embedded engine against plain forward passes; batching, cancelling, reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from winnow.base.noise import noise_key, uniform_array
from winnow.engine import Finished, LocalEngine, Request
from winnow.engine.local import engine as local_module

from ..builders.engines import TOKENIZER, make_engine, one
from .engine_models import (
    EOS,
    FUSED,
    GENERIC,
    VOCAB,
    make_model,
    make_requests,
    plain_logits,
    plain_logp,
    reached,
    run,
    word_tokenizer,
)

# ---- log-probabilities and tokens ------------------------------------------------------------------------------


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_tokens_and_logp_are_those_of_a_plain_forward_pass(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    assert type(engine._backend).__name__ == ("LlamaBackend" if name in FUSED else "HFBackend")
    requests = make_requests(10)
    done = run(engine, requests)
    assert done.keys() == {r.id for r in requests}
    for request in requests:
        event = done[request.id]
        assert event.stop_reason == "length"
        assert event.token_ids.shape == (request.params.max_tokens,)
        logits = plain_logits(model, request.prompt_ids, event.token_ids)
        np.testing.assert_allclose(event.logp, plain_logp(logits, request.params, event.token_ids), atol=1e-4)
        if not request.params.temperature:
            assert event.token_ids.tolist() == logits.argmax(-1).tolist()


def test_token_j_is_drawn_with_the_number_of_its_key_and_j() -> None:
    model = make_model("qwen3")
    request = one(max_tokens=12, key=noise_key(5, 1))
    event = run(make_engine(model), [request])["x"]
    cdf = plain_logits(model, request.prompt_ids, event.token_ids).softmax(-1).cumsum(-1)
    numbers = torch.from_numpy(uniform_array(request.key, np.arange(12))).double()
    assert event.token_ids.tolist() == (cdf <= numbers[:, None]).sum(-1).tolist()


def test_padded_vocabulary_is_masked_out() -> None:
    model = make_model("qwen2")
    model.lm_head.weight.data[VOCAB:] *= 100
    model.lm_head.weight.data[VOCAB:] += 5
    requests = make_requests(6, temperature=1.0, top_k=0, top_p=1.0)
    done = run(make_engine(model), requests)
    for request in requests:
        event = done[request.id]
        assert (event.token_ids < VOCAB).all()
        logits = plain_logits(model, request.prompt_ids, event.token_ids)
        np.testing.assert_allclose(event.logp, plain_logp(logits, request.params, event.token_ids), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_bfloat16_stays_near(name: str) -> None:
    model = make_model(name)
    requests = make_requests(6, temperature=1.0, top_k=0, top_p=1.0)
    done = run(make_engine(model, dtype="bfloat16"), requests)
    gaps = [
        np.abs(event.logp - plain_logp(plain_logits(model, r.prompt_ids, event.token_ids), r.params, event.token_ids))
        for r in requests
        for event in [done[r.id]]
    ]
    assert np.concatenate(gaps).mean() < 0.1


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3-rope"])
def test_in_bfloat16_matrices_are_rounded_as_under_autocast(name: str) -> None:
    """A move of matrices too small for bfloat16 is none to a learner under autocast, so it is none to the engine."""
    model, requests = make_model(name), [one((1, 2, 3), 12, k) for k in range(4)]
    state = {n: (t.bfloat16().float() if t.ndim > 1 else t) for n, t in model.state_dict().items()}
    moved = {n: t * (1 + 2**-11) if n.endswith("proj.weight") or n == "lm_head.weight" else t for n, t in state.items()}
    said = []
    for weights in (state, moved):
        engine = make_engine(model, dtype="bfloat16")
        engine.load_weights(weights, 1)
        said.append(run(engine, requests))
    for id_, done in said[0].items():
        np.testing.assert_array_equal(done.logp, said[1][id_].logp)


# ---- batching --------------------------------------------------------------------------------------------------


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("name", ["qwen2-tied", "llama3-rope", "gpt2"])
def test_results_do_not_depend_on_the_number_of_slots(name: str) -> None:
    model, requests = make_model(name), make_requests(16)
    results = [run(make_engine(model, slots=slots), requests) for slots in (1, 5, 64)]
    for request in requests:
        tokens = {tuple(result[request.id].token_ids.tolist()) for result in results}
        assert len(tokens) == 1
        np.testing.assert_allclose(results[0][request.id].logp, results[2][request.id].logp, atol=1e-4)


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize("name", ["qwen3-tied", "gemma2"])
@pytest.mark.parametrize("slots", [5, 32])
def test_fixed_slots_are_bit_exact_whatever_else_runs(name: str, slots: int) -> None:
    model, requests = make_model(name), make_requests(12)
    rng = np.random.default_rng(0)
    first = run(make_engine(model, slots=slots, fixed_slots=True, max_length=40), requests)
    for _ in range(2):
        engine = make_engine(model, slots=slots, fixed_slots=True, max_length=40)
        order = [requests[i] for i in rng.permutation(len(requests))]
        victims = {r.id for r in order[::6]}
        done: dict[Any, Finished] = {}
        while order or engine.pending:
            take = int(rng.integers(0, 8))
            engine.submit(order[:take])
            order = order[take:]
            done |= {e.id: e for e in engine.step() if isinstance(e, Finished)}
            engine.cancel(v for v in victims if rng.random() < 0.2)
        for name_, event in done.items():
            assert event.token_ids.tolist() == first[name_].token_ids.tolist()
            assert event.logp.tolist() == first[name_].logp.tolist()


@pytest.mark.slow
def test_an_idle_engine_remembers_nothing() -> None:
    """A resumed run starts with a fresh engine: it must give the bits of one that has run long."""
    model, requests = make_model("qwen2"), make_requests(8, seed=3)
    used = make_engine(model)
    run(used, make_requests(20, seed=1, max_tokens=90))
    again, fresh = run(used, requests), run(make_engine(model), requests)
    for request in requests:
        assert again[request.id].token_ids.tolist() == fresh[request.id].token_ids.tolist()
        assert again[request.id].logp.tolist() == fresh[request.id].logp.tolist()


def unlike_lengths() -> list[Request]:
    return [one((1 + i % 3,) * (1 + i * 5 % 60), 10 + i % 40, i) for i in range(48)]


def test_sorting_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = make_model("qwen3"), unlike_lengths()
    plain = run(make_engine(model, slots=40), requests)
    monkeypatch.setattr(local_module, "SORT_COST", 0)
    sorted_ = run(make_engine(model, slots=40), requests)
    assert all(sorted_[r.id].token_ids.tolist() == plain[r.id].token_ids.tolist() for r in requests)


def test_rows_stay_where_all_are_read_as_wide_as_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(order_M: np.ndarray) -> None:
        raise AssertionError("all keys and values are copied for nothing")

    monkeypatch.setattr(local_module, "SORT_COST", 0)
    engine = make_engine("gpt2", slots=40)
    monkeypatch.setattr(engine._rows, "sort", refuse)
    assert len(run(engine, unlike_lengths())) == 48


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_siblings_share_one_prefill_also_across_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_model(name), slots=3)
    seen: list[tuple[int, ...]] = []
    prefill = engine._backend.prefill
    monkeypatch.setattr(engine._backend, "prefill", lambda prompts, _: seen.extend(prompts) or prefill(prompts))
    requests = make_requests(4, siblings=5)
    run(engine, requests)
    assert sorted(seen) == sorted({r.prompt_ids for r in requests})
    assert not engine._prompts


def test_requests_may_be_submitted_while_others_run() -> None:
    model, requests = make_model("qwen2-tied"), make_requests(8)
    together = run(make_engine(model), requests)
    engine = make_engine(model)
    done: dict[Any, Finished] = {}
    for request in requests:
        engine.submit([request])
        done |= {e.id: e for e in engine.step() if isinstance(e, Finished)}
    done |= run(engine)
    assert all(done[r.id].token_ids.tolist() == together[r.id].token_ids.tolist() for r in requests)


# ---- how a sequence ends ---------------------------------------------------------------------------------------


def test_prompt_of_one_token_and_one_new_token() -> None:
    done = run(make_engine(), [one((5,), 1)])
    assert done["x"].token_ids.shape == done["x"].logp.shape == done["x"].versions.shape == (1,)
    assert (done["x"].token_ids.dtype, done["x"].logp.dtype) == (np.int64, np.float32)
    assert done["x"].versions.dtype == np.int32
    assert make_engine().step() == []


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("where", ["generation_config", "tokenizer", "config"])
def test_eos_ends_a_sequence_and_is_kept(where: str) -> None:
    model, tokenizer = make_model("qwen2"), word_tokenizer()
    if where == "generation_config":
        model.generation_config.eos_token_id = [EOS, 7]
    elif where == "config":
        model.config.eos_token_id = EOS
    else:
        tokenizer.eos_token = "<eos>"
    requests = make_requests(20, max_tokens=60, temperature=1.0, top_k=0, top_p=1.0)
    ends = {EOS, 7} if where == "generation_config" else {EOS}
    done = run(LocalEngine(model, tokenizer, slots=16), requests)
    assert {event.stop_reason for event in done.values()} == {"eos", "length"}
    for event in done.values():
        assert not ends & set(event.token_ids[:-1].tolist())
        assert (event.token_ids[-1] in ends) == (event.stop_reason == "eos")


def test_stop_strings_end_a_sequence() -> None:
    model, params = make_model("qwen2"), {"max_tokens": 60, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    stops, requests = ("w50", "w3 w2"), make_requests(20, **params)
    free = run(make_engine(model, slots=16), requests)
    done = run(make_engine(model, slots=16), make_requests(20, **params, stop=stops))
    assert {event.stop_reason for event in done.values()} == {"stop", "length"}
    for request in requests:
        texts = [TOKENIZER.decode(free[request.id].token_ids[:n]) for n in range(1, 61)]
        count = next((n for n, text in enumerate(texts, 1) if any(s in text for s in stops)), 60)
        assert len(done[request.id].token_ids) == count
        assert done[request.id].token_ids.tolist() == free[request.id].token_ids[:count].tolist()


def test_cancel_returns_what_there_is_and_frees_the_slot() -> None:
    model, requests = make_model("qwen2"), make_requests(3, max_tokens=15)
    whole = run(make_engine(model), requests)
    engine = make_engine(model, slots=4)
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    cut = {event.id: event for event in engine.cancel([(0, 1), (0, 3), (2, 0), "unknown", (0, 1)])}
    assert cut.keys() == {(0, 1), (0, 3), (2, 0)}
    assert all(event.stop_reason == "cancelled" for event in cut.values())
    assert [len(cut[i].token_ids) for i in ((0, 1), (0, 3), (2, 0))] == [5, 5, 0]
    assert cut[0, 1].token_ids.tolist() == whole[0, 1].token_ids[:5].tolist()
    assert cut[2, 0].logp.dtype == np.float32
    assert engine.pending == 9
    rest = run(engine)
    assert rest.keys() == whole.keys() - cut.keys()
    assert all(event.token_ids.tolist() == whole[i].token_ids.tolist() for i, event in rest.items())
    assert engine.cancel([(0, 1)]) == []
    engine.submit(requests[:1])
    assert engine.cancel([requests[0].id])[0].token_ids.size == 0
    assert engine.pending == 0


def test_cancelling_in_the_step_of_a_report_computes_no_further_token() -> None:
    engine = make_engine()
    engine.submit([one(max_tokens=10, report_at=(3,))])
    events = [event for _ in range(3) for event in engine.step()]
    assert [event.n for event in reached(events)] == [3]
    assert len(engine.cancel(["x"])[0].token_ids) == 3


# ---- reports on the way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "gpt2", "opt"])
def test_a_report_gives_the_hidden_state_the_token_was_drawn_from(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    engine.submit([one((1, 2), 9, i, report_at=(1, 4, 9)) for i in range(3)])
    events = [event for _ in range(9) for event in engine.step()]
    assert [(event.id, event.n) for event in reached(events)] == [(i, n) for n in (1, 4) for i in range(3)]
    done = {event.id: event for event in events if isinstance(event, Finished)}
    head = model.get_output_embeddings().weight.detach()[:VOCAB].double()
    for event in reached(events):
        whole = done[event.id]
        assert event.hidden.dtype == event.logp.dtype == np.float32
        assert event.logp.tolist() == whole.logp[: event.n].tolist()
        logits = plain_logits(model, (1, 2), whole.token_ids)[event.n - 1]
        np.testing.assert_allclose(head @ torch.from_numpy(event.hidden).double(), logits, atol=1e-4)


# ---- weights ---------------------------------------------------------------------------------------------------
