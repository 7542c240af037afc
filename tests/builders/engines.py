"""Build the embedded engine on a tiny model."""

from __future__ import annotations

from typing import Any

import numpy as np

from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, Request, SamplingParams

from ..unit.engine_models import make_model, word_tokenizer

TOKENIZER = word_tokenizer()


def make_engine(model: Any = "qwen2-tied", **options: Any) -> LocalEngine:
    model = make_model(model) if isinstance(model, str) else model
    return LocalEngine(model, TOKENIZER, **{"slots": 8, **options})


def one(prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 6, name: Any = "x", **rest: Any) -> Request:
    params = SamplingParams(max_tokens, **rest.pop("params", {}))
    return Request(name, prompt, params, rest.pop("key", noise_key(7, hash(name) % 97)), **rest)


def require_equal(found: dict[Any, Finished], wanted: dict[Any, Finished]) -> None:
    """Compare all but what tokens cost."""
    assert found.keys() == wanted.keys()
    for id_, one in found.items():
        other = wanted[id_]
        assert (one.stop_reason, one.token_ids.tolist()) == (other.stop_reason, other.token_ids.tolist())
        for name in ("logp", "raw_logp", "hidden"):
            x, y = getattr(one, name), getattr(other, name)
            assert (x is None) == (y is None), name
            if x is not None:
                np.testing.assert_allclose(x, y, atol=2e-4, err_msg=name)


class Counted:
    """Rows of all decode steps, and tokens that went through the model to start turns: whole, after kept ones, or as
    drafts."""

    def __init__(self, engine: LocalEngine) -> None:
        self.decoded = self.prefilled = self.extended = self.read = 0
        backend: Any = engine._backend
        decode, prefill, extend = backend.decode, backend.prefill, backend.extend

        def counting_decode(tokens: Any, *rest: Any) -> Any:
            self.decoded += len(tokens)
            return decode(tokens, *rest)

        def counting_prefill(prompts: Any, drafts: Any = ()) -> Any:
            self.prefilled += sum(map(len, prompts)) - sum(drafts)
            self.read += sum(drafts)
            return prefill(prompts, drafts)

        def counting_extend(tails: Any, past: Any, drafts: Any) -> Any:
            self.extended += sum(map(len, tails)) - sum(drafts)
            self.read += sum(drafts)
            return extend(tails, past, drafts)

        backend.decode, backend.prefill, backend.extend = counting_decode, counting_prefill, counting_extend
