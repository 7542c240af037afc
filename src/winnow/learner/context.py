"""What every learner is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..engine.base import SamplingParams
from .base import Policy
from .local.logprob import TokenDistribution
from .local.scorer import LearnerOptions


@dataclass(frozen=True)
class LearnerContext:
    """What a learner needs of a run, besides the policy."""

    options: LearnerOptions
    """But for the tokenizer's padding."""
    device: str = "auto"
    lora: bool = False
    gradient_baselines: bool = False
    """Whether the advantage is computed from gradients."""
    reward_env: Sequence[str] = ()
    """Environment variables that rewards may see."""
    own_classes: Sequence[str] = ()
    """Dotted paths of the run's own classes in a loss."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(1))
    """Of training rollouts."""

    def options_for(self, policy: Policy) -> LearnerOptions:
        return replace(self.options, pad_id=policy.tokenizer.pad_token_id or 0)

    def distribution(self, policy: Policy) -> TokenDistribution:
        """Return the sampling distribution: the model's, with the sampler's transforms."""
        p = self.sampling
        return TokenDistribution(policy.n_tokens, p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty)
