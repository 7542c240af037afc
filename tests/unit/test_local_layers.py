"""Models whose classes ask for more than their configuration's usual names tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from winnow.engine import LocalEngine

from .engine_models import PADDED, SIZES, make_requests, plain_logits, plain_logp, run, word_tokenizer
from .learner_models import learner_of


def gpt_neo(window: int) -> Any:
    """Its second layer sees a window of columns, whatever positions these hold."""
    torch.manual_seed(0)
    layers = {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": window}
    sizes = {"vocab_size": PADDED, "hidden_size": 32, "num_heads": 4, "max_position_embeddings": 128}
    model = GPTNeoForCausalLM(GPTNeoConfig(**sizes, **layers, bos_token_id=None, eos_token_id=None)).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return model


def test_a_window_of_columns_bounds_the_engine() -> None:
    model, tokenizer = gpt_neo(64), word_tokenizer()
    with pytest.raises(ValueError, match=r"GPTNeoForCausalLM has window_size=64.*at most 64; it is 128"):
        LocalEngine(model, tokenizer)
    asked = make_requests(4, max_tokens=12)
    ended = run(LocalEngine(model, tokenizer, max_length=64), asked)
    for request in asked:
        found = ended[request.id]
        logits = plain_logits(model, request.prompt_ids, found.token_ids)
        expected = plain_logp(logits.double(), request.params, found.token_ids)
        torch.testing.assert_close(torch.tensor(found.logp).double(), torch.tensor(expected), atol=1e-4, rtol=0)
    whole = GPTNeoConfig(attention_types=[[["global"], 2]], num_layers=2, window_size=8, vocab_size=PADDED)
    whole.hidden_size, whole.num_heads, whole.eos_token_id = 32, 4, None
    assert LocalEngine(GPTNeoForCausalLM(whole), tokenizer, max_length=64).pending == 0


def test_a_window_narrower_than_any_columns_is_refused_without_a_length() -> None:
    with pytest.raises(ValueError, match=r"GPTNeoForCausalLM has window_size=32, .*; use another engine or model$"):
        LocalEngine(gpt_neo(32), word_tokenizer(), max_length=16)


def test_siblings_share_nothing_where_layers_see_columns() -> None:
    """A lane of siblings is wider than a rollout, and the trial is narrower than the window."""
    assert not learner_of(gpt_neo(64))._share


def test_a_mixture_that_was_fine_tuned_with_a_loss_of_its_routers() -> None:
    """TRL's SFTTrainer saves `output_router_logits`, and that loss does not take the engine's masks."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **experts)).eval()
    (asked,) = make_requests(1, 1, max_tokens=6)
    found = run(LocalEngine(model, word_tokenizer()), [asked])[asked.id]
    expected = plain_logp(plain_logits(model, asked.prompt_ids, found.token_ids), asked.params, found.token_ids)
    torch.testing.assert_close(torch.tensor(found.logp).double(), torch.tensor(expected), atol=1e-4, rtol=0)
    assert model.config.output_router_logits, "the caller's stays as it is"


def test_what_a_class_keeps_in_float32_stays_in_it() -> None:
    """Experts are chosen by scores to which a bias near 2 is added, where bfloat16 has steps of 0.016."""
    torch.manual_seed(0)
    sizes = {"vocab_size": PADDED, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    more = {"head_dim": 16, "max_position_embeddings": 64, "eos_token_id": None, "pad_token_id": 0}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **layers, **experts, **more)).eval()
    (name,) = (name for name in model.state_dict() if name.endswith("e_score_correction_bias"))
    bias = torch.tensor([2.003, 1.997, 2.001, 1.999])
    model.state_dict()[name].copy_(bias)
    engine: Any = LocalEngine(model, word_tokenizer(), dtype="bfloat16")
    state = engine._backend._model.state_dict()
    assert torch.equal(state[name], bias)
    assert state["model.embed_tokens.weight"].dtype == torch.bfloat16
    engine.load_weights(model.state_dict(), 1)
    assert torch.equal(engine._backend._model.state_dict()[name], bias)
