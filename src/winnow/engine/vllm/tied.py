"""Packed copies of tied heads."""

from __future__ import annotations

from typing import Any


def repack_head(model: Any) -> None:
    """Make the head's packed copy, which vLLM has on CPUs, that of new weights: its reload leaves out a tied head."""
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
