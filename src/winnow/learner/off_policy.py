"""Distance between an update's tokens and the policy it changes: ratios, divergence, effective sample size, lag.

All metrics use all tokens or rollouts of an update together, so micro-batches do not affect them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from ..methods.correct import effective_sample_size
from ..methods.lag_bands import LAG_BANDS, band_of
from ..types import Group
from .base import Learner
from .rows import Row, rollouts_of, unweighted_rows


def sampling_metrics(log_ratio_N: torch.Tensor, log_w_B: torch.Tensor) -> dict[str, float]:
    """Return metrics of the learner before the update relative to the sampler, under TRL's names where they exist.

    `log_ratio_N`: log(learner / sampler) of each action token, nats; `log_w_B`: their sum per rollout.
    `sampling/sampling_logp_difference`: |log ratio| of tokens. `sampling/importance_sampling_ratio`: ratio of tokens.
    `sampling/kl`: KL(sampler || learner), nats per token, by Schulman's k3 (2020): mean of ratio - 1 - log ratio over
    the sampler's tokens; unbiased, never negative. `sampling/log_ratio`: quantiles of log_w_B.
    `ess_ratio/with_gradient`: effective sample size over B. Raises ValueError on empty input.
    """
    d_N, log_w_B = log_ratio_N.detach().double(), log_w_B.detach().double()
    ratio_N = d_N.exp()
    p05, p50, p95 = log_w_B.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64, device=log_w_B.device))
    tensors = {
        "sampling/sampling_logp_difference/mean": d_N.abs().mean(),
        "sampling/sampling_logp_difference/max": d_N.abs().max(),
        "sampling/importance_sampling_ratio/min": ratio_N.min(),
        "sampling/importance_sampling_ratio/mean": ratio_N.mean(),
        "sampling/importance_sampling_ratio/max": ratio_N.max(),
        "sampling/kl": (d_N.expm1() - d_N).mean(),
        "sampling/log_ratio/p05": p05,
        "sampling/log_ratio/p50": p50,
        "sampling/log_ratio/p95": p95,
        "sampling/log_ratio/max": log_w_B.max(),
    }
    metrics = dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))
    return metrics | {"ess_ratio/with_gradient": ess_ratio(log_w_B)}


def ess_ratio(log_w_B: torch.Tensor) -> float:
    """Return the effective sample size over the number of rollouts (VCPO, equation 4), from their log ratios."""
    return effective_sample_size(log_w_B) / len(log_w_B)


def from_sampler(rows: Sequence[Row], logps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `logps` of each row's action tokens less the sampler's, float64 [A] on the host."""
    differences = []
    for row, logp_A in zip(rows, logps, strict=True):
        sampler_A = torch.from_numpy(row.rollout.sampler_logp[row.rollout.action_mask])
        differences.append(logp_A.cpu().double() - sampler_A.double())
    return differences


def log_weights(rows: Sequence[Row], learner: Learner) -> torch.Tensor:
    """Return log(learner / sampler) per rollout, float64 [R]; 0 without a sampled token. Takes a forward pass."""
    sampled = [row for row in rows if row.rollout.action_mask.any()]
    differences = from_sampler(sampled, learner.logp(sampled)) if sampled else []
    log_w = {id(row): float(difference_A.sum()) for row, difference_A in zip(sampled, differences, strict=True)}
    of_rollouts = [sum(log_w.get(id(row), 0.0) for row in rollout) for rollout in rollouts_of(rows)]
    return torch.tensor(of_rollouts, dtype=torch.float64)


def log_ratios(groups: Sequence[Group], learner: Learner) -> list[np.ndarray]:
    """Return log(learner / sampler) of each group's rewarded rollouts, float64. Takes a forward pass."""
    rollouts = [[rollout for rollout in group.siblings if rollout.reward is not None] for group in groups]
    rows = unweighted_rows(list(chain.from_iterable(rollouts)))
    log_w_B = log_weights(rows, learner).numpy() if rows else np.zeros(0)
    return np.split(log_w_B, np.cumsum([len(of_group) for of_group in rollouts]))[: len(groups)]


def lag_metrics(rows: Sequence[Row], version: int) -> dict[str, float]:
    """Return the lag of action tokens: optimizer steps from their sampling policies to `version`, the update's start.

    `lag/mean`, `lag/max`: over action tokens; `lag/0` ... `lag/17_up`: share of tokens in each band.
    """
    lag_N = version - np.concatenate([row.rollout.versions[row.rollout.action_mask] for row in rows])
    shares = np.bincount(band_of(lag_N), minlength=len(LAG_BANDS)) / len(lag_N)
    bands = {f"lag/{name}": float(share) for name, share in zip(LAG_BANDS, shares, strict=True)}
    return {"lag/mean": float(lag_N.mean()), "lag/max": float(lag_N.max())} | bands
