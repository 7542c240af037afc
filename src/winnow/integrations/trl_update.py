"""What methods need of TRL's update: gradient norms of single rollouts (OPOB), the learning rate of a step (ESS)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ..learner.off_policy import ess_ratio, sampling_metrics
from ..methods.advantage import InUpdate, optimal_baseline
from ..methods.correct import StepScale
from ..types import Group, Rollout


class StepScaling(TrainerCallback):
    """Scales the learning rate of TRL's next optimizer step by its effective sample size.

    As `OptimizerStep` in Winnow's own loop, over all rows with tokens of the whole step.
    """

    def __init__(self, scale: StepScale) -> None:
        self._scale = scale
        self.accumulated = 0
        """Micro-batches since the last optimizer step; the last update of an epoch may have fewer than the others."""
        self._log_ratio_N: list[torch.Tensor] = []
        self._log_w_B: list[torch.Tensor] = []
        self._teaching_B: list[torch.Tensor] = []
        """Which rows have an advantage."""
        self._rates: list[float] = []
        self._metrics: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Return the metrics of the last optimizer step; empty without one since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def saw(self, logp_BT: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
        """Record a micro-batch: the policy's log-probabilities [B, T] and TRL's tensors."""
        sampler_BT = inputs.get("sampling_per_token_logps", inputs.get("old_per_token_logps"))
        mask_BT = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        rows_B = mask_BT.any(1)
        if sampler_BT is None or not rows_B.any():
            return
        log_ratio_BT = torch.nan_to_num(logp_BT.detach() - sampler_BT) * mask_BT  # vLLM has no answer for some tokens
        teaching_B = rows_B & (inputs["advantages"] != 0)
        self._log_ratio_N.append(log_ratio_BT[teaching_B][mask_BT[teaching_B]])
        self._log_w_B.append(log_ratio_BT[rows_B].sum(1))
        self._teaching_B.append(teaching_B[rows_B])

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.accumulated = 0
        self._log_ratio_N, self._log_w_B, self._teaching_B = [], [], []  # of a step that was interrupted

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._metrics = {}
        if not self._log_w_B:
            return
        log_w_B, teaching_B = torch.cat(self._log_w_B), torch.cat(self._teaching_B)
        self._metrics = {"ess_ratio": ess_ratio(log_w_B)}
        if teaching_B.any():
            self._metrics |= sampling_metrics(torch.cat(self._log_ratio_N), log_w_B[teaching_B])
        self._log_ratio_N, self._log_w_B, self._teaching_B = [], [], []
        scale = self._scale(self._metrics["ess_ratio"])
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * scale
        rates = {"learning_rate": self._rates[0], "effective_learning_rate": self._rates[0] * scale}
        self._metrics |= rates | self._scale.metrics()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.accumulated = 0
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def squared_norms(trainer: Any, rows: Sequence[Mapping[str, torch.Tensor]], rollouts: Sequence[Rollout]) -> np.ndarray:
    """Return |u|^2 of each rollout, float64 [B]: u is the gradient of its log-probability, weighed as in TRL's loss.

    A forward and a backward pass for each row. Up to a factor that all rows share, which no baseline depends on.
    """
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    found = np.zeros(len(rows))
    for i, (row, rollout) in enumerate(zip(rows, rollouts, strict=True)):
        mask_T = row["completion_mask"] * row.get("tool_mask", 1)
        if not mask_T.any():
            continue
        ids = torch.cat([row["prompt_ids"], row["completion_ids"]])[None]
        there = torch.cat([row["prompt_mask"], row["completion_mask"]])[None]
        with trainer.compute_loss_context_manager(), trainer._of_rollouts([rollout]):
            logp_T = trainer._get_per_token_logps_and_entropies(trainer.model, ids, there, len(mask_T))[0][0]
            u = (logp_T * mask_T * row.get("importance_sampling_ratio", 1)).sum()
            if trainer.loss_type in ("grpo", "sapo"):
                u = u / mask_T.sum()
            gradients = torch.autograd.grad(u, parameters, allow_unused=True)
        found[i] = sum(float(g.double().square().sum()) for g in gradients if g is not None)
    return found


def with_baselines(advantage: InUpdate, groups: Sequence[Group], norms_N: np.ndarray) -> np.ndarray:
    """Return advantages [N] of the rollouts with a reward, with the baseline of least gradient variance.

    `norms_N`: |u|^2 of these rollouts, group by group.
    """
    rewards = [group.rewards() for group in groups]
    present = [rewards_G[~np.isnan(rewards_G)] for rewards_G in rewards]
    group_N = np.repeat(np.arange(len(present)), [len(rewards_G) for rewards_G in present])
    factor_N = np.array([advantage.factor(rewards_G) for rewards_G in rewards])[group_N]
    rewards_N = np.concatenate(present)
    pool_N = group_N if advantage.scope == "group" else np.zeros_like(group_N)
    baselines_N = optimal_baseline(rewards_N, norms_N * factor_N**2, pool_N)
    return np.asarray((rewards_N - baselines_N) * factor_N)
