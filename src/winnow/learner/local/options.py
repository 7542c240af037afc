"""Options of the one-process learner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...base.machine import keep_freed_memory
from ...engine.loading import resolve_device
from ..base import Policy
from ..context import LearnerContext
from .eval_mode import halve_frozen
from .learner import LocalLearner


@dataclass(frozen=True)
class Local:
    """One process and one device: a Hugging Face causal LM, full fine-tuning or LoRA."""

    def build(self, policy: Policy, context: LearnerContext) -> LocalLearner:
        device, dtype = resolve_device(context.device), context.options.compute_dtype
        if dtype == torch.float16 and device.type != "cuda":
            raise ValueError(
                f"dtype: float16 needs a CUDA device, and this run uses {device.type}; set dtype: bfloat16 or float32"
            )
        if context.options.torch_compile and (context.gradient_baselines or context.options.deterministic):
            other = "advantage: opob" if context.gradient_baselines else "deterministic: true"
            raise ValueError(f"torch_compile: does not work with {other}; set it to false")
        models = [model for model in (policy.model, policy.reference) if model is not None]
        if context.lora and dtype == torch.bfloat16 and device.type == "cuda":
            halve_frozen(*models)
        for model in models:
            model.to(device)
        if device.type == "cpu":
            keep_freed_memory()
        return LocalLearner(policy.model, context.distribution(policy), context.options_for(policy), policy.reference)
