"""One optimizer step: advantage -> correction -> loss -> update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.failpoint import failpoint
from ..base.noise import noise_key
from ..config.schedule import OWN, transformers_share
from ..methods.advantage import Advantage
from ..methods.agents import by_agent
from ..methods.correct import StepScale
from ..methods.loss import LossConfig
from ..types import Group
from .base import Learner, Stats
from .off_policy import ess_ratio, lag_metrics, log_weights, sampling_metrics
from .reference_kl import kl_to_reference, penalised
from .rows import Row, rows_of, with_gradient
from .teacher import Teacher


@dataclass(frozen=True)
class StepOptions:
    learning_rate: float
    lr_scheduler_type: str
    warmup_steps: int
    max_steps: int
    num_iterations: int
    max_completion_length: int
    mask_truncated_completions: bool
    seed: int
    lr_end: float = 0.0
    lr_decay_steps: int | None = None
    lr_scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    unbiased: bool = False
    """Weight rows by 1 / `survival_p`, the chance of their group to go on (`group_size: sequential`)."""
    kl_in_reward: float = 0.0
    """Reward subtracted per nat of divergence from the reference."""
    reference_kl_steps: int | None = None
    """Steps between measurements of the KL to the reference; None: never."""
    ref_model_sync_steps: int | None = None
    """Steps between mixes of the policy into the reference; None: never."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in the mixture."""


def scheduled_lr(step: int, options: StepOptions) -> float:
    """Return the learning rate of `step` (from 0): linear warm-up to `learning_rate`, then `lr_scheduler_type`.

    `constant`. `linear`: straight to `lr_end` at step `max_steps` (as in Hugging Face, so the last step is one
    increment short). `cosine`: to `lr_end` along half a cosine. `warmup_stable_decay`: constant, then straight to
    `lr_end` over the last `lr_decay_steps`. Other types, and any with `lr_scheduler_kwargs`, follow transformers except
    in warm-up: transformers starts at a rate of 0.
    """
    o = options
    if step < o.warmup_steps:
        return o.learning_rate * (step + 1) / o.warmup_steps
    if o.lr_scheduler_type.startswith("constant"):
        return o.learning_rate
    if o.lr_scheduler_kwargs or o.lr_scheduler_type not in OWN:
        kwargs = tuple(sorted(o.lr_scheduler_kwargs.items()))
        share = transformers_share(o.lr_scheduler_type, kwargs, o.learning_rate, o.warmup_steps, o.max_steps)
        return o.learning_rate * share(step)
    turning = o.max_steps - o.warmup_steps if o.lr_decay_steps is None else o.lr_decay_steps
    left = min(max((o.max_steps - step) / turning, 0.0), 1.0)
    if o.lr_scheduler_type == "cosine":
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    return o.learning_rate * left + o.lr_end * (1.0 - left)


