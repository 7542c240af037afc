"""Does `winnow simulate` rank methods as real runs do? By rollouts (the selection claims), and by what is learned.

    winnow warm-start -o models/countdown max_steps=270
    winnow pass-rates models/countdown --config recipes/countdown-dapo.yaml -o profiles/countdown.jsonl
    winnow pass-rates models/countdown --config recipes/countdown-dapo.yaml env.train_size=4096 -o profiles/all.jsonl
    python benchmarks/simulated.py --rates profiles/countdown.jsonl --rates-4096 profiles/all.jsonl \
      --out benchmarks/results/simulated.json

Real figures are means over the seeds in `benchmarks/results/claims.json` and `shared.json`. `growth` is fitted on one
arm, `uniform` or `dapo-fixed`, so that its pass rates end where the real arm's held-out accuracy does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from families import shared_claims as shared
from families import thrifty_claims as thrifty
from families.selection_claims import RECIPES
from harness import ROOT, machine, write_json
from scipy.stats import spearmanr

from winnow.config import RunConfig, load_config
from winnow.study.simulate import growth_to, simulate

ARMS = ("uniform", "active-adaptive-k", "greso", "greso-target-0", "greso-target-100", "greso-exact", "backoff", "dapo")
ARMS += ("dapo-adaptive", "dapo-fixed")
FITTED = "uniform"


LEARNING = ("dapo-fixed", "dapo", "greso", "backoff", "mopps-shared", "speed-rl", "knapsack")
"""Arms of the tuned baselines with 32 groups and DAPO's rate."""
TOKENS = 12
"""Of an answer on Countdown, about."""


def rollouts_of(rates: Path) -> dict[str, Any]:
    """Rollouts of the selection claims' arms, simulated and real."""

    def config_of(arm: str) -> RunConfig:
        recipe, changes = RECIPES[arm]
        return load_config(ROOT / "recipes" / f"{recipe}.yaml", changes)

    runs = read("claims.json")
    growth = growth_to(config_of(FITTED), rates, float(np.mean([run["pass@1"] for run in runs[FITTED]])))
    found: dict[str, Any] = {"growth": growth, "arms": {}}
    for arm in ARMS:
        one = simulate(config_of(arm), rates, growth=growth)
        real = float(np.mean([run["rollouts"] for run in runs[arm]]))
        found["arms"][arm] = {"real": real, "simulated": one["rollouts"], "share": one["share_of_oracle"]}
        print(arm, found["arms"][arm], flush=True)
    return found | {"rank_correlation": rank_correlation(found["arms"], "simulated", "real")}


def learning_of(rates: Path) -> dict[str, Any]:
    """Simulated signal per sampled token, the real share of mixed groups, and real pass@1 after as many tokens."""
    runs, arms = read("shared.json"), shared.FAMILY.by_name()
    there = {arm: counted(runs[thrifty.name_of(arm, 2)]) for arm in LEARNING}
    curves = {arm: [c for run in of if (c := thrifty.curve_of(run, "sampled"))] for arm, of in there.items()}
    least = min(curve[-1][1] for of in curves.values() for curve in of)

    def config_of(arm: str) -> RunConfig:
        recipe, changes = arms[thrifty.name_of(arm, 2)].recipe, arms[thrifty.name_of(arm, 2)].overrides
        return load_config(ROOT / "recipes" / f"{recipe}.yaml", changes)

    growth = growth_to(config_of("dapo-fixed"), rates, float(np.mean([run["pass@1"] for run in there["dapo-fixed"]])))
    found: dict[str, Any] = {"growth": growth, "tokens": least, "arms": {}}
    for arm, of in there.items():
        one = simulate(config_of(arm), rates, growth=growth, length=TOKENS)
        found["arms"][arm] = {
            "seeds": len(of),
            "signal_per_1000_tokens": one["signal_per_1000_tokens"],
            "pass@1": float(np.mean([thrifty.at_tokens(curve, least) for curve in curves[arm]])),
            "final pass@1": float(np.mean([run["pass@1"] for run in of])),
        }
        print(arm, found["arms"][arm], flush=True)
    for real in ("pass@1", "final pass@1"):
        found[f"rank_correlation, {real}"] = rank_correlation(found["arms"], "signal_per_1000_tokens", real)
    return found


def counted(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for run in runs if run["seed"] not in thrifty.TUNING]


def read(name: str) -> dict[str, Any]:
    runs: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["runs"]
    return runs


def rank_correlation(arms: dict[str, Any], simulated: str, real: str) -> float:
    return float(spearmanr(*([each[side] for each in arms.values()] for side in (simulated, real))).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, required=True, help="profile of 1,024 prompts")
    parser.add_argument("--rates-4096", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result: dict[str, Any] = {"what": __doc__, "machine": machine("cpu")}
    for name, part, rates in (("rollouts", rollouts_of, options.rates), ("learning", learning_of, options.rates_4096)):
        result[name] = part(rates)
        write_json(options.out, result)
        print({key: value for key, value in result[name].items() if "correlation" in key})


if __name__ == "__main__":
    main()
