"""max@k: how much a rollout adds to the best of k, instead of to the mean."""

from __future__ import annotations

import numpy as np
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from ...config.options import CHECKED
from ._base import Advantage, no_signal, present, zeros_where_present

ROUNDING = 1e-12
"""Differences of two means below this, relative to the rewards, are rounding."""


def max_at_k(rewards_G: np.ndarray, k: int) -> np.ndarray:
    """Return an unbiased leave-one-out estimate of each member's part in the gradient of E[max reward of k rollouts].

    With n members present, J = E[max(r_1 .. r_k)] has the unbiased estimate U = mean of max(S) over all subsets S of
    size k. By the log-derivative trick grad J = E[sum over i of grad logp_i * (sum of max(S) over S with i) / C(n, k)].
    C(n-1, k-1) / C(n, k) = k / n of the subsets contain i, so

        grad J = E[1/n * sum over i of A_i * grad logp_i],   A_i = k * (M_i - b_i)

    with M_i the mean of max(S) over the S that contain i. Any b_i that does not depend on rollout i keeps this
    unbiased. Here b_i is the mean of max(S) over subsets of size k of the OTHER n-1 members, or their maximum when k =
    n. k = 1 is RLOO; with rewards of 0 and 1 this is the pass@k objective.

    [G] -> [G]; NaN members stay NaN. All equal, or fewer than max(k, 2) present: zeros (fewer than k have no
    unbiased estimate, and a smaller k is another objective). O(n^2), float64. Raises ValueError on k < 1, a shape other
    than [G] or an infinite reward. Derived here; the estimator of J is that of Chen et al. 2021 (pass@k), for any
    reward.
    """
    if k < 1 or k != int(k):
        raise ValueError(f"k must be a whole number >= 1, not {k}")
    there = present(rewards_G)
    if no_signal(there) or len(there) < k:
        return zeros_where_present(rewards_G)
    filled = np.full_like(rewards_G, np.nan)
    filled[~np.isnan(rewards_G)] = _of_present(there.astype(np.float64), k)
    return filled


def _of_present(rewards_N: np.ndarray, k: int) -> np.ndarray:
    """Return float64 [N] for [N]; 1 <= k <= N and N >= 2."""
    n = len(rewards_N)
    order_N = np.argsort(rewards_N, kind="stable")
    ascending_N = rewards_N[order_N]
    others_NM = np.broadcast_to(ascending_N, (n, n))[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    mine_N1 = ascending_N[:, None]
    with_me = (np.maximum(mine_N1, others_NM) @ _maximum_weights(n - 1, k - 1)) if k > 1 else ascending_N
    without_me = others_NM @ _maximum_weights(n - 1, min(k, n - 1))
    differences_N = with_me - without_me
    differences_N[np.abs(differences_N) <= ROUNDING * np.abs(ascending_N).max()] = 0  # rounding is no signal
    advantages_N = np.empty(n)
    advantages_N[order_N] = k * differences_N
    return advantages_N


def _maximum_weights(m: int, q: int) -> np.ndarray:
    """Return the chance of each of m ascending values to be the maximum of a random subset of size q; float64 [m].

    1 <= q <= m. C(j-1, q-1) / C(m, q) for the j-th, as a running product from the top, where no factor exceeds 1.
    """
    j = np.arange(m, 1, -1, dtype=np.float64)
    ratios = np.maximum(j - q, 0.0) / (j - 1)
    return np.cumprod(np.concatenate([[q / m], ratios]))[::-1]


@dataclass(frozen=True, config=CHECKED)
class MaxAtK(Advantage):
    """Unbiased leave-one-out gradient of the expected best of `k` rollouts (max@k; pass@k for rewards of 0 and 1)."""

    k: PositiveInt = 4

    @property
    def smallest_group(self) -> int:
        return max(self.k, 2)

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        return max_at_k(rewards_G, self.k)
