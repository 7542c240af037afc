"""Norms and gated activations that the backward pass computes again."""

from __future__ import annotations

import ast
import contextlib
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from winnow.learner.base import Stats
from winnow.learner.batch import PassLimits, collate
from winnow.learner.local import recompute
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.recompute import RecomputedCall, Recomputing, _Kept
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain

from .learner_models import SIZES, VOCABULARY, gemma2, gpt2, llama, peaked, random_rows


def qwen3() -> Any:
    """With norms of queries and keys."""
    torch.manual_seed(0)
    return peaked(hf.Qwen3ForCausalLM(hf.Qwen3Config(vocab_size=VOCABULARY, head_dim=8, **SIZES)))


def adapted() -> Any:
    targets = ["q_proj", "gate_proj", "down_proj"]
    return get_peft_model(llama(), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


@pytest.fixture(autouse=True)
def for_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "WORTH", 0)


MODELS = {"llama": llama, "qwen3": qwen3, "gemma2": gemma2, "lora": adapted}


def siblings() -> list[Any]:
    """Rows of two long prompts."""
    found = []
    for i, row in enumerate(random_rows(n=8)):
        prompt = tuple((j * 7 + i // 4) % VOCABULARY for j in range(5))
        found.append(replace(row, rollout=replace(row.rollout, prompt_ids=prompt)))
    return found


def gradients(model: Any, dtype: torch.dtype, *, again: bool, share: bool = False) -> list[torch.Tensor]:
    learner = LocalLearner(model, TokenDistribution(VOCABULARY), LearnerOptions(compute_dtype=dtype))
    assert learner._recomputing is not None
    if not again:
        learner._recomputing = None
    batch = collate(siblings(), 0, limits=PassLimits(pairs=1e9)) if share else collate(random_rows(), 0)
    assert (batch.trees is not None) == share
    learner.forward_backward(batch, LossConfig(policy_loss=Plain()), Stats())
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [False, True])
def test_gradients_are_those_of_what_is_kept(name: str, dtype: torch.dtype, share: bool) -> None:
    wide = dtype == torch.float64
    model, compute = MODELS[name](), torch.float32 if wide else dtype
    model = model.double() if wide else model
    usual = gradients(model, compute, again=False, share=share)
    model.zero_grad()
    again = gradients(model, compute, again=True, share=share)
    assert len(again) == len(usual) > 0
    # Norms of these classes compute in float32 whatever the model is.
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip(again, usual, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def kept_bytes(monkeypatch: pytest.MonkeyPatch, model: Any, *, again: bool) -> int:
    """What the graph of a forward pass holds, parameters aside."""
    held: dict[int, torch.Tensor] = {}
    usual = Recomputing._pack

    def pack(self: Recomputing, saved: torch.Tensor) -> Any:
        kept = usual(self, saved) if again else _Kept(saved, 0)
        for x in kept[0]._inputs if isinstance(kept[0], RecomputedCall) else [kept[0]]:
            held[x.untyped_storage().data_ptr()] = x
        return kept

    def start(self: RecomputedCall, *args: Any) -> None:
        original(self, *args)
        held.update({x.untyped_storage().data_ptr(): x for x in self._inputs})

    original = RecomputedCall.__init__
    monkeypatch.setattr(Recomputing, "_pack", pack)
    monkeypatch.setattr(RecomputedCall, "__init__", start)
    found = Recomputing(model)
    if not again:
        found._forwards = {}
    with found.forward():
        _graph = model(input_ids=torch.arange(24).view(2, 12), use_cache=False).logits.sum()
    monkeypatch.undo()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(x.untyped_storage().nbytes() for at, x in held.items() if at not in weights)


def test_much_less_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(hidden_act="silu")
    less, usual = (kept_bytes(monkeypatch, model, again=again) for again in (True, False))
    assert less < 0.65 * usual


def with_feed_forward(change: Any) -> Any:
    """A llama whose second feed-forward layer is of another class."""
    model = llama()
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Changed", (type(mlp),), {"forward": change.forward})
    return model


def test_classes_that_compute_otherwise_do_that_product_alone() -> None:
    """By their sources in the installed transformers."""
    seen = set()
    for file in (Path(hf.__file__).parent / "models").glob("*/modeling_*.py"):
        source = file.read_text(encoding="utf-8")
        if not any(f"class {name}(nn.Module)" in source for name in recompute.GATED):
            continue
        for found in ast.parse(source).body:
            if isinstance(found, ast.ClassDef) and found.name in recompute.GATED:
                (forward,) = (m for m in found.body if isinstance(m, ast.FunctionDef) and m.name == "forward")
                assert len(forward.body) <= 2, file
                source = ast.unparse(forward).replace(forward.args.args[-1].arg, "x")
                assert "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))" in source, file
                seen.add(found.name)
    assert seen == recompute.GATED


class Doubled:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(2 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Clamped:
    """As DeepseekV4's: a trial does not come to the clamp."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        up = self.up_proj(x).clamp(min=-9, max=9)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


@pytest.mark.parametrize("other", [Doubled, Clamped])
def test_a_class_with_another_product_is_left_alone(other: Any) -> None:
    model = with_feed_forward(other)
    found = LocalLearner(model, TokenDistribution(VOCABULARY), LearnerOptions())._recomputing
    assert found is not None
    assert model.model.layers[0].mlp in found._forwards
    assert model.model.layers[1].mlp not in found._forwards


class ByName:
    """Its feed-forward layer is called with a keyword."""

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(x=self.post_attention_layernorm(hidden_states))


def test_layers_that_are_called_otherwise_compute_as_usual() -> None:
    model = llama()
    layer = model.model.layers[1]
    layer.__class__ = type("Changed", (type(layer),), {"forward": ByName.forward})
    usual = gradients(model, torch.float32, again=False)
    model.zero_grad()
    for one, other in zip(gradients(model, torch.float32, again=True), usual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_norm_that_returns_more_than_a_tensor_does_without() -> None:
    class PairNorm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x * 2, 1

    class Taken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = PairNorm()

        def forward(self, x: torch.Tensor) -> Any:
            return self.norm(x)[0]

    model = llama()
    model.model.norm = Taken()
    found = LocalLearner(model, TokenDistribution(VOCABULARY), LearnerOptions())._recomputing
    assert found is not None
    assert model.model.norm.norm not in found._forwards


def test_an_activation_with_parameters_keeps_their_gradients() -> None:
    model = llama(hidden_act="prelu")
    usual = gradients(model, torch.float32, again=False)
    model.zero_grad()
    again = gradients(model, torch.float32, again=True)
    assert model.model.layers[0].mlp.act_fn.weight.grad is not None
    for one, other in zip(again, usual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_norms_with_parts_of_their_own_are_left_alone() -> None:
    class AdaptiveNorm(torch.nn.Module):
        def __init__(self, usual: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.shift = usual, torch.nn.Linear(SIZES["hidden_size"], SIZES["hidden_size"])

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x) + self.shift(x)

    model = llama()
    model.model.layers[0].input_layernorm = AdaptiveNorm(model.model.layers[0].input_layernorm)
    gradients(model, torch.float32, again=True)
    assert all(p.grad is not None for p in model.model.layers[0].input_layernorm.parameters())


def test_a_forward_of_an_instance_stays() -> None:
    model = llama()
    mine = model.model.norm.forward
    model.model.norm.forward = mine
    with Recomputing(model).forward():
        assert model.model.norm.forward is mine
    assert model.model.norm.forward is mine


def test_an_operation_that_keeps_its_own_output_is_freed() -> None:
    """Otherwise every update with logits in one piece left its vocabulary behind: 4 MiB each at 8,000 words."""
    model = llama()
    found = Recomputing(model)
    with found.forward():
        kept = model(input_ids=torch.arange(6)[None], use_cache=False).logits.exp()
    alive = weakref.ref(kept)
    del kept
    gc.collect()
    assert alive() is None
    assert not [x for x in gc.get_objects() if isinstance(x, RecomputedCall)]


def test_a_saved_tensor_that_is_overwritten_is_an_error() -> None:
    x = torch.ones(3, requires_grad=True)
    with Recomputing(llama()).forward():
        inner = x * 1
        total = (inner**2).sum()
    inner.data.add_(0)
    inner.detach().add_(1)
    with pytest.raises(RuntimeError, match="was overwritten after it had been used"):
        total.backward()


def test_small_models_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "WORTH", 1_000_000)
    assert LocalLearner(llama(), TokenDistribution(VOCABULARY), LearnerOptions())._recomputing is None


def test_models_without_gated_layers_do_without() -> None:
    assert LocalLearner(gpt2(), TokenDistribution(VOCABULARY), LearnerOptions())._recomputing is None


FAMILIES = ["Cohere", "Cohere2", "DeepseekV3", "Exaone4", "Gemma", "Gemma2", "Gemma3Text", "Granite", "Llama"]
FAMILIES += ["Ministral3", "Mistral", "Olmo2", "Olmo3", "Qwen2", "Qwen3", "SmolLM3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_gated_layers_gives_the_same_gradients(family: str) -> None:
    """`GATED` and plain norms are taken for pure functions: nothing is tried out in a run."""
    torch.manual_seed(0)
    heads = {"num_key_value_heads": SIZES["num_attention_heads"]} if family == "DeepseekV3" else {"head_dim": 8}
    config = getattr(hf, f"{family}Config")(vocab_size=VOCABULARY, **SIZES | heads)
    name = family.removesuffix("Text")
    model = peaked(getattr(hf, f"{name}ForCausalLM")(config)).eval()
    found = recompute.recomputing(model)
    assert found is not None
    kinds = {type(module).__name__ for module in found._forwards}
    assert kinds & recompute.GATED
    assert any("Norm" in kind for kind in kinds)

    def of_update() -> list[torch.Tensor]:
        model.zero_grad()
        with found.forward() if again else contextlib.nullcontext():
            total = model(input_ids=torch.arange(24).view(2, 12) % VOCABULARY, use_cache=False).logits.square().sum()
        total.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    again = False
    usual = of_update()
    again = True
    for one, other in zip(of_update(), usual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_modules_are_as_they_were_afterwards_also_after_an_error() -> None:
    model = llama()

    def fail() -> None:
        with Recomputing(model).forward():
            assert "forward" in vars(model.model.norm)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all("forward" not in vars(module) for module in model.modules())


def test_an_input_that_is_overwritten_meanwhile_is_an_error() -> None:
    model = llama()
    x = torch.randn(1, 3, SIZES["hidden_size"], requires_grad=True)
    with Recomputing(model).forward():
        inner = x * 1
        total = model.model.norm(inner).sum()
    inner.add_(1)
    with pytest.raises(RuntimeError, match="LlamaRMSNorm: its input was overwritten"):
        total.backward()


def test_without_gradients_nothing_is_held() -> None:
    model = llama()
    found = Recomputing(model)
    with found.forward(), torch.no_grad():
        model(input_ids=torch.arange(6)[None], use_cache=False)
        assert not found._outputs
