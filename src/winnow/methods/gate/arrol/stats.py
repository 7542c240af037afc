"""Statistics of a step's pruning: its decisions, and how well the gate predicted success."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...posterior import auroc

RELIABILITY_BINS = 10


@dataclass
class Realised:
    """Figures of one optimizer step. Each outcome represents 1 / (its chance to be seen) rollouts."""

    asked: int = 0
    returned: int = 0
    """Rollouts that returned, with a decision in this step or before."""
    pruned: int = 0
    """Pruned rollouts among those returned; an audit may have kept them running."""
    not_finite: int = 0
    survival: float = 0.0
    """Sum of the chances of survival."""
    novelty: float = 0.0
    """Sum over rollouts of 1 / (number of siblings expected to be equal so far)."""
    within: list[float] = field(default_factory=list)
    """AUROC among the siblings of each group that has right and wrong answers."""
    outcomes: list[tuple[float, bool, float, float]] = field(default_factory=list)
    """(predicted success, success, weight, tokens that pruning saved on rollouts like it)."""
    groups: list[tuple[float, int]] = field(default_factory=list)
    """Share of right answers in each group, and its number of rewards."""
    survivors: list[tuple[int, int]] = field(default_factory=list)
    """Rollouts of each group that were not pruned, and its size."""
    ended_early: int = 0
    """Rollouts that ended before the gate point."""

    def siblings(self, scored: list[tuple[float, bool, float]]) -> None:
        """Record (score, success, weight) of a group's rollouts."""
        score_N, label_N, weight_N = (np.array(column) for column in zip(*scored, strict=True))
        if 0 < label_N.sum() < len(label_N):
            self.within.append(auroc(score_N, label_N, weight_N))

    def group(self, labels: list[bool], survivors: int, size: int) -> None:
        self.survivors.append((survivors, size))
        if labels:
            self.groups.append((sum(labels) / len(labels), len(labels)))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step.

        `keep_rate` is as carried out, `expected_keep_rate` the mean chance to survive, with forced survivors, without
        audits. `tokens_saved` is estimated from the tokens that survivors went on to sample. `positive_share` and
        `balance`, E[p (1 - p)], are of groups as they return, before a filter; `success` is of all rollouts with a
        decision, estimated. `brier`, `auroc` and `accuracy` are of the predictions. `auroc_within` is among siblings,
        0.5 if none can be told apart. `novelty` is 1 / G if all were equal so far. `survivors/none`, `one` and `all`
        count groups.
        """
        metrics = {
            "asked": float(self.asked),
            "not_finite": float(self.not_finite),
            "ended_early": float(self.ended_early),
            "survivors/none": float(sum(n == 0 for n, _ in self.survivors)),
            "survivors/one": float(sum(n == 1 for n, _ in self.survivors)),
            "survivors/all": float(sum(n == size for n, size in self.survivors)),
        }
        if self.asked:
            metrics["expected_keep_rate"] = self.survival / self.asked
            metrics["novelty"] = self.novelty / self.asked
        if self.within:
            metrics["auroc_within"] = float(np.mean(self.within))
        if self.returned:
            metrics["keep_rate"] = 1 - self.pruned / self.returned
        if self.groups:
            share_N, size_N = np.array(self.groups).T
            metrics["positive_share"] = float((share_N * size_N).sum() / size_N.sum())
            metrics["balance"] = float((share_N * (1 - share_N)).mean())
        if self.outcomes:
            q_N, label_N, weight_N, saved_N = np.array(self.outcomes, dtype=np.float64).T
            total = weight_N.sum()
            metrics["success"] = float(weight_N @ label_N / total)
            metrics["predicted_success"] = float(weight_N @ q_N / total)
            metrics["brier"] = float(weight_N @ (q_N - label_N) ** 2 / total)
            metrics["accuracy"] = float(weight_N @ ((q_N > 0.5) == (label_N > 0.5)) / total)
            metrics["tokens_saved"] = float(saved_N.sum())
            if 0 < label_N.sum() < len(label_N):
                metrics["auroc"] = auroc(q_N, label_N > 0.5, weight_N)
            metrics |= _reliability(q_N, label_N, weight_N)
        return metrics


def _reliability(q_N: np.ndarray, label_N: np.ndarray, weight_N: np.ndarray) -> dict[str, float]:
    """Return data of a reliability diagram: sums over the rollouts in each bin of predicted success."""
    bin_N = np.minimum((q_N * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
    metrics: dict[str, float] = {}
    for number in np.unique(bin_N).tolist():
        weight_M, q_M, label_M = (column[bin_N == number] for column in (weight_N, q_N, label_N))
        sums = {"rollouts": weight_M.sum(), "predicted": weight_M @ q_M, "right": weight_M @ label_M}
        metrics |= {f"reliability/{number}/{name}": float(value) for name, value in sums.items()}
    return metrics
