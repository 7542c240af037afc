"""Do length and logit energy stand in for a rollout's gradient norm? Rank correlations on sampled rollouts (VCPO, E.4).

Norms are exact: one backward pass a rollout, of the summed log-probability of its tokens. No policy is trained.

    python benchmarks/grad_norm_proxies.py runs/async-claims/warm-s0 runs/arrol-claims/warm-chain-sum-s0 \
        --recipes countdown-lag chain-sum-arrol --out benchmarks/results/grad_norm_proxies.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import ROOT, write_json
from scipy.stats import spearmanr

from winnow.config import load_config
from winnow.learner import Local
from winnow.learner.batch import Row, collate
from winnow.methods.advantage.otb import energy
from winnow.run.build import build_task
from winnow.run.standalone import model_config, opened
from winnow.types import Group, Job, Visit

GROUPS, SIZE = 64, 8


def study(model: str, recipe: str) -> dict[str, Any]:
    """Spearman's rho with the squared gradient norm, over all rollouts and as the mean within groups."""
    given = load_config(ROOT / "recipes" / f"{recipe}.yaml", [f"model={model}"])
    c = model_config(model, given.model_dump(exclude={"model"}))
    task = build_task(c.env)
    with opened(c, task) as (policy, roll_out, _):
        groups = roll_out([Job(Visit(i, 0, prompt), SIZE) for i, prompt in enumerate(task.train[:GROUPS])])
        learner = Local().build(policy, c)
        parameters = [p for p in learner.model.parameters() if p.requires_grad]
        found = [_of_group(group, learner, parameters) for group in groups]
    all_N4 = np.concatenate(found)
    within = [_correlations(rows) for rows in found if len(np.unique(rows[:, 0])) > 2]
    return {
        "model": Path(model).name,
        "rollouts": len(all_N4),
        "norm_squared": {q: float(np.quantile(all_N4[:, 0], float(q))) for q in ("0.05", "0.5", "0.95")},
        "over_all": _correlations(all_N4),
        "within_groups": {name: float(np.nanmean([w[name] for w in within])) for name in within[0]},
    }


def _of_group(group: Group, learner: Any, parameters: list[torch.Tensor]) -> np.ndarray:
    """float64 [G, 4]: squared gradient norm, tokens, energy of the logits, minus the log-probability."""
    rows = []
    for rollout in group.rollouts:
        batch = collate([Row(rollout, 1.0, 1.0)], pad_id=0)
        logp, _, squares = learner._logp(batch, squares=True)
        gradients = torch.autograd.grad(logp.sum(), parameters, allow_unused=True)
        norm_sq = sum(float(g.double().square().sum()) for g in gradients if g is not None)
        mask = batch.mask_BT[:, 1:]
        spent = (energy(logp.detach(), squares, torch.ones(1)) * mask).sum()
        rows.append([norm_sq, float(mask.sum()), float(spent), -float(logp.detach().sum())])
    return np.array(rows, np.float64)


def _correlations(rows_N4: np.ndarray) -> dict[str, float]:
    """NaN for a proxy that is the same for all."""
    names = ("length", "energy", "surprise")
    return {
        name: float(spearmanr(rows_N4[:, 0], rows_N4[:, i]).statistic) if np.ptp(rows_N4[:, i]) else float("nan")
        for i, name in enumerate(names, 1)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="model or run directories")
    parser.add_argument("--recipes", nargs="+", required=True, help="one a model: its task and sampling")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = [study(model, recipe) for model, recipe in zip(options.models, options.recipes, strict=True)]
    for said in figures:
        print(said)
    if options.out:
        write_json(options.out, figures)


if __name__ == "__main__":
    main()
