"""How much of the last epoch's rollouts a policy would sample again, token for token, with the same noise.

    python benchmarks/drift.py OLDER NEWER --config recipes/chain-sum-arrol.yaml --out benchmarks/results/drift.json

OLDER and NEWER are models of one run, an epoch apart. Both read rollouts of OLDER. At each token the noise is drawn
given that OLDER took this token, and NEWER's token with the same noise is compared: by Gumbel-max, by inverse CDF (what
the engine does), and by the best possible coupling, which differs with the total variation distance. Tokens before the
first difference would be kept, and the rest sampled again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import machine, write_json
from transformers import AutoModelForCausalLM

from winnow.config import load_config
from winnow.run.build import build_task
from winnow.run.standalone import opened
from winnow.types import Job, Prompt, Rollout, Visit

NOISES = 16
"""Draws of the noise for each rollout."""


def logp_of(model: Any, rollout: Rollout) -> np.ndarray:
    """Return log-probabilities of every token at each of the T sampled places, float64 [T, V]."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].double()
    found: np.ndarray = logits.log_softmax(-1).numpy()
    return found


def same_by_gumbel(old_TV: np.ndarray, new_TV: np.ndarray, token_T: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return whether NEWER takes the same tokens, bool [T]; noise given OLDER's tokens as in Maddison et al. 2014."""
    rows = np.arange(len(token_T))
    top_T = rng.gumbel(size=len(token_T))
    free_TV = rng.gumbel(size=old_TV.shape) + old_TV
    below_TV = -np.log(np.exp(-top_T)[:, None] + np.exp(-free_TV))  # the others, given that they stay under the top
    below_TV[rows, token_T] = top_T
    same: np.ndarray = (below_TV - old_TV + new_TV).argmax(1) == token_T
    return same


def same_by_cdf(old_TV: np.ndarray, new_TV: np.ndarray, token_T: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the same with one uniform number a token."""
    rows = np.arange(len(token_T))
    end_T, p_T = np.exp(old_TV).cumsum(1)[rows, token_T], np.exp(old_TV)[rows, token_T]
    u_T = end_T - p_T * rng.random(len(token_T))
    same: np.ndarray = (np.exp(new_TV).cumsum(1) < u_T[:, None]).sum(1) == token_T
    return same


def kept(same_T: np.ndarray) -> int:
    """Tokens before the first difference."""
    return len(same_T) if same_T.all() else int(same_T.argmin())


def measure(old: Any, new: Any, rollouts: list[Rollout]) -> dict[str, float]:
    """Return means over rollouts: tokens kept over all tokens, by coupling, and the drift itself."""
    rng, total = np.random.default_rng(0), 0
    sums = dict.fromkeys(("gumbel", "inverse_cdf", "best", "kl", "whole_gumbel"), 0.0)
    for rollout in rollouts:
        old_TV, new_TV, token_T = logp_of(old, rollout), logp_of(new, rollout), rollout.token_ids
        total += len(token_T)
        gumbel = [kept(same_by_gumbel(old_TV, new_TV, token_T, rng)) for _ in range(NOISES)]
        sums["gumbel"] += float(np.mean(gumbel))
        sums["whole_gumbel"] += float(np.mean(np.array(gumbel) == len(token_T)))
        cdf = [kept(same_by_cdf(old_TV, new_TV, token_T, rng)) for _ in range(NOISES)]
        sums["inverse_cdf"] += float(np.mean(cdf))
        ratio_T = np.exp(new_TV - old_TV)[np.arange(len(token_T)), token_T]
        sums["best"] += float(np.minimum(ratio_T, 1).cumprod().sum())
        sums["kl"] += float((np.exp(old_TV) * (old_TV - new_TV)).sum())
    whole = sums.pop("whole_gumbel") / len(rollouts)
    return {name: value / total for name, value in sums.items()} | {
        "rollouts_kept_whole": whole,
        "mean_length": total / len(rollouts),
    }


def rollouts_of(model: str, config: Path, prompts: int, overrides: list[str]) -> list[Rollout]:
    c = load_config(config, [f"model={model}", "gates=[]", *overrides])
    task = build_task(c.env)
    some: list[Prompt] = list(task.train[:prompts])
    with opened(c, task) as (_, roll_out, _rewarder):
        groups = roll_out([Job(Visit(number, 0, prompt), 4, "profile") for number, prompt in enumerate(some)])
    return [rollout for group in groups for rollout in group.rollouts if len(rollout.token_ids)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older")
    parser.add_argument("newer", nargs="+")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rollouts = rollouts_of(arguments.older, arguments.config, arguments.prompts, arguments.overrides)
    old = AutoModelForCausalLM.from_pretrained(arguments.older)
    found = {}
    for name in arguments.newer:
        found[name] = measure(old, AutoModelForCausalLM.from_pretrained(name), rollouts)
        print(name, {key: round(value, 4) for key, value in found[name].items()})
    if arguments.out:
        write_json(arguments.out, {"machine": machine("cpu"), "older": arguments.older, "newer": found})


if __name__ == "__main__":
    main()
