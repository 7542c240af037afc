"""How well chances were predicted, for the metrics of a step."""

from __future__ import annotations

import numpy as np

from ..types import Group, GroupKind
from .base import Chart
from .group_kind import GroupJudge
from .posterior import mixed_probability


class Predictions:
    """Chances that groups are mixed, by the posteriors of their pass rates, and which of them are."""

    def __init__(self) -> None:
        self._pairs: list[tuple[float, bool]] = []

    def add(self, group: Group, a: np.ndarray, b: np.ndarray, judge: GroupJudge, probe: int | None = None) -> None:
        """Compare a finished group with the posterior before it, Beta(a, b), arrays of one number.

        `probe`: only so many siblings count. The others are there only if these are mixed, and would tell what was to
        be predicted.
        """
        rewards = [r.reward for r in group.siblings[:probe] if r.reward is not None]
        kind = judge.of_rewards(rewards)
        if kind is not GroupKind.NOT_JUDGED:
            self._pairs.append((mixed_probability(a, b, len(rewards)).item(), kind is GroupKind.SIGNAL))

    def clear(self) -> None:
        self._pairs = []

    def metrics(self, name: str) -> dict[str, float]:
        """Return the mean chance, the share of mixed groups, the Brier score, and the AUROC where there are both kinds.

        Only of groups that were rolled out: those that a selector prefers.
        """
        if not self._pairs:
            return {}
        chance_N, mixed_N = np.array([chance for chance, _ in self._pairs]), np.array([m for _, m in self._pairs])
        metrics = {
            f"{name}/predicted": float(chance_N.mean()),
            f"{name}/mixed": float(mixed_N.mean()),
            f"{name}/brier": float(((chance_N - mixed_N) ** 2).mean()),
        }
        if 0 < mixed_N.sum() < len(mixed_N):
            metrics[f"{name}/auroc"] = auroc(chance_N, mixed_N)
        return metrics


def charts(name: str) -> list[Chart]:
    """Return the charts of `Predictions.metrics`."""
    shares = {f"{name}/predicted": "predicted", f"{name}/mixed": "observed"}
    quality = {f"{name}/auroc": "AUROC", f"{name}/brier": "Brier score"}
    return [
        Chart("Mixed groups among those rolled out", shares, share=True),
        Chart("How well mixed groups are predicted", quality, share=True),
    ]


def auroc(score_N: np.ndarray, label_N: np.ndarray, weight_N: np.ndarray | None = None) -> float:
    """Return the chance that a true one scores above a false one, ties counted half; needs both kinds."""
    weight_N = np.ones(len(score_N)) if weight_N is None else weight_N
    values, index_N = np.unique(score_N, return_inverse=True)
    positive_M = np.bincount(index_N, weight_N * label_N, minlength=len(values))
    negative_M = np.bincount(index_N, weight_N * ~label_N, minlength=len(values))
    below_M = np.cumsum(negative_M) - negative_M / 2
    return float(positive_M @ below_M / (positive_M.sum() * negative_M.sum()))
