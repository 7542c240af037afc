"""What pruning rules leave of the signal in simulated groups, at equal keep rates: by group, and over all rollouts.

A prompt can be answered in a few ways (its prefixes), each with a chance of its own to end well; siblings draw one
each, so some say the same. A score tells something about the prefix. Every rule keeps half of the rollouts.

    python benchmarks/within_signal.py --out benchmarks/results/within.json --docs docs/arrol.md
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from arms import fill, table, write_json

from winnow.methods.gate.calibration import BinnedPosterior, survival_factor, survival_probabilities
from winnow.methods.gate.within import ScoreModel, best_set, price_of, rate_weights, survival_within

PROMPTS, SIZE, DRAWS = 1500, 16, 8
KEEP_RATE, P_MIN, BINS = 0.5, 0.05, 20
PRIOR = 4.0
"""Outcomes that the mean success of all prompts counts for."""
MEANS = (0.15, 0.3, 0.75)


class World:
    """Groups, scores, and what a run would know of them. Arrays are [N, G]."""

    def __init__(self, mean: float, ways: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rate_N = rng.beta(1.2 * mean, 1.2 * (1 - mean), PROMPTS)
        chance_NW = rng.dirichlet(np.full(ways, 0.5), PROMPTS)
        p_N1 = np.clip(self.rate_N, 1e-3, 1 - 1e-3)[:, None]
        well_NW = rng.beta(3 * p_N1, 3 * (1 - p_N1), (PROMPTS, ways))
        self.way_NG = np.array([rng.choice(ways, SIZE, p=chance_W) for chance_W in chance_NW])
        rows = np.arange(PROMPTS)[:, None]
        self.well_NG, self.chance_NG = well_NW[rows, self.way_NG], chance_NW[rows, self.way_NG]
        self.right_NG = rng.random((PROMPTS, SIZE)) < self.well_NG
        logit_NW = np.log(np.clip(well_NW, 1e-3, 1) / np.clip(1 - well_NW, 1e-3, 1))
        score_NW = logit_NW + rng.normal(0, 3, (PROMPTS, ways))
        score_NG = score_NW[rows, self.way_NG]
        rank_NG = score_NG.ravel().argsort().argsort().reshape(score_NG.shape) / score_NG.size
        self.bin_NG = np.minimum((rank_NG * BINS).astype(int), BINS - 1)
        self.seen_N = rng.binomial(2 * SIZE, np.clip((chance_NW * well_NW).sum(1), 0, 1))
        """Successes at two earlier visits."""
        half = PROMPTS // 2
        self.posterior = BinnedPosterior(BINS, capacity=half * SIZE)
        for number, right in zip(self.bin_NG[:half].ravel(), self.right_NG[:half].ravel(), strict=True):
            self.posterior.observe((number + 0.5) / BINS, bool(right))
        self.q_NG = self.posterior.table()[self.bin_NG]
        self.novelty_NG = 1 / (1 + (SIZE - 1) * self.chance_NG)


def within(world: World, history: float, *, distinct: bool) -> np.ndarray:
    """Chances of survival with `history` earlier outcomes of each prompt (up to 32)."""
    failure_B, success_B = world.posterior.likelihood(0), world.posterior.likelihood(1)
    mean = world.right_NG.mean()
    share_N = world.seen_N / (2 * SIZE)
    weight_NP = rate_weights(PRIOR * mean + history * share_N, PRIOR * (1 - mean) + history * (1 - share_N))
    rules = ScoreModel(failure_B, success_B, SIZE, P_MIN)
    survival_NB = survival_within(rules, weight_NP, price_of(rules, weight_NP, KEEP_RATE))
    survival_NG = np.take_along_axis(survival_NB, world.bin_NG, 1)
    if distinct:
        survival_NG = survival_NG * world.novelty_NG
    # Prompt and score tell partly the same, so what is expected to survive is made to be what does.
    return np.clip(survival_factor(survival_NG.ravel(), KEEP_RATE, P_MIN) * survival_NG, P_MIN, 1)


def rules_of(world: World) -> dict[str, np.ndarray]:
    flat = world.q_NG.ravel()

    def calibrated(balance: Any) -> np.ndarray:
        return survival_probabilities(flat, flat, KEEP_RATE, p_min=P_MIN, balance=balance).reshape(world.q_NG.shape)

    factor = survival_factor(world.novelty_NG.ravel(), KEEP_RATE, P_MIN)
    return {
        "random": np.full(world.q_NG.shape, KEEP_RATE),
        "literal": calibrated("literal"),
        "target": calibrated("target"),
        "distinct": np.clip(factor * world.novelty_NG, P_MIN, 1),
        "within, prompts never seen": within(world, 0, distinct=False),
        "within, two visits": within(world, 2 * SIZE, distinct=False),
        "within and distinct, never seen": within(world, 0, distinct=True),
        "within and distinct, two visits": within(world, 2 * SIZE, distinct=True),
    }


def outcome(world: World, survival_NG: np.ndarray) -> dict[str, float]:
    rng, found = np.random.default_rng(0), []
    for _ in range(DRAWS):
        found.append(_judged(world, rng.random(survival_NG.shape) < survival_NG))
    return {key: float(np.mean([f[key] for f in found])) for key in found[0]}


def _judged(world: World, kept_NG: np.ndarray) -> dict[str, float]:
    half = PROMPTS // 2  # the others taught the posterior
    kept_NG, right_NG = kept_NG[half:], world.right_NG[half:]
    m_N, k_N = kept_NG.sum(1), (kept_NG & right_NG).sum(1)
    signal_N = k_N - k_N**2 / np.maximum(m_N, 1)
    return {
        "kept": float(kept_NG.mean()),
        "right": float(k_N.sum() / m_N.sum()),
        "mixed": float((signal_N > 0).mean()),
        "signal": float(signal_N.mean()),
    }


def at_once(world: World) -> dict[str, float]:
    """The best sets if all siblings could wait for each other, at the price at which half are kept."""
    low, high = -0.5, 0.5
    some = range(PROMPTS // 2, PROMPTS // 2 + 250)
    for _ in range(12):
        price = (low + high) / 2
        kept = np.mean([best_set(world.q_NG[n], price).mean() for n in some])
        low, high = (price, high) if kept > KEEP_RATE else (low, price)
    kept_NG = np.zeros(world.q_NG.shape, bool)
    for n in range(PROMPTS // 2, PROMPTS):
        kept_NG[n] = best_set(world.q_NG[n], (low + high) / 2)
    return _judged(world, kept_NG)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    said: dict[str, dict[str, dict[str, float]]] = {}
    for mean in MEANS:
        for ways in (4, 200):
            world = World(mean, ways, seed=0)
            name = f"success {world.right_NG.mean():.2f}, {'copies' if ways == 4 else 'few copies'}"
            said[name] = {rule: outcome(world, s) for rule, s in rules_of(world).items()}
            said[name]["best sets, all asked at once"] = at_once(world)
            for rule, found in said[name].items():
                print(name, f"{rule:32s}", {k: round(v, 3) for k, v in found.items()}, flush=True)
    if options.out:
        write_json(options.out, said)
    if options.docs:
        rows = []
        for rule in next(iter(said.values())):
            ratios = [f[rule]["signal"] / f["random"]["signal"] for f in said.values()]
            rows.append([rule, *(f"{r:.2f}" for r in ratios)])
        fill(options.docs, {"within-signal": table(["signal against random", *said], rows)})


if __name__ == "__main__":
    main()
