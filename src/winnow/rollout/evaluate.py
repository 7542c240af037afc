"""Evaluation on held-out prompts: pass@k, mean reward, greedy."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import comb

import numpy as np

from ..base.errors import ExpectedError
from ..methods.posterior import midranks
from ..methods.success import Success
from ..types import Fate, Group, Job, Prompt, Visit
from .runner import RolloutRunner


class RolloutsFailedError(ExpectedError):
    """No rollout of an evaluation could be judged; the message names the first cause."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples is right, from c right ones of n.

    1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k: needs 0 <= c <= n and 1 <= k <= n (n={n}, c={c}, k={k})")
    return 1.0 - comb(n - c, k) / comb(n, k)


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation; `metrics` has plain names (`pass@1`, `greedy` ...)."""

    metrics: dict[str, float]
    groups: list[Group]
    rollouts: int
    tokens: int
    seconds: float


RollOut = Callable[[Sequence[Job]], list[Group]]
"""Runs jobs to their end with the newest weights; returns their finished and scored groups in the same order."""


def evaluate(
    roll_out: RollOut, prompts: Sequence[Prompt], *, n: int, success: Success | None = None, greedy: bool = True
) -> Evaluation:
    """Evaluate `n` samples a prompt, and a greedy one. Failed rollouts are left out and counted in `failed`.

    `success` decides what counts as right (default: a reward of 1); while it is undecided, pass@k is absent. The noise
    is the same at every step, so two policies are compared on the same draws.
    """
    started = time.monotonic()
    sampled = roll_out([Job(Visit(i, 0, prompt), n, "eval") for i, prompt in enumerate(prompts)])
    success = success or Success()
    success.observe(r for group in sampled for r in group.rollouts)
    metrics = summarize(sampled, success)
    groups = list(sampled)
    if greedy:
        best = roll_out([Job(Visit(i, 0, prompt), 1, "greedy") for i, prompt in enumerate(prompts)])
        success.observe(r for group in best for r in group.rollouts)
        judged = summarize(best, success)
        if "pass@1" in judged:
            metrics["greedy"] = judged["pass@1"]
        groups += best
    rollouts = [r for g in groups for r in g.rollouts]
    tokens = sum(int(r.action_mask.sum()) for r in rollouts)
    return Evaluation(metrics, sampled, len(rollouts), tokens, time.monotonic() - started)


MAX_LIVE = 512
"""Environments open at once next to training: each may hold tens of megabytes."""


def run_jobs(runner: RolloutRunner, jobs: Sequence[Job]) -> list[Group]:
    """Run jobs of one purpose to their end with nothing else in flight; return scored groups in order.

    Tasks with several turns have at most `MAX_LIVE` environments (or one group's) open at once.
    """
    if busy := runner.pending or runner.engine.pending:
        raise RuntimeError(f"the engine still has {busy} other requests; finish or cancel them first")
    live = max(1, MAX_LIVE // max(job.size for job in jobs)) if jobs and runner.task.max_turns > 1 else len(jobs)
    groups: list[Group] = []
    waiting = iter(jobs)
    try:
        while len(groups) < len(jobs):
            for job in islice(waiting, live - runner.pending):
                runner.launch(job)
            groups += runner.poll()
    except BaseException:
        runner.abandon(engine_works=False)
        raise
    return groups


def rank_weights(scores: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the ranks of scores [N] in [0, 1]; ties share their mean rank, a single score has 1 (ARRoL).

    Raises ValueError on a score that is not a number.
    """
    scores_N = np.asarray(scores, dtype=np.float64)
    if scores_N.ndim != 1 or np.isnan(scores_N).any():
        raise ValueError("scores: must be a list of numbers without NaN")
    if len(scores_N) < 2:
        return np.ones(len(scores_N))
    return (midranks(scores_N) - 0.5) / (len(scores_N) - 1)


def weighted_vote(answers: Sequence[Hashable | None], weights: Sequence[float] | np.ndarray) -> Hashable | None:
    """Return the answer with the largest sum of weights, the first among equals. None answers do not vote.

    Returns None without votes. Raises ValueError on negative or non-finite weights, or unequal lengths.
    """
    if not all(np.isfinite(w) and w >= 0 for w in weights):
        raise ValueError("weights: must be finite and not negative")
    sums: dict[Hashable, float] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            sums[answer] = sums.get(answer, 0.0) + float(weight)
    return max(sums, key=lambda answer: sums[answer]) if sums else None


def count_correct(group: Group, success: Success) -> tuple[int, int]:
    """Return the number of rollouts that can be judged, and of right ones among them."""
    right = [judged for r in group.rollouts if (judged := success.right(r)) is not None]
    return len(right), sum(right)


def summarize(groups: Sequence[Group], success: Success | None = None) -> dict[str, float]:
    """Return pass@k for k = 1, 2, 4 ... up to the largest group, `avg@n` (mean reward), mean length, shares of failed
    and of truncated (`clipped_ratio`) rollouts.

    pass@k is a mean over the groups with at least k judged rollouts; it is absent while `success` (default: a reward of
    1) is undecided. Without a judged rollout there is `failed` alone.
    """
    success = success or Success()
    counts, rewards, lengths, failed, total = [], [], [], 0, 0
    for group in groups:
        scored = group.rewards()[~np.isnan(group.rewards())]
        total += len(group.rollouts)
        failed += sum(r.fate == Fate.FAILED for r in group.rollouts)
        lengths += [int(r.action_mask.sum()) for r in group.rollouts]
        if len(scored):
            counts.append(count_correct(group, success))
            rewards.append(float(scored.mean()))
    metrics = {"failed": failed / max(total, 1)}
    if not counts:
        return metrics
    largest = max(n for n, _ in counts)
    for k in [2**i for i in range(largest.bit_length())]:
        metrics[f"pass@{k}"] = float(np.mean([pass_at_k(n, c, k) for n, c in counts if n >= k]))
    metrics["avg@n"] = float(np.mean(rewards))
    metrics["mean_length"] = float(np.mean(lengths))
    metrics["clipped_ratio"] = sum(r.truncated for g in groups for r in g.rollouts) / total
    return metrics


def require_judged(groups: Sequence[Group]) -> None:
    """Raise RolloutsFailedError when no rollout has a reward."""
    rollouts = [r for group in groups for r in group.rollouts]
    if all(r.reward is None for r in rollouts):
        causes = [r.reason for r in rollouts if r.reason]
        cause = f"first cause: {causes[0]}" if causes else "no prompts were given"
        raise RolloutsFailedError(f"no rollout could be judged: all {len(rollouts)} failed; {cause}")