@dataclass
class OptimizerStep:
    """Trains on one batch of groups. Stateless apart from its learner."""

    learner: Learner
    advantage: Advantage
    loss: LossConfig
    scale: StepScale
    options: StepOptions
    teacher: Teacher | None = None

    def __call__(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Return the update's metrics; `updated` is 0 when no row had a gradient and the optimizer was skipped.

        Raises FloatingPointError when an advantage, the loss or the gradient is not finite.
        """
        metrics = self._update(groups, step)
        every = self.options.ref_model_sync_steps
        if every is not None and (step + 1) % every == 0:
            self.learner.sync_reference(self.options.ref_model_mixup_alpha)
        return metrics

    def _update(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        o = self.options
        torch.manual_seed(noise_key(o.seed, 2, step))  # adapter dropout is the only user of torch's generator
        groups = by_agent(groups)
        rewarded: Sequence[Group] = groups
        penalty: dict[str, float] = {}
        if o.kl_in_reward:
            rewarded, penalty = penalised(groups, self.learner, self.advantage, o.kl_in_reward)
        rows = rows_of(
            rewarded,
            self.advantage,
            self.loss.loss_type,
            max_completion_length=o.max_completion_length,
            mask_truncated=o.mask_truncated_completions,
            unbiased=o.unbiased,
            equal_groups=self.loss.equal_groups,
        )
        taught_by: dict[str, float] = {}
        if self.teacher is not None:
            rows, taught_by = self.teacher.score(rows, rewarded)
        teaching = with_gradient(rows, self.loss)
        kept = {id(row) for row in teaching}
        taught = {row.rollout_number for row in teaching if row.rollout_number is not None}
        without_gradient = [row for row in rows if id(row) not in kept and row.rollout_number not in taught]
        metrics = {
            "rows": float(len(rows)),
            "rows_with_gradient": float(len(teaching)),
            "updated": float(bool(teaching)),
            **penalty,
            **taught_by,
            **self._reference_kl(groups, step),
        }
        if not teaching:
            return metrics
        for iteration in range(o.num_iterations):
            stats = self.learner.accumulate(teaching, self.loss, iteration)
            lr = scheduled_lr(step, o)
            log_w_B = torch.cat(stats.log_w_B)
            sampling = sampling_metrics(torch.cat(stats.log_ratio_N), log_w_B) | self._ess(log_w_B, without_gradient)
            effective_lr = lr * self.scale(sampling["ess_ratio"]) if "ess_ratio" in sampling else lr
            norm = self.learner.apply(effective_lr)
            failpoint("applied")
        return metrics | {
            "loss": stats.sums["loss"],
            "grad_norm": norm,
            "learning_rate": lr,
            "effective_learning_rate": effective_lr,
            **sampling,
            **lag_metrics(teaching, step),
            **self.scale.metrics(),
            **_stats_metrics(stats, self.loss),
        }

    def _ess(self, log_w_B: torch.Tensor, others: Sequence[Row]) -> dict[str, float]:
        """Return the effective share of all rollouts, if the step scale needs it or `log_w_B` already covers them.

        `others` are rows without gradient; their ratios take a forward pass.
        """
        if not others:
            return {"ess_ratio": ess_ratio(log_w_B)}
        if not getattr(self.scale, "active", True):
            return {}
        return {"ess_ratio": ess_ratio(torch.cat([log_w_B.cpu().double(), log_weights(others, self.learner)]))}

    def _reference_kl(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Return the KL to the reference before the update, if due; steps count from 1, as in the metrics."""
        every = self.options.reference_kl_steps
        if every is None or (step + 1) % every:
            return {}
        kl = kl_to_reference(groups, self.learner)
        return {} if kl is None else {"kl": kl}


def _stats_metrics(stats: Stats, loss: LossConfig) -> dict[str, float]:
    """Return metrics of the update: means over the action tokens of rows with a gradient, under TRL's names."""
    metrics = {
        "entropy": stats.mean("entropy"),
        "update/tokens": stats.sums["tokens"],
    }
    if loss.policy_loss.limits:
        low, high = stats.mean("clip_low"), stats.mean("clip_high")
        metrics |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    if loss.beta:
        metrics["kl"] = stats.mean("kl")
    if loss.teacher_weight:
        metrics["teacher/kl"] = stats.mean("teacher_kl")
    if loss.correction.active:
        metrics["correction/clipped_share"] = stats.mean("correction/clipped", of="correction/clipped_of")
        metrics["correction/masked_share"] = stats.mean("correction/masked", of="correction/masked_of")
    if stats.baselines:  # of advantages whose baselines the update computes
        metrics["baseline/mean"] = float(torch.cat(stats.baselines).mean())
    if stats.row_norm_B:
        norm_N = torch.cat(stats.row_norm_B)
        metrics |= {f"rollout_grad_norm/{name}": float(getattr(norm_N, name)()) for name in ("mean", "max", "min")}
    return metrics
