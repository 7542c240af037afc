"""The embedded engine against plain forward passes; batching, cancelling, checkpoints, new weights, refusals."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from winnow.engine import ENGINES, Finished, LocalEngine, LocalOptions, Request, SamplingParams
from winnow.engine import hf as hf_module
from winnow.engine import local as local_module
from winnow.noise import as_tensor, noise_key, uniform

from .engine_models import (
    EOS,
    FUSED,
    GENERIC,
    PADDED,
    SIZES,
    VOCAB,
    make_model,
    make_requests,
    plain_logits,
    plain_logp,
    reached,
    run,
    word_tokenizer,
)

TOKENIZER = word_tokenizer()


def make_engine(model: Any = "qwen2-tied", **options: Any) -> LocalEngine:
    model = make_model(model) if isinstance(model, str) else model
    return LocalEngine(model, TOKENIZER, **{"slots": 8, **options})


def one(prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 6, name: Any = "x", **rest: Any) -> Request:
    params = SamplingParams(max_tokens, **rest.pop("params", {}))
    return Request(name, prompt, params, rest.pop("key", noise_key(7, hash(name) % 97)), **rest)


# ---- log-probabilities and tokens ------------------------------------------------------------------------------


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
    numbers = uniform(as_tensor([request.key]).expand(12), torch.arange(12)).double()
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


# ---- batching --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2-tied", "llama3-rope", "gpt2"])
def test_results_do_not_depend_on_the_number_of_slots(name: str) -> None:
    model, requests = make_model(name), make_requests(16)
    results = [run(make_engine(model, slots=slots), requests) for slots in (1, 5, 64)]
    for request in requests:
        tokens = {tuple(result[request.id].token_ids.tolist()) for result in results}
        assert len(tokens) == 1
        np.testing.assert_allclose(results[0][request.id].logp, results[2][request.id].logp, atol=1e-4)


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


def test_an_idle_engine_remembers_nothing() -> None:
    """A resumed run starts with a fresh engine: it must give the bits of one that has run long."""
    model, requests = make_model("qwen2"), make_requests(8, seed=3)
    used = make_engine(model)
    run(used, make_requests(20, seed=1, max_tokens=90))
    again, fresh = run(used, requests), run(make_engine(model), requests)
    for request in requests:
        assert again[request.id].token_ids.tolist() == fresh[request.id].token_ids.tolist()
        assert again[request.id].logp.tolist() == fresh[request.id].logp.tolist()


def test_sorting_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    requests = [one((1 + i % 3,) * (1 + i * 5 % 60), 10 + i % 40, i) for i in range(48)]
    plain = run(make_engine(model, slots=40), requests)
    monkeypatch.setattr(local_module, "SORT_COST", 0)
    sorted_ = run(make_engine(model, slots=40), requests)
    assert all(sorted_[r.id].token_ids.tolist() == plain[r.id].token_ids.tolist() for r in requests)


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_siblings_share_one_prefill_also_across_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_model(name), slots=3)
    seen: list[tuple[int, ...]] = []
    prefill = engine._backend.prefill
    monkeypatch.setattr(engine._backend, "prefill", lambda prompts: seen.extend(prompts) or prefill(prompts))
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


def test_cancelling_in_the_step_of_a_checkpoint_computes_no_further_token() -> None:
    engine = make_engine()
    engine.submit([one(max_tokens=10, checkpoints=(3,))])
    events = [event for _ in range(3) for event in engine.step()]
    assert [event.n for event in reached(events)] == [3]
    assert len(engine.cancel(["x"])[0].token_ids) == 3


# ---- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "gpt2", "opt"])
def test_checkpoint_gives_the_hidden_state_the_token_was_drawn_from(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    engine.submit([one((1, 2), 9, i, checkpoints=(1, 4, 9)) for i in range(3)])
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


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "gpt2"])
def test_new_weights_between_two_steps_keep_the_running_cache(name: str) -> None:
    old, new = make_model(name), make_model(name, seed=1)
    engine = make_engine(old, slots=2)
    requests = [one((1, 2, 3), 9, i) for i in range(3)]
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    engine.load_weights(new.state_dict(), version=5)
    assert engine.version == 5
    done = run(engine)
    for i in (0, 1):
        event = done[i]
        assert event.versions.tolist() == [0] * 4 + [5] * 5
        cache, ids = hf.DynamicCache(), torch.tensor([[1, 2, 3, *event.token_ids.tolist()]])
        with torch.no_grad():
            before = old(ids[:, :6], past_key_values=cache, use_cache=True).logits[0, 2:]
            after = new(ids[:, 6:-1], past_key_values=cache, use_cache=True).logits[0]
        logits = torch.cat([before, after])[:, :VOCAB].double()
        np.testing.assert_allclose(event.logp, plain_logp(logits, requests[i].params, event.token_ids), atol=1e-4)
    # The third waited while its siblings' prompt was prefilled by the old weights: it must not see that.
    assert done[2].versions.tolist() == [5] * 9
    logits = plain_logits(new, (1, 2, 3), done[2].token_ids)
    np.testing.assert_allclose(done[2].logp, plain_logp(logits, requests[2].params, done[2].token_ids), atol=1e-4)


def test_versions_over_several_swaps() -> None:
    model = make_model("qwen2")
    engine = make_engine(model)
    engine.submit([one((1,), 6, "a")])
    for version in (3, 4, 9):
        engine.step()
        engine.load_weights(model.state_dict(), version)
    engine.load_weights(model.state_dict(), 10)
    engine.submit([one((1,), 2, "b")])
    done = run(engine)
    assert done["a"].versions.tolist() == [0, 3, 4, 10, 10, 10]
    assert done["b"].versions.tolist() == [10, 10]


def test_the_engine_has_its_own_copy_of_the_weights() -> None:
    for name in ("qwen2-tied", "gpt2"):
        model, requests = make_model(name), make_requests(2)
        engine = make_engine(model)
        before = run(engine, requests)
        for parameter in model.parameters():
            parameter.data.zero_()
        after = run(engine, requests)
        assert all(before[r.id].logp.tolist() == after[r.id].logp.tolist() for r in requests)


@pytest.mark.parametrize("name", ["qwen2-tied", "gpt2"])
def test_bad_weights_are_refused_and_the_old_ones_stay(name: str) -> None:
    model, other, requests = make_model(name), make_model(name, seed=1), make_requests(2)
    engine = make_engine(model)
    before = run(engine, requests)
    good = other.state_dict()
    norm = next(key for key in good if "norm" in key or "ln_" in key)
    cases = {
        "missing": {key: t for key, t in good.items() if key != norm},
        "unknown": good | {"extra": torch.zeros(1)},
        "has shape": good | {norm: torch.zeros(3)},
        "not finite": good | {norm: torch.full_like(good[norm], torch.nan)},
    }
    for message, state in cases.items():
        with pytest.raises(ValueError, match=message):
            engine.load_weights(state, 1)
    assert engine.version == 0
    after = run(engine, requests)
    assert all(before[r.id].logp.tolist() == after[r.id].logp.tolist() for r in requests)


def test_tied_weights_may_come_once_twice_but_not_in_two_values() -> None:
    engine, other, requests = make_engine("qwen2-tied"), make_model("qwen2-tied", seed=1), make_requests(2)
    expected = run(make_engine(other), requests)
    twice = {key: tensor.clone() for key, tensor in other.state_dict().items()}
    once = {key: tensor for key, tensor in twice.items() if key != "lm_head.weight"}
    for version, state in enumerate((once, twice), 1):
        engine.load_weights(state, version)
        done = run(engine, requests)
        assert all(done[r.id].logp.tolist() == expected[r.id].logp.tolist() for r in requests)
    with pytest.raises(ValueError, match="differ, but the model ties them"):
        engine.load_weights(twice | {"lm_head.weight": twice["lm_head.weight"] + 1}, 3)


def test_logits_that_are_not_finite_are_an_error_and_the_engine_says_it_is_dead() -> None:
    model = make_model("qwen2")
    model.model.norm.weight.data[0] = torch.nan
    engine = make_engine(model)
    engine.submit([one(name="victim")])
    with pytest.raises(FloatingPointError, match=r"'victim'.*policy version 0"):
        engine.step()
    for call in (engine.step, lambda: engine.submit([one()]), lambda: engine.cancel(["victim"])):
        with pytest.raises(RuntimeError, match="failed earlier"):
            call()


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (one(()), "prompt is empty"),
        (one((1, VOCAB)), f"prompt token {VOCAB} is outside the vocabulary of {VOCAB}"),
        (one((1, -1)), "prompt token -1"),
        (one((1,) * 100, 29), "100 prompt tokens \\+ max_tokens 29 = 129 exceed the maximum length 128"),
        (one(max_tokens=0), "max_tokens must be at least 1"),
        (one(params={"temperature": -1.0}), "temperature"),
        (one(params={"temperature": float("nan")}), "temperature"),
        (one(params={"temperature": 1e-30}), "temperature"),
        (one(params={"top_p": 0.0}), "top_p"),
        (one(params={"top_k": -1}), "top_k"),
        (one(params={"stop": ("a", "")}), "stop string is empty"),
        (one(checkpoints=(3, 3)), "checkpoints"),
        (one(checkpoints=(0,)), "checkpoints"),
    ],
)
def test_bad_requests_are_refused_by_name_and_none_of_the_call_is_taken(request_: Request, message: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=f"'x'.*{message}"):
        engine.submit([one(name="good"), request_])
    assert engine.pending == 0


def test_duplicate_ids_are_refused_while_in_use() -> None:
    engine = make_engine(slots=1)
    engine.submit([one(name="a"), one(name="b")])
    engine.step()
    for name in ("a", "b"):
        with pytest.raises(ValueError, match=f"{name!r} is already in use"):
            engine.submit([one(name=name)])
    with pytest.raises(ValueError, match="'c' is already in use"):
        engine.submit([one(name="c"), one(name="c")])
    run(engine)
    run(engine, [one(name="a")])


def test_models_that_cannot_work_are_refused_with_the_reason() -> None:
    small = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    windowed = hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=16))
    with pytest.raises(ValueError, match=r"sliding_window=16.*set max_length to at most 16"):
        make_engine(windowed)
    mamba = hf.MambaForCausalLM(hf.MambaConfig(**small, state_size=4))
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        make_engine(mamba)
    bloom = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=PADDED, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ValueError, match="BloomForCausalLM"):
        make_engine(bloom)
    with pytest.raises(ValueError, match="max_length 500 exceeds the model's 128"):
        make_engine(max_length=500)
    with pytest.raises(ValueError, match="fixed_slots"):
        make_engine(make_model("qwen2", max_position_embeddings=10_000), fixed_slots=True)


@pytest.mark.parametrize(
    ("fault", "message"), [("forgets", "gives other log-probabilities"), ("raises", "failed in .* trial run: no cache")]
)
def test_a_model_whose_cache_changes_what_it_computes_is_found_out(
    fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = hf_module._SlotLayer.update

    def faulty(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if fault == "raises":
            raise RuntimeError("no cache")
        keys, values = update(self, *args, **kwargs)
        return keys.roll(1, dims=2), values

    monkeypatch.setattr(hf_module._SlotLayer, "update", faulty)
    with pytest.raises(ValueError, match=rf"GPT2LMHeadModel {message}"):
        make_engine("gpt2")


def test_a_window_as_long_as_the_sequences_is_no_hindrance() -> None:
    model = hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=24)).eval()
    request = one((1, 2, 3), 20)
    event = run(make_engine(model, max_length=24), [request])["x"]
    logits = plain_logits(model, request.prompt_ids, event.token_ids)
    np.testing.assert_allclose(event.logp, plain_logp(logits, request.params, event.token_ids), atol=1e-4)


@pytest.mark.parametrize("bad", [{"slots": 0}, {"dtype": "float8"}, {"max_length": 1}])
def test_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LocalOptions(**bad)


# ---- odds and ends ---------------------------------------------------------------------------------------------


def test_options_build_and_from_pretrained_give_the_same_engine(tmp_path: Path) -> None:
    model, requests = make_model("qwen2-tied"), make_requests(2)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    built = run(ENGINES["local"](slots=4).build(model, tokenizer), requests)
    loaded = run(LocalEngine.from_pretrained(str(tmp_path), slots=4), requests)
    assert all(built[r.id].token_ids.tolist() == loaded[r.id].token_ids.tolist() for r in requests)


def test_seconds_add_up_to_the_engine_time() -> None:
    engine = make_engine(slots=4)
    started = time.perf_counter()
    done = run(engine, make_requests(4, max_tokens=8))
    wall = time.perf_counter() - started
    assert all(event.seconds > 0 for event in done.values())
    assert sum(event.seconds for event in done.values()) <= wall
