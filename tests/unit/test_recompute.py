"""Norms and gated activations that the backward pass computes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from winnow.learner.base import Stats
from winnow.learner.batch import collate
from winnow.learner.local import recompute
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.recompute import Again, Recomputing
from winnow.methods.loss import LossConfig

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


MODELS = {"llama": llama, "qwen3": qwen3, "gemma2": gemma2, "gpt2": gpt2, "lora": adapted}


def gradients(model: Any, dtype: torch.dtype, *, again: bool) -> list[torch.Tensor]:
    """Of rows whose prompts are shared."""
    learner = LocalLearner(model, TokenDistribution(VOCABULARY), LearnerOptions(compute_dtype=dtype))
    assert learner._recomputing is not None
    if not again:
        learner._recomputing = None
    learner.forward_backward(collate(random_rows(), 0), LossConfig(policy_loss="plain"), Stats())
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_what_is_kept(name: str, dtype: torch.dtype) -> None:
    wide = dtype == torch.float64
    model, compute = MODELS[name](), torch.float32 if wide else dtype
    model = model.double() if wide else model
    usual = gradients(model, compute, again=False)
    model.zero_grad()
    again = gradients(model, compute, again=True)
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
        kept = usual(self, saved) if again else saved
        for x in kept[0]._inputs if isinstance(kept, tuple) else [kept]:
            held[x.untyped_storage().data_ptr()] = x
        return kept

    def start(self: Again, *args: Any) -> None:
        original(self, *args)
        held.update({x.untyped_storage().data_ptr(): x for x in self._inputs})

    original = Again.__init__
    monkeypatch.setattr(Recomputing, "_pack", pack)
    monkeypatch.setattr(Again, "__init__", start)
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


def test_a_class_with_another_product_is_left_alone() -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, usual: Any) -> None:
            super().__init__()
            for name in ("gate_proj", "up_proj", "down_proj", "act_fn"):
                setattr(self, name, getattr(usual, name))

        def forward(self, x: torch.Tensor) -> Any:
            return self.down_proj(2 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    model = llama()
    model.model.layers[1].mlp = Doubled(model.model.layers[1].mlp)
    assert LocalLearner(model, TokenDistribution(VOCABULARY), LearnerOptions())._recomputing is None


def test_small_models_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "WORTH", 1_000_000)
    assert LocalLearner(llama(), TokenDistribution(VOCABULARY), LearnerOptions())._recomputing is None


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
