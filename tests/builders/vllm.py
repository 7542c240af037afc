"""Build vLLM and the embedded engine on the same weights."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from winnow.base.noise import noise_key
from winnow.engine import LocalEngine, ModelReference, Reached, Request, SamplingParams
from winnow.engine.vllm.options import VllmOptions

from ..unit.engine_models import make_model, word_tokenizer

WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}


SMALL_CACHE = {"kv_cache_memory_bytes": 1 << 26}


def build(name: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    """A vLLM engine over a saved model, and the embedded one over the same."""
    model, tokenizer = make_model(name, **WIDE), word_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings: dict[str, Any] = {"slots": 8, "max_length": 128}
    ours = LocalEngine(model, tokenizer, **settings)
    theirs = VllmOptions(**settings, **options, args=SMALL_CACHE).build(
        ModelReference(str(folder), torch.device("cpu")), tokenizer
    )
    return theirs, ours


def requests(first: int = 0) -> list[Request]:
    """More than there are slots, of all kinds; prompts in groups of four."""
    return [
        Request(
            first + i,
            tuple(1 + (i // 4 * 7 + j) % 50 for j in range(3 + i // 4 * 11)),
            SamplingParams(
                max_tokens=6 + i,
                temperature=(1.0, 0.7, 0.0, 1.3)[i % 4],
                top_p=(1, 0.9)[i % 2],
                top_k=(0, 10, 0)[i % 3],
                stop=("w1", "w2 w3") if i % 5 == 0 else (),
                repetition_penalty=(1.0, 1.0, 1.0, 1.4)[i % 4],
            ),
            noise_key(0, first + i),
            report_at=(2, 5),
            raw_logp=i % 3 == 0,
            last_hidden=True,
        )
        for i in range(20)
    ]


def play(engine: Any, wanted: list[Request], script: dict[int, Any] | None = None) -> dict[Any, Any]:
    """Events by kind, id and count; `script` has what to do before a step."""
    engine.submit(wanted)
    found: dict[Any, Any] = {}
    step = 0
    while engine.pending:
        events = list((script or {}).get(step, lambda e: [])(engine) or [])
        events += engine.step()
        step += 1
        found |= {(type(e).__name__, e.id, e.n if isinstance(e, Reached) else 0): e for e in events}
    return found


OURS_ALONE = "seconds", "num_reused_tokens", "num_computed_tokens"  # siblings decoded once; vLLM counts neither


def assert_same(theirs: dict[Any, Any], ours: dict[Any, Any]) -> None:
    assert theirs.keys() == ours.keys()
    for key, event in theirs.items():
        for field in fields(event):
            a, b = getattr(event, field.name), getattr(ours[key], field.name)
            if field.name in OURS_ALONE:
                continue
            if not isinstance(a, np.ndarray):
                assert a == b, (key, field.name)
            elif a.dtype.kind == "f":
                np.testing.assert_allclose(a, b, atol=2e-4, err_msg=f"{key} {field.name}")
            else:
                np.testing.assert_array_equal(a, b, err_msg=f"{key} {field.name}")
