"""How well chances were predicted, for the metrics of a step."""

from __future__ import annotations

import numpy as np

from .base import Chart


class Predictions:
    """Chances that groups are mixed, and which of them are."""

    def __init__(self) -> None:
        self._found: list[tuple[float, bool]] = []

    def add(self, chance: float, mixed: bool) -> None:
        self._found.append((chance, mixed))

    def clear(self) -> None:
        self._found = []

    def metrics(self, name: str) -> dict[str, float]:
        """Return the mean chance, the share of mixed groups, the Brier score, and the AUROC where there are both kinds.

        Only of groups that were rolled out: those that a selector prefers.
        """
        if not self._found:
            return {}
        chance_N, mixed_N = np.array([chance for chance, _ in self._found]), np.array([m for _, m in self._found])
        found = {
            f"{name}/predicted": float(chance_N.mean()),
            f"{name}/mixed": float(mixed_N.mean()),
            f"{name}/brier": float(((chance_N - mixed_N) ** 2).mean()),
        }
        if 0 < mixed_N.sum() < len(mixed_N):
            found[f"{name}/auroc"] = auroc(chance_N, mixed_N)
        return found


def charts(name: str) -> list[Chart]:
    """Return the charts of `Predictions.metrics`."""
    shares = {f"{name}/predicted": "predicted", f"{name}/mixed": "found"}
    told_apart = {f"{name}/auroc": "AUROC", f"{name}/brier": "Brier score"}
    return [
        Chart("Mixed groups among those rolled out", shares, share=True),
        Chart("How well mixed groups are predicted", told_apart, share=True),
    ]


def auroc(score_N: np.ndarray, label_N: np.ndarray, weight_N: np.ndarray | None = None) -> float:
    """Return the chance that a true one scores above a false one, ties counted half; needs both kinds."""
    weight_N = np.ones(len(score_N)) if weight_N is None else weight_N
    values, index_N = np.unique(score_N, return_inverse=True)
    positive_M = np.bincount(index_N, weight_N * label_N, minlength=len(values))
    negative_M = np.bincount(index_N, weight_N * ~label_N, minlength=len(values))
    below_M = np.cumsum(negative_M) - negative_M / 2
    return float(positive_M @ below_M / (positive_M.sum() * negative_M.sum()))
