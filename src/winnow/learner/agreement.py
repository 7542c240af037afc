"""Compare learner and sampler log-probabilities of the same tokens.

Every importance ratio assumes that they agree. If they do not, a run clips and shrinks its updates silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base.errors import ConfigError
from ..types import Rollout
from .base import Learner
from .off_policy import from_sampler
from .rows import Row

BOUNDS = {"float64": 1e-3, "float32": 1e-3, "tfloat32": 1e-2, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest mean |difference|, nats per token, by the coarser dtype of both sides. Rounding alone gives about a tenth."""


@dataclass(frozen=True)
class Agreement:
    """|learner - sampler| over the action tokens of some rollouts, in nats."""

    mean: float
    max: float
    tokens: int


def compare(rollouts: Sequence[Rollout], learner: Learner, *, raw: bool = False) -> Agreement:
    """Return the agreement; `raw`: the learner's before temperature, top-k and top-p. ValueError without tokens."""
    if not any(rollout.action_mask.any() for rollout in rollouts):
        raise ValueError("there are no sampled tokens to compare")
    difference_N = torch.cat(_differences(rollouts, learner, raw))
    return Agreement(float(difference_N.mean()), float(difference_N.max()), len(difference_N))


def require_agreement(rollouts: Sequence[Rollout], learner: Learner, engine_dtype: str) -> Agreement:
    """Return the agreement; raise ConfigError with the likely cause when its mean exceeds the bound.

    `rollouts` were sampled with the learner's weights. `engine_dtype` is a key of `BOUNDS`, or anything if unknown.
    """
    agreement = compare(rollouts, learner)
    bound = max(BOUNDS.get(engine_dtype, BOUNDS["bfloat16"]), BOUNDS.get(learner.precision, BOUNDS["bfloat16"]))
    if agreement.mean <= bound:  # False for NaN too
        return agreement
    raise ConfigError(
        f"engine: its log-probabilities are not the learner's: over {agreement.tokens} tokens they differ "
        f"by {agreement.mean:.3g} nats on average and {agreement.max:.3g} at most ({bound:g} on average is allowed for "
        f"{engine_dtype} in the engine, {learner.precision} in the learner). "
        + _cause(rollouts, learner, engine_dtype, bound, agreement)
    )


def _cause(rollouts: Sequence[Rollout], learner: Learner, engine_dtype: str, bound: float, agreement: Agreement) -> str:
    rows = [Row(part, 0.0, 0.0) for rollout in rollouts for part in rollout.parts()]
    once, again = torch.cat(learner.logp(rows)), torch.cat(learner.logp(rows))
    if not torch.equal(once, again) and float((once - again).abs().mean()) > bound / 10:
        return "The learner's own vary from pass to pass: the model has dropout or noise that eval mode leaves on"
    if compare(rollouts, learner, raw=True).mean <= bound:
        return (
            "They agree before temperature, top-k and top-p: the engine reports log-probabilities of another "
            "distribution than it samples from; have it report those after the transform"
        )
    differences = _differences(rollouts, learner, raw=False)
    if float(torch.stack([d[0] for d in differences if len(d)]).mean()) <= bound:
        return (
            "First tokens agree and later ones do not: the two sides attend to different tokens (a sliding window, "
            "position ids, or a cache that the model class does not keep as others do)"
        )
    if engine_dtype != learner.precision and agreement.mean <= 10 * bound:
        return "The likely cause is rounding: set dtype and the engine's dtype to the same, or both to float32"
    return (
        "The two sides have different weights (a tied head that was not updated, adapters that were not merged, "
        "weights that were not loaded), or another temperature, top-k or top-p, or the engine's dropout is on"
    )


def _differences(rollouts: Sequence[Rollout], learner: Learner, raw: bool) -> list[torch.Tensor]:
    """Return |learner - sampler| of each segment, float64 [A]."""
    rows = [Row(part, 0.0, 0.0) for rollout in rollouts for part in rollout.parts()]
    return [difference_A.abs() for difference_A in from_sampler(rows, learner.logp(rows, raw=raw))]
