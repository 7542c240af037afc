"""Tied heads after new weights."""

from __future__ import annotations

from typing import Any


def retie(model: Any, tied: bool) -> None:
    """vLLM's reload leaves a tied head with the old weights, and on a CPU with a packed copy of them."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if not tied or head is None or embedding is None or head is embedding:
        return
    head.tie_weights(embedding)
    if hasattr(head, "cpu_linear"):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
