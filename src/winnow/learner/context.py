"""What every learner is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .base import Policy
from .local.logprob import TokenDistribution
from .local.scorer import LearnerOptions


@dataclass(frozen=True)
class LearnerContext:
    """What a learner needs of a run, besides the policy."""

    options: LearnerOptions
    """But for the tokenizer's padding."""
    device: str = "auto"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    lora: bool = False
    gradient_baselines: bool = False
    """Whether the advantage is computed from gradients."""
    reward_env: Sequence[str] = ()
    """Environment variables that rewards may see."""

    def options_for(self, policy: Policy) -> LearnerOptions:
        return replace(self.options, pad_id=policy.tokenizer.pad_token_id or 0)

    def distribution(self, policy: Policy) -> TokenDistribution:
        """Return the sampling distribution: the model's, with the sampler's transforms."""
        shape = self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty
        return TokenDistribution(policy.n_tokens, *shape)
