"""Each arm at three learning rates, on 4,096 Countdown puzzles: what a tuned DAPO needs, and what is saved on it.

Rates are chosen on `TUNING`, a seed that is not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tables as t
from families.base import Arm, Family, Said, Start
from runs import Run
from tables import SEEDS, Column, Figures, Summary

TUNING = 9
RATES = (0.5, 1, 2, 4)
"""In units of the task's: the lower three for arms with many small updates, else the upper three."""
FIXED = ("rollout_batch.name=fixed", "rollout_batch.surplus=discard")
GRESO = ("selector=greso", "rollout_batch=adaptive", "max_lag=1")
REUSE = ("reuse={updates: 4, max_age: 16, min_ess: 0.5}", "step_scale=ess")
CLIP = ("policy_loss=clip", "epsilon_high=0.28", "correction=none")
UPDATES = ("num_iterations=4", "step_scale=ess")
PROBE = ("group_size={name: sequential, probe: 4}",)
SMALL = ("prompts_per_step=8", "eval_steps=100")
"""As many optimizer steps a sampled token as `REUSE` has, each with a quarter of the groups."""
METHODS: dict[str, tuple[str, ...]] = {
    "dapo-fixed": FIXED,
    "dapo": (),
    "greso": GRESO,
    "greso-probe": (*GRESO, *PROBE),
    "greso-4-updates": (*GRESO, *UPDATES, *CLIP),
    "probe-4-updates": (*GRESO, *UPDATES, *CLIP, *PROBE),
    "greso-reuse-4": (*GRESO, *REUSE),
    "greso-reuse-4-clip": (*GRESO, *REUSE, *CLIP),
    "dapo-small": (*FIXED, *SMALL),
    "greso-small": (*GRESO, *SMALL),
    "probe-small": (*GRESO, *SMALL, *PROBE),
    "thrifty": (*GRESO, *REUSE, *CLIP, *PROBE),
}
"""Arm -> what it changes in the task's recipe, which refills groups without signal exactly."""
DAPO_REFILL = (
    *("gates=[]", "filter=zero_variance", "num_generations=8", "prompts_per_step=32", "advantage=rloo"),
    *("policy_loss=plain", "loss_type=sequence_sum", "correction={name: truncate, low: 0.1003, high: 9.974}"),
)


@dataclass(frozen=True)
class Task:
    """A recipe, what all arms change in it, and the unit of its learning rates."""

    recipe: str
    changes: tuple[str, ...]
    rate: float
    steps: int
    """Of an arm without `reuse`; the others have more, which sample less than half of the tokens."""
    start: Start | None = None


TASKS = {
    "countdown": Task(
        "countdown-dapo", ("env.train_size=4096",), 1e-4, 300, Start("countdown-uniform", {"max_steps": 270})
    ),
    "chain": Task(
        "chain-sum-arrol",
        (*DAPO_REFILL, "eval_steps=10", "eval_prompts=256"),
        1e-4,
        100,
        Start("chain-sum-arrol", {"max_steps": 900, "batch_size": 32}, "warm-chain-sum", shared=True),
    ),
    "smollm2": Task(
        "arithmetic-smollm2",
        (*DAPO_REFILL, "model=smollm2-135m", "eval_steps=4", "eval_prompts=256", "eval_generations=4"),
        1e-5,
        60,
    ),
}
BASE = "dapo-fixed"


def name_of(arm: str, rate: float, task: str = "countdown") -> str:
    return f"{arm}-lr{rate}" if task == "countdown" else f"{task}-{arm}-lr{rate}"


def summary(run: Run) -> Summary:
    passed = [p.passed for p in run.data.curve]
    return {
        "seed": run.seed,
        "pass@1": passed[-1],
        "best": max(passed),
        "mean_pass@1": float(np.mean(passed[1:])),
        "tokens": run.data.tokens,
        "deployed": run.deployed,
        "curve": run.curve,
    }


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Said:
    new = {arm: [summary(run) for run in found] for arm, found in runs.items()}
    return said | {"runs": t.merged(said.get("runs", {}), new, list(FAMILY.by_name()))}


