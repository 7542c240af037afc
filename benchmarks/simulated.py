"""Does `winnow simulate` rank methods as real runs do? Rollouts of the selection claims' arms, real and simulated.

    winnow warm-start -o models/countdown max_steps=270
    winnow pass-rates models/countdown --config recipes/countdown-dapo.yaml -n 16 -o profiles/countdown.jsonl
    python benchmarks/simulated.py --rates profiles/countdown.jsonl --out benchmarks/results/simulated.json

Real figures are means over the seeds in `benchmarks/results/claims.json`. `growth` is fitted on one arm, `uniform`, so
that its pass rates end where the real arm's held-out accuracy does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from families.selection_claims import RECIPES
from harness import ROOT, machine, write_json
from scipy.stats import spearmanr

from winnow.config import load_config
from winnow.study.simulate import simulate

ARMS = ("uniform", "active-adaptive-k", "greso", "greso-target-0", "greso-target-100", "greso-exact", "backoff", "dapo")
ARMS += ("dapo-adaptive", "dapo-fixed")
FITTED = "uniform"


def simulated(arm: str, rates: Path, growth: float) -> dict[str, Any]:
    recipe, changes = RECIPES[arm]
    return simulate(load_config(ROOT / "recipes" / f"{recipe}.yaml", changes), rates, growth=growth, length=1)


def fitted(rates: Path, goal: float) -> float:
    """Return the growth with which the arm's mean rate ends at `goal`, by bisection."""
    low, high = 0.0, 4.0
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if simulated(FITTED, rates, middle)["mean_rate"] < goal else (low, middle)
    return (low + high) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = json.loads((ROOT / "benchmarks" / "results" / "claims.json").read_text())["runs"]
    real = {arm: float(np.mean([run["rollouts"] for run in runs[arm]])) for arm in ARMS}
    growth = fitted(options.rates, float(np.mean([run["pass@1"] for run in runs[FITTED]])))
    result: dict[str, Any] = {"what": __doc__, "machine": machine("cpu"), "growth": growth, "arms": {}}
    for arm in ARMS:
        found = simulated(arm, options.rates, growth)
        result["arms"][arm] = {"real": real[arm], "simulated": found["rollouts"], "share": found["share_of_oracle"]}
        write_json(options.out, result)
        print(arm, result["arms"][arm], flush=True)
    columns = ([each[side] for each in result["arms"].values()] for side in ("real", "simulated"))
    result["rank_correlation"] = float(spearmanr(*columns).statistic)
    write_json(options.out, result)
    print("rank correlation", result["rank_correlation"])


if __name__ == "__main__":
    main()
