"""ARRoL's theorem 4.2: how far pruning one rollout may leave the share of right answers from its target."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("rho", "error", "delta"), [(0.5, 0.0, 0.5), (0.5, 0.1, 0.2), (0.3, 0.05, 0.7), (0.9, 0.2, 0.9)]
)
def test_theorem_4_2_by_enumeration(seed: int, rho: float, error: float, delta: float) -> None:
    """Prune one of G by estimates off by at most `error`: the bound holds with a chance of at least 1 - delta."""
    rng, g = np.random.default_rng(seed), 9
    mu_G = rng.random(g)
    estimate_G = np.clip(mu_G + rng.uniform(-error, error, g), 0, 1)
    without_G = (mu_G.sum() - mu_G) / (g - 1)
    pruned = int(np.abs((estimate_G.sum() - estimate_G) / (g - 1) - rho).argmin())
    bound = np.abs(without_G - rho).min() + 2 * error + np.sqrt(np.log(2 / delta) / (2 * (g - 1)))
    left_M, broken = np.delete(mu_G, pruned), 0.0
    for outcome in product((0, 1), repeat=g - 1):
        y_M = np.array(outcome)
        broken += float(np.prod(np.where(y_M == 1, left_M, 1 - left_M))) * (abs(y_M.mean() - rho) > bound)
    assert broken <= delta
