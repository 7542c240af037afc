"""The embedded engine: new weights, failures, and what it refuses."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from winnow.base.weights import HalvedWeights, StateWeights, state_once
from winnow.engine import ENGINES, LocalEngine, LocalOptions, ModelReference, Request
from winnow.engine.local import hf as hf_module

from ..builders.engines import TOKENIZER, make_engine, one
from .engine_models import PADDED, SIZES, VOCAB, make_model, make_requests, plain_logits, plain_logp, run


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


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "gpt2", "gemma2", "llama-bias"])
def test_an_engine_of_bfloat16_makes_the_same_of_weights_in_half_the_bytes(name: str) -> None:
    new = StateWeights(state_once(make_model(name, seed=1)))
    half = HalvedWeights(new)
    found = []
    for weights in (new, half):
        engine = LocalEngine(make_model(name), TOKENIZER, dtype="bfloat16")
        engine.load_weights(weights, 1)
        found.append(run(engine, make_requests(2)))
    for ours, theirs in zip(found[0].values(), found[1].values(), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logp.tolist() == theirs.logp.tolist()
    matrices = [name for name, spec in new.specs.items() if len(spec.shape) > 1 and "embed" not in name]
    assert {half.specs[name].dtype for name in matrices} == {torch.bfloat16}


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
        (one(report_at=(3, 3)), "report_at"),
        (one(report_at=(0,)), "report_at"),
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
    with pytest.raises(ValueError, match=r"sliding_window=16.*max_length.* to at most 16"):
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


def test_in_half_precision_a_rare_token_may_move_further_than_what_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = hf_module.HFBackend.decode

    def moved(self: Any, *args: Any) -> Any:
        output = decode(self, *args)
        index = output.logits_NV.argmax(-1, True) if likely else output.logits_NV.argmin(-1, True)
        return replace(output, logits_NV=output.logits_NV.scatter_add(1, index, torch.full_like(index, 2, dtype=half)))

    half, likely = torch.bfloat16, False
    monkeypatch.setattr(hf_module.HFBackend, "decode", moved)
    make_engine("gpt2", dtype="bfloat16")
    likely = True
    with pytest.raises(ValueError, match=r"gives other log-probabilities .* set the engine's dtype to float32"):
        make_engine("gpt2", dtype="bfloat16")


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
    built = run(ENGINES["local"](slots=4).build(ModelReference("", model.device, model), tokenizer), requests)
    loaded = run(LocalEngine.from_pretrained(str(tmp_path), slots=4), requests)
    assert all(built[r.id].token_ids.tolist() == loaded[r.id].token_ids.tolist() for r in requests)


def test_seconds_add_up_to_the_engine_time() -> None:
    engine = make_engine(slots=4)
    started = time.perf_counter()
    done = run(engine, make_requests(4, max_tokens=8))
    wall = time.perf_counter() - started
    assert all(event.seconds > 0 for event in done.values())
    assert sum(event.seconds for event in done.values()) <= wall


def test_weights_may_be_released_twice() -> None:
    model = make_model("qwen3")
    engine = make_engine(model)
    before = run(engine, [one((1, 2, 3), 4, 0)])
    engine.release()
    engine.release()
    engine.load_weights(model.state_dict(), version=1)
    after = run(engine, [one((1, 2, 3), 4, 0)])
    (first,), (second,) = before.values(), after.values()
    assert first.token_ids.tolist() == second.token_ids.tolist()


@pytest.mark.parametrize(
    ("name", "dtype", "error"),
    [
        ("gpt2", "bfloat16", "GPT2LMHeadModel is not of the Llama family"),
        ("qwen3", "float32", "needs half precision|Triton is not installed"),
        ("qwen3", "bfloat16", "needs a CUDA device|Triton is not installed"),
    ],
)
def test_fused_kernels_are_refused_where_they_cannot_run(name: str, dtype: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"fused_kernels: ({error})"):
        make_engine(make_model(name), dtype=dtype, fused_kernels=True)
