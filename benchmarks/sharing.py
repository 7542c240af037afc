"""What is saved when the tokens that siblings begin with are computed once, in decoding and in updates, and those that
prompts begin with, in prefills.

    python benchmarks/bench.py sharing MODEL --config recipes/alfworld.yaml --name alfworld --out FILE

All prompts are visited for the first time. Ratios are to the same siblings computed apart, by repeat. An update trains
all of the rollouts, with rewards made up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import in_turn, machine, read_json, spreads, write_json

from winnow.config import load_config
from winnow.engine.local import beginnings
from winnow.engine.local import engine as local
from winnow.engine.local.cache import CacheRows
from winnow.learner.rows import rows_of
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain
from winnow.run.build import build_learner
from winnow.run.inputs import build_task
from winnow.run.resolve import resolve_here
from winnow.run.standalone import opened
from winnow.types import Group, Job, Visit

APART = "apart"


class Apart(CacheRows):
    """Gives every sequence a row of its own."""

    def append(self, beginnings: list[tuple[int, int]]) -> tuple[slice, list[tuple[int, int]]]:
        rows, _ = super().append([(i, length) for i, (_, length) in enumerate(beginnings)])
        return rows, beginnings


NEVER = dict.fromkeys(beginnings.SAVED_TOKENS, sys.maxsize)
SIDES: dict[str, tuple[type[CacheRows], dict[str, int], list[str]]] = {
    APART: (Apart, NEVER, []),
    "shared": (CacheRows, NEVER, []),
    "shared, prompts too": (CacheRows, beginnings.SAVED_TOKENS, []),
    "shared, with drafts": (CacheRows, NEVER, ["speculative=true"]),
}
"""Rows of siblings, tokens that a beginning of prompts has to save, settings."""

Side = Callable[[], tuple[list[Group], float]]


def side_of(roll_out: Any, prompts: Any, size: int, taken: list[int]) -> Side:
    """Roll out the next groups at every call."""

    def side() -> tuple[list[Group], float]:
        some = prompts[taken[0] : taken[0] + taken[1]]
        jobs = [Job(Visit(prompt.ordinal, 0, prompt), size) for prompt in some]
        started = time.perf_counter()
        groups = list(roll_out(jobs))
        return groups, time.perf_counter() - started

    return side


def figures(found: tuple[list[Group], float], base: tuple[list[Group], float]) -> dict[str, float]:
    """Ratios to siblings that are decoded apart, and the share of rollouts that are the same, token for token."""
    rollouts, others = ([r for group in groups for r in group.rollouts] for groups, _ in (found, base))
    sampled, sampled_by_others = (sum(int(r.action_mask.sum()) for r in each) for each in (rollouts, others))
    alike = [np.array_equal(a.token_ids, b.token_ids) for a, b in zip(rollouts, others, strict=True)]
    return {
        "decoded": (sampled - sum(r.num_reused_tokens for r in rollouts)) / sampled_by_others,
        "computed": sum(r.num_computed_tokens for r in rollouts) / sum(r.num_computed_tokens for r in others),
        "seconds": found[1] / base[1],
        "rollouts alike": float(np.mean(alike)),
        "tokens a rollout": sampled / len(rollouts),
    }


def updates(learner: Any) -> dict[str, Callable[[list[Group]], float]]:
    """Seconds of an update's forward and backward passes, with what siblings share computed apart and once."""
    limits = learner._limits

    def seconds(groups: list[Group], pairs: float) -> float:
        for group in groups:
            for i, rollout in enumerate(group.rollouts):
                rollout.reward = float(i % 2)
        rows = rows_of(groups, ADVANTAGES["rloo"](), "dapo", max_completion_length=1)
        learner._limits = replace(limits, pairs=pairs)
        started = time.perf_counter()
        learner.accumulate(rows, LossConfig(policy_loss=Plain()), 0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started

    return {APART: lambda groups: seconds(groups, 0.0), "shared": lambda groups: seconds(groups, limits.pairs)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True, help="of the task and the policy, in the file")
    parser.add_argument("--prompts", type=int, default=16, help="groups of a repeat")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--overrides", nargs="*", default=[])


def run(options: argparse.Namespace) -> None:
    base = load_config(options.config, [f"model={options.model}", "gates=[]", *options.overrides])
    on = machine("cuda" if "cuda" in base.device else "cpu")
    task, taken = build_task(base.env), [-options.prompts, options.prompts]
    with ExitStack() as stack:
        sides = {}
        for name, (rows_class, least, more) in SIDES.items():
            local.CacheRows = rows_class  # type: ignore[misc]
            beginnings.SAVED_TOKENS = least
            c = load_config(options.config, [f"model={options.model}", "gates=[]", *options.overrides, *more])
            policy, roll_out, *_ = stack.enter_context(opened(c, task, task.train))
            sides[name] = side_of(roll_out, task.train, base.num_generations, taken)
        in_update = updates(build_learner(policy, resolve_here(base)))
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in (*sides, "update")}
        for repeat in range(1 + options.repeats):
            taken[0] += options.prompts
            [found] = in_turn(sides, 1)
            if repeat:  # the first one warms up
                for name in sides:
                    rows[name].append(figures(found[name], found[APART]))
            groups = found[APART][0]
            [took] = in_turn({name: partial(side, groups) for name, side in in_update.items()}, 1, warm=not repeat)
            rows["update"] += [{"seconds": took["shared"] / took[APART]}] if repeat else []
    said = {"machine": on, "prompts": options.prompts} | {name: spreads(found) for name, found in rows.items()}
    print(json.dumps(said, indent=1))
    write_json(options.out, read_json(options.out) | {options.name: said})