def best_rates(runs: Figures, seed: int = TUNING) -> dict[str, float]:
    """The rate of each arm with the highest held-out pass@1 at the tokens of its cheapest run, by the tuning seed.

    An arm that was run at one rate alone, without the tuning seed, keeps it.
    """
    chosen = {}
    for arm in METHODS:
        curves = {}
        for rate in RATES:
            for run in runs.get(name_of(arm, rate), []):
                if run["seed"] == seed:
                    curves[rate] = run["curve"]
        if curves:
            tokens = min(curve[-1][1] for curve in curves.values())
            chosen[arm] = max(curves, key=lambda rate: at_tokens(curves[rate], tokens))
        elif len(run_at := [rate for rate in RATES if runs.get(name_of(arm, rate))]) == 1:
            chosen[arm] = run_at[0]
    return chosen


def at_tokens(curve: list[list[float]], tokens: float) -> float:
    """Held-out pass@1 after so many tokens, between evaluations by a straight line."""
    return float(np.interp(tokens, [point[1] for point in curve], [point[3] for point in curve]))


def base_of(runs: Figures) -> dict[int, list[list[float]]]:
    """Curves of the tuned base, by seed."""
    return {run["seed"]: run["curve"] for run in runs.get(name_of(BASE, best_rates(runs).get(BASE, 1)), [])}


def ahead(runs: Figures) -> Column:
    """Held-out pass@1 less the tuned base's after as many tokens, where the cheaper of both ends; of the same seed."""

    def cell(found: list[Summary], _: list[Summary]) -> str:
        base, pairs = base_of(runs), []
        for run in found:
            if run["seed"] in base:
                curves = run["curve"], base[run["seed"]]
                tokens = min(curve[-1][1] for curve in curves)
                pairs.append((at_tokens(curves[0], tokens), at_tokens(curves[1], tokens)))
        return t.text(t.paired_estimate(pairs, False), "{:+.3f}")

    return Column("pass@1 at equal tokens, less DAPO's", cell)


def to_final(runs: Figures, head: str, part: float) -> Column:
    """Tokens to a part of the tuned base's final pass@1, over the base's; of the same seed."""

    def cell(found: list[Summary], _: list[Summary]) -> str:
        base, pairs, n = base_of(runs), [], 0
        for run in found:
            if run["seed"] in base:
                n += 1
                other = base[run["seed"]]
                costs = [t.cost_to(curve, part * other[-1][3], "tokens") for curve in (run["curve"], other)]
                if costs[0] and costs[1]:
                    pairs.append((costs[0], costs[1]))
        missed = "" if len(pairs) == n else f"; {n - len(pairs)} of {n} did not get there"
        return t.text(t.paired_estimate(pairs, True), t.TWO) + missed

    return Column(head, cell)


def tables(said: Said) -> dict[str, str]:
    runs: Figures = said["runs"]
    rates = best_rates(runs)
    tuning = {arm: [run for run in found if run["seed"] == TUNING] for arm, found in runs.items()}
    tuned = {
        name_of(arm, rate): [run for run in runs.get(name_of(arm, rate), []) if run["seed"] != TUNING]
        for arm, rate in rates.items()
    }
    columns = [
        SEEDS,
        t.mean("final pass@1", "pass@1"),
        t.mean("best on the way", "best"),
        t.mean("final pass@8", "deployed.pass@8"),
        t.mean("tokens", "tokens", "{:.2f}M", 1e-6),
    ]
    to = [ahead(runs), to_final(runs, "tokens to DAPO's final pass@1", 1.0), to_final(runs, "to 95% of it", 0.95)]
    return {
        "rates": t.table_of({arm: found for arm, found in tuning.items() if found}, [*columns, *to]),
        "thrifty": t.table_of({arm: found for arm, found in tuned.items() if found}, [*columns, *to]),
    }


def arms() -> Iterator[Arm]:
    for task, each in TASKS.items():
        for arm, changes in METHODS.items():
            steps = each.steps * (10 if REUSE[0] in changes else 12 if SMALL[0] in changes else 3) // 3
            for rate in RATES:
                settings = (f"learning_rate={rate * each.rate:g}", f"max_steps={steps}")
                yield Arm(name_of(arm, rate, task), each.recipe, (*each.changes, *changes, *settings), each.start)


FAMILY = Family(work="thrifty", arms=tuple(arms()), collect=collect, tables=tables, may_stop=True, jobs=1)
