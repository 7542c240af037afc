"""Build the embedded engine on a tiny model."""

from __future__ import annotations

from typing import Any

from winnow.base.noise import noise_key
from winnow.engine import LocalEngine, Request, SamplingParams

from ..unit.engine_models import (
    make_model,
    word_tokenizer,
)

TOKENIZER = word_tokenizer()


def make_engine(model: Any = "qwen2-tied", **options: Any) -> LocalEngine:
    model = make_model(model) if isinstance(model, str) else model
    return LocalEngine(model, TOKENIZER, **{"slots": 8, **options})


def one(prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 6, name: Any = "x", **rest: Any) -> Request:
    params = SamplingParams(max_tokens, **rest.pop("params", {}))
    return Request(name, prompt, params, rest.pop("key", noise_key(7, hash(name) % 97)), **rest)
