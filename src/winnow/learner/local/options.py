"""Options of the one-process learner, from a run's config."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...config import RunConfig
from ...engine.loading import resolve_device
from ...engine.saving import types_from
from ..base import Policy
from .eval_mode import halve_frozen
from .learner import LearnerOptions, LocalLearner
from .logprob import TokenDistribution


@dataclass(frozen=True)
class Local:
    """One process and one device: a Hugging Face causal LM, full fine-tuning or LoRA."""

    def build(self, policy: Policy, config: RunConfig) -> LocalLearner:
        device = resolve_device(config.device)
        if config.dtype == "float16" and device.type != "cuda":
            raise ValueError(
                f"dtype: float16 needs a CUDA device, and this run uses {device.type}; set dtype: bfloat16 or float32"
            )
        models = [model for model in (policy.model, policy.reference) if model is not None]
        if config.lora is not None and config.dtype == "bfloat16" and device.type == "cuda":
            halve_frozen(*models)
        for model in models:
            model.to(device)
        return LocalLearner(policy.model, distribution(policy, config), options(policy, config), policy.reference)


def options(policy: Policy, c: RunConfig) -> LearnerOptions:
    """Return the learner's options. A run has already settled `auto`; elsewhere it means the learner's default."""
    tokens, checkpointing = c.tokens_per_microbatch, c.gradient_checkpointing
    return LearnerOptions(
        optim=c.optim,
        optim_args=c.optim_args,
        beta1=c.adam_beta1,
        beta2=c.adam_beta2,
        eps=c.adam_epsilon,
        weight_decay=c.weight_decay,
        max_grad_norm=c.max_grad_norm,
        compute_dtype=torch.float32 if c.dtype == "auto" else getattr(torch, c.dtype),
        matmul_precision=c.matmul_precision,
        gradient_checkpointing=checkpointing is True,
        deterministic=c.deterministic,
        tokens_per_microbatch=LearnerOptions.tokens_per_microbatch if tokens == "auto" else tokens,
        pad_id=policy.tokenizer.pad_token_id or 0,
        merge_adapters=c.lora is None or c.lora.merge,
        save_types=types_from(c.save_dtype),
    )


def distribution(policy: Policy, c: RunConfig) -> TokenDistribution:
    """Return the sampling distribution: the model's, with the sampler's transforms."""
    return TokenDistribution(policy.n_tokens, c.temperature, c.top_p, c.top_k, c.min_p, c.repetition_penalty)
