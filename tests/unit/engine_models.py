"""Small random models and tokenizers for the engine's tests, and what a plain forward pass says of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, Reached, Request, SamplingParams

VOCAB, PADDED, EOS = 60, 64, 58
SIZES: dict[str, Any] = {
    "vocab_size": PADDED,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FUSED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2-tied": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3-tied": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"tie_word_embeddings": False, "head_dim": 8}),
    "llama3-rope": (hf.LlamaForCausalLM, hf.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied": (hf.LlamaForCausalLM, hf.LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": None}),
}
GENERIC: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt-neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {"head_dim": 8, "sliding_window": 128}),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig, {}),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "llama-bias": (hf.LlamaForCausalLM, hf.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
}
NO_GPT2_NAMES = {"hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"}


def make_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model with weights far from their start (norms and biases too), in eval mode."""
    cls, config, options = (FUSED | GENERIC)[name]
    sizes = {k: v for k, v in SIZES.items() if name != "gpt2" or k not in NO_GPT2_NAMES}
    torch.manual_seed(seed)
    model = cls(config(**{**sizes, **options, **changes})).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * (0.25 if parameter.dim() > 1 else 0.1)
    return model


def word_tokenizer(size: int = VOCAB) -> Any:
    """w0 w1 ... <eos> <unk>; `EOS` is the id of <eos>, which is not declared as the end-of-sequence token."""
    vocab = {f"w{i}": i for i in range(size - 2)} | {"<eos>": size - 2, "<unk>": size - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_tokenizer(merges: Iterable[str] = ()) -> Any:
    """All bytes, and the byte-level tokens `merges` (as text) besides."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    extra = ["".join(piece for piece, _ in level.pre_tokenize_str(text)) for text in merges]
    vocab = {token: i for i, token in enumerate([*alphabet, *extra])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_requests(groups: int, siblings: int = 4, *, seed: int = 0, **params: Any) -> list[Request]:
    """Groups of siblings with prompts of 1 to 8 tokens; lengths and sampling vary unless given."""
    rng = np.random.default_rng(seed)
    requests = []
    for group in range(groups):
        prompt = tuple(rng.integers(0, VOCAB - 2, rng.integers(1, 9)).tolist())
        for sibling in range(siblings):
            options = {
                "max_tokens": int(rng.integers(1, 20)),
                "temperature": float(rng.choice([0.0, 0.7, 1.0])),
                "top_k": int(rng.choice([0, 5])),
                "top_p": float(rng.choice([0.8, 1.0])),
            } | params
            key = noise_key(seed, group, sibling)
            requests.append(Request((group, sibling), prompt, SamplingParams(**options), key))
    return requests


def run(engine: LocalEngine, requests: Iterable[Request] = ()) -> dict[Any, Finished]:
    """Submit and step to the end."""
    engine.submit(requests)
    done: dict[Any, Finished] = {}
    for _ in range(10_000):
        if not engine.pending:
            return done
        done |= {event.id: event for event in engine.step() if isinstance(event, Finished)}
    raise AssertionError("the engine does not come to an end")


def reached(events: Iterable[Any]) -> list[Reached]:
    return [event for event in events if isinstance(event, Reached)]


def plain_logits(model: Any, prompt_ids: tuple[int, ...], token_ids: np.ndarray) -> torch.Tensor:
    """float64 [T, VOCAB]: what each token is drawn from, by one forward pass without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *token_ids.tolist()]])).logits[0]
    return logits[len(prompt_ids) - 1 : -1, :VOCAB].double()


def plain_logp(logits_TV: torch.Tensor, params: SamplingParams, token_ids: np.ndarray) -> np.ndarray:
    """float64 [T]: temperature, then top-k, then top-p, then min-p, written the long way."""
    out = []
    for row, token in zip(logits_TV.numpy(), token_ids.tolist(), strict=True):
        if params.temperature:
            row = row / params.temperature
        p = np.exp(row - row.max())
        order = np.argsort(-p, kind="stable")
        kept = len(p)
        if params.temperature and params.top_k:
            kept = min(kept, params.top_k)
        if params.temperature and params.top_p < 1:
            share = np.cumsum(p[order[:kept]]) / p[order[:kept]].sum()
            kept = int((share < params.top_p).sum()) + 1
        p[order[kept:]] = 0
        if params.temperature:
            p[p < params.min_p * p.max()] = 0
        out.append(np.log(p[token] / p.sum()))
    return np.array(out)
