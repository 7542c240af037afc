"""Arms at several learning rates, on several tasks: what a tuned DAPO needs, and what is saved on it.

Rates are chosen on `TUNING`, seeds that are not reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tables as t
from families.base import Arm, Family, Said, Start
from families.gate_claims import START as ROOMS
from runs import Run
from tables import SEEDS, Column, Figures, Summary

TUNING = (9, 8)
"""Most arms were run on the first alone."""
RATES = (0.25, 0.5, 1, 2, 4)
"""In units of the task's. Not every arm has been run at each."""
FIXED = ("rollout_batch.name=fixed", "rollout_batch.surplus=discard")
ROUNDS = ("rollout_batch=adaptive", "max_lag=1")
GRESO = ("selector=greso", *ROUNDS)
BAYES = ("selector=bayes", *ROUNDS)
REUSE = ("reuse={updates: 4, max_age: 16, min_ess: 0.5}", "step_scale=ess")
TWICE = ("reuse={updates: 2, max_age: 16, min_ess: 0.5}", "step_scale=ess")
CLIP = ("policy_loss=clip", "epsilon_high=0.28", "correction=none")
PROBE = ("group_size={name: sequential, probe: 4}",)
SMALL = ("prompts_per_step=8",)
"""As many optimizer steps a sampled token as `REUSE` has, each with a quarter of the groups."""
MEDIUM = ("prompts_per_step=16",)
WIDE = ("num_generations=16",)
HARD = ("group_size={name: sequential, probe: 4, hard_size: 16}",)
KNAPSACK = ("group_size={name: allocate, value: knapsack}",)
ACTIVE = ("num_generations=4", "filter={name: zero_variance, refill: false}")
ADAPTIVE_K = ("group_size={name: adaptive_k, tau: 0.5, window: 5}",)
LINEAR = ("lr_scheduler_type=linear",)
ORACLE = ("selector={name: pass_rate, low: 0.1, high: 0.9, refresh_steps: 100}", "rollout_batch=adaptive", "max_lag=1")
"""Knows every pass rate: all prompts are rolled out 16 times every 100 steps, which costs it nothing here."""
METHODS: dict[str, tuple[str, ...]] = {
    "dapo-fixed": FIXED,
    "dapo": (),
    "dapo-small": (*FIXED, *SMALL),
    "dapo-fixed-linear": (*FIXED, *LINEAR),
    "dapo-fixed-linear-half": (*FIXED, *LINEAR),
    "greso": GRESO,
    "uniform": ("num_generations=4", "filter=keep_all"),
    "active": ACTIVE,
    "active-adaptive-k": (*ACTIVE, *ADAPTIVE_K),
    "all": ("selector=greso", *ACTIVE, *ADAPTIVE_K),
    "arrol": ("gates=[arrol]", "num_generations=16", "prompts_per_step=16"),
    "backoff": ("selector=backoff", *ROUNDS),
    "mopps": ("selector=thompson", *ROUNDS),
    "mopps-small": ("selector=thompson", *ROUNDS, *SMALL),
    "speed-rl": (*ROUNDS, *PROBE),
    "pilot-commit": ("selector=backoff", *ROUNDS, "group_size={name: sequential, probe: 2}"),
    "reinforce-ada": (*ROUNDS, *HARD),
    "reinforce-ada-balanced": (*ROUNDS, "group_size={name: sequential, probe: 4, balanced: true}"),
    "knapsack": (*ROUNDS, *KNAPSACK),
    "greso-small": (*GRESO, *SMALL),
    "greso-probe": (*GRESO, *PROBE),
    "greso-reuse-4": (*GRESO, *REUSE),
    "greso-reuse-4-clip": (*GRESO, *REUSE, *CLIP),
    "greso-reuse-4-probe": (*GRESO, *REUSE, *CLIP, *PROBE),
    "bayes-reuse-4": (*BAYES, *REUSE),
    "bayes-reuse-4-clip": (*BAYES, *REUSE, *CLIP),
    "bayes-reuse-4-probe": (*BAYES, *REUSE, *CLIP, *PROBE),
    "thrifty": (*BAYES, *SMALL),
    "thrifty-4": (*BAYES, "prompts_per_step=4"),
    "thrifty-knapsack": (*BAYES, *SMALL, *KNAPSACK),
    "oracle": (*ORACLE, *SMALL),
}
"""Arm -> what it changes in the task's recipe, which refills groups without signal exactly."""
STEPS = {REUSE[0]: 10 / 3, SMALL[0]: 4, MEDIUM[0]: 8 / 3, "prompts_per_step=4": 8}
"""Change -> how many times as many optimizer steps an arm with it has."""
LENGTHS = {"dapo-fixed-linear-half": 1 / 2}
"""Arm -> the factor by which its number of optimizer steps differs from that of others with its changes."""
DAPO_REFILL = (
    *("gates=[]", "filter=zero_variance", "num_generations=8", "prompts_per_step=32", "advantage=rloo"),
    *("policy_loss=plain", "loss_type=sequence_sum", "correction={name: truncate, low: 0.1003, high: 9.974}"),
)


@dataclass(frozen=True)
class Setting:
    """A recipe, what all arms change in it, and the unit of its learning rates."""

    recipe: str
    changes: tuple[str, ...]
    rate: float
    steps: int
    """Of an arm without a change in `STEPS`."""
    eval_steps: int
    """The same."""
    start: Start | None = None


TASKS = {
    "countdown": Setting(
        "countdown-dapo", ("env.train_size=4096",), 1e-4, 300, 25, Start("countdown-uniform", {"max_steps": 270})
    ),
    "chain": Setting(
        "chain-sum-arrol",
        (*DAPO_REFILL, "eval_prompts=256", "eval_generations=4"),
        1e-4,
        60,
        5,
        Start("chain-sum-arrol", {"max_steps": 900, "batch_size": 32}, "warm-chain-sum", shared=True),
    ),
    "alfworld": Setting(
        "alfworld",
        (*DAPO_REFILL, "eval_generations=4"),
        1e-4,
        30,
        3,
        Start("alfworld", ROOMS.settings, "warm-alfworld", shared=True),
    ),
    "smollm2": Setting(
        "arithmetic-smollm2",
        (*DAPO_REFILL, "model=smollm2-135m", "threads=1", "eval_prompts=256", "eval_generations=2"),
        1e-5,
        30,
        3,
    ),
}
PAID = ("generate", "update", "reuse")
"""Parts of a step whose seconds count; evaluations and checkpoints do not."""
BASE = "dapo-fixed"
BASES = (BASE, "dapo-fixed-linear", "dapo")
COMPARED = ("thrifty", "dapo", "dapo-fixed-linear", "all")
PEERS = (
    *("pilot-commit", "speed-rl", "backoff", "knapsack", "mopps", "reinforce-ada", "reinforce-ada-balanced"),
    "thrifty",
)
"""Other papers' rules, and what they are compared with."""


def name_of(arm: str, rate: float, task: str = "countdown") -> str:
    return f"{arm}-lr{rate}" if task == "countdown" else f"{task}-{arm}-lr{rate}"


def summary(run: Run, decoded: bool = False) -> Summary:
    """`decoded`: count the tokens that the engine decoded, in place of all that were sampled."""
    passed = [p.passed for p in run.data.curve]
    accepted = {0: 0.0} | {
        int(r["step"]): r["num_tokens"] - r["num_decoded_tokens"] if decoded else 0.0 for r in run.rows
    }
    judged_N = np.array([row.get("groups/judged", 0.0) for row in run.rows])
    mixed_N = judged_N * (1 - np.array([row.get("frac_reward_zero_std", 1.0) for row in run.rows]))
    paid_N = np.diff([row["num_decoded_tokens" if decoded else "num_tokens"] for row in run.rows], prepend=0.0)
    tenths = np.array_split(np.arange(len(run.rows)), 10)
    seconds = np.cumsum([sum(row.get(f"seconds/{part}", 0.0) for part in PAID) for row in run.rows])
    at = {0: 0.0} | {int(row["step"]): second for row, second in zip(run.rows, seconds.tolist(), strict=True)}
    return {
        "seed": run.seed,
        "pass@1": passed[-1],
        "best": max(passed),
        "mean_pass@1": float(np.mean(passed[1:])),
        "tokens": run.data.tokens - max(accepted.values()),
        "accepted": max(accepted.values()),
        "mixed": round(float(mixed_N.sum() / max(1, judged_N.sum())), 4),
        "mixed_per_1000": [round(1000 * float(mixed_N[t].sum() / max(1, paid_N[t].sum())), 3) for t in tenths],
        "seconds": seconds[-1].item(),
        "sampled_at": [point.tokens for point in run.data.curve],
        "seconds_at": [round(at[point.step], 1) for point in run.data.curve],
        "deployed": run.deployed,
        "curve": [[step, tokens - accepted[int(step)], *rest] for step, tokens, *rest in run.curve],
    }


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Said:
    """All sampled tokens count, as in an engine that decodes each."""
    new = {arm: [summary(run) for run in found] for arm, found in runs.items()}
    return said | {"runs": t.merged(said.get("runs", {}), new, list(FAMILY.by_name()))}


Cell = Callable[[list[Summary], list[Summary]], str]
Curve = list[list[float]]
"""Step, decoded tokens, rollouts and held-out pass@1 of each evaluation."""


class Task:
    """The runs of one task, and the tuned base that they are compared with.

    `smooth`: average curves over the tokens between two evaluations of the base, as `smoothed` does. Without that an
    arm with more evaluations a token than the base has would reach a level earlier by chance.
    """

    def __init__(
        self,
        name: str,
        runs: Figures,
        base: str = BASE,
        *,
        smooth: bool = True,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        self.name, self.runs, self.smooth = name, runs, smooth
        self.rates = rates or {arm: rate for arm in METHODS if (rate := self.best_rate(arm)) is not None}
        """The rate of each arm with the highest mean pass@1 over the tokens of its cheapest run, by the tuning seed.

        Only the rates that were run with the most seeds count. An arm that was run at one rate alone keeps it.
        """
        self.base_arm = base
        self.base_runs = self.of(base, self.rates[base]) if base in self.rates else []
        self.base = {run["seed"]: run for run in self.base_runs}

    def of(self, arm: str, rate: float) -> list[Summary]:
        return self.runs.get(name_of(arm, rate, self.name), [])

    def best_rate(self, arm: str) -> float | None:
        curves = {rate: run["curve"] for rate in RATES for run in self.of(arm, rate) if run["seed"] == TUNING[0]}
        if not curves:
            run_at = [rate for rate in RATES if self.of(arm, rate)]
            return run_at[0] if len(run_at) == 1 else None
        tokens = np.linspace(0, min(curve[-1][1] for curve in curves.values()), 200)
        runs = {rate: len(self.of(arm, rate)) for rate in curves}
        most = [rate for rate in curves if runs[rate] == max(runs.values())]
        return max(most, key=lambda rate: np.mean([at_tokens(curves[rate], t) for t in tokens]))

    def pairs(self, found: list[Summary], axis: str = "tokens") -> list[tuple[Curve, Curve]]:
        """Curves of runs, and the base's of their seed. `axis`: what is paid, `tokens` or `seconds`."""
        paired = []
        for run in found:
            other = self.base.get(run["seed"])
            curve, base = (curve_of(each, axis) if each else None for each in (run, other))
            if curve and base:
                if self.smooth and other is not run:
                    curve = smoothed(curve, base[-1][1] / (len(base) - 1) / 2)
                paired.append((curve, base))
        return paired

    def ahead(self, found: list[Summary], _: list[Summary], axis: str = "tokens") -> str:
        passed = []
        for curve, base in self.pairs(found, axis):
            tokens = min(curve[-1][1], base[-1][1])
            passed.append((at_tokens(curve, tokens), at_tokens(base, tokens)))
        return t.text(t.paired_estimate(passed, False), "{:+.3f}")

    def to(self, level: Callable[[Curve, Curve], float], missing: str = "", axis: str = "tokens") -> Cell:
        """Cost to a level of pass@1, given the arm's curve and the base's, as a share of the base's."""

        def cell(found: list[Summary], _: list[Summary]) -> str:
            pairs = self.pairs(found, axis)
            costs = [tuple(t.cost_to(curve, level(*pair), "tokens") for curve in pair) for pair in pairs]
            there = [(own, base) for own, base in costs if own and base]
            missed = len(pairs) - len(there)
            return t.text(t.paired_estimate(there, True), t.TWO) + (
                f"; {missed} of {len(pairs)} did not get there{missing}" if missed else ""
            )

        return cell

    def to_base(self, part: float, axis: str = "tokens") -> Cell:
        return self.to(lambda _, base: part * base[-1][3], axis=axis)

    def columns(self) -> list[Column]:
        return [*self.outcomes(), *self.to_levels()]

    def outcomes(self) -> list[Column]:
        return [
            SEEDS,
            t.mean("final pass@1", "pass@1"),
            t.mean("best on the way", "best"),
            t.mean("final pass@8", "deployed.pass@8"),
            t.mean("tokens", "tokens", "{:.2f}M", 1e-6),
            t.share("mixed groups", "mixed"),
        ]

    def to_levels(self) -> list[Column]:
        return [
            Column("pass@1 at equal tokens, less DAPO's", self.ahead),
            Column("tokens to DAPO's final pass@1", self.to_base(1.0)),
            Column("to 95% of it", self.to_base(0.95)),
            Column("to 90% of it", self.to_base(0.9)),
            Column("tokens to its own final pass@1", self.to(lambda own, _: own[-1][3], " with DAPO")),
        ]

    def paired_columns(self) -> list[Column]:
        return [
            SEEDS,
            t.ratio("decoded tokens", "tokens"),
            t.difference("final pass@1", "pass@1"),
            t.difference("over 8 answers", "deployed.pass@1"),
            t.difference("final pass@8", "deployed.pass@8"),
            Column("pass@1 at equal tokens", self.ahead),
            Column("tokens to its final pass@1", self.to_base(1.0)),
            Column("to 95% of it", self.to_base(0.95)),
        ]


def curve_of(run: Summary, axis: str) -> Curve | None:
    """The run's curve, with `seconds` or `sampled` tokens in the place of what counts; None where not recorded."""
    if axis == "tokens":
        return run["curve"]
    if f"{axis}_at" not in run:
        return None
    return [[p[0], cost, *p[2:]] for p, cost in zip(run["curve"], run[f"{axis}_at"], strict=True)]


def at_tokens(curve: Curve, tokens: float) -> float:
    """Held-out pass@1 after so many tokens, between evaluations by a straight line."""
    return float(np.interp(tokens, [point[1] for point in curve], [point[3] for point in curve]))


def smoothed(curve: Curve, half: float) -> Curve:
    """The mean of all evaluations within so many tokens before and after; the first one is kept."""
    tokens, passed = np.array([point[1] for point in curve]), np.array([point[3] for point in curve])
    near = np.abs(tokens[:, None] - tokens) <= half
    means = (near * passed).sum(1) / near.sum(1)
    means[0] = passed[0]
    return [[*point[:3], float(mean), *point[4:]] for point, mean in zip(curve, means, strict=True)]


def tables(said: Said) -> dict[str, str]:
    """For each task that was run: every rate on the tuning seed, and the best ones on the seeds that count."""
    made = {}
    for name in TASKS:
        task = Task(name, said["runs"])
        every = {name_of(arm, rate, name): task.of(arm, rate) for arm in METHODS for rate in RATES}
        best = {name_of(arm, rate, name): task.of(arm, rate) for arm, rate in task.rates.items()}
        tuning = {arm: [run for run in found if run["seed"] in TUNING] for arm, found in every.items()}
        counted = {arm: [run for run in found if run["seed"] not in TUNING] for arm, found in best.items()}
        for table, rows in ((f"rates-{name}", tuning), (f"thrifty-{name}", counted)):
            if shown := {arm: found for arm, found in rows.items() if found}:
                made[table] = t.table_of(shown, task.columns())
    made["thrifty-against"] = against(said["runs"], COMPARED, BASES, list(TASKS))
    return made | {"thrifty-peers": against(said["runs"], PEERS, BASES, ["countdown"])}


def against(runs: Figures, arms: Sequence[str], bases: Sequence[str], tasks: Sequence[str]) -> str:
    """Arms and the bases that they are paired with, by seed; ratios and differences to the base."""
    return paired([Task(task, runs, base) for task in tasks for base in bases], arms)


def paired(
    tasks: Sequence[Task], arms: Sequence[str], columns_of: Callable[[Task], list[Column]] = Task.paired_columns
) -> str:
    """Each arm and the task's base."""
    rows = []
    for task in tasks:
        columns = columns_of(task)
        for arm in arms if task.base else ():
            found = task.of(arm, task.rates[arm]) if arm != task.base_arm and arm in task.rates else []
            if found := [run for run in found if run["seed"] not in TUNING and run["seed"] in task.base]:
                names = [name_of(name, task.rates[name], task.name) for name in (arm, task.base_arm)]
                rows.append([*names, *(column.cell(found, task.base_runs) for column in columns)])
    return t.markdown(["arm", "compared with", *(column.head for column in columns)], rows)


SHOWN: tuple[tuple[str, float, str], ...] = (
    *((arm, 2, "countdown") for arm in (BASE, "dapo", "greso")),
    ("thrifty", 1, "countdown"),
    *((arm, 2, "chain") for arm in ("dapo", "dapo-fixed-linear")),
    *((arm, 1, "chain") for arm in (BASE, "thrifty")),
)
"""Arms at their best rates."""


def arms(methods: Mapping[str, tuple[str, ...]], lengths: Mapping[str, float]) -> Iterator[Arm]:
    for task, each in TASKS.items():
        for arm, changes in methods.items():
            more = lengths.get(arm, 1) * math.prod(STEPS.get(change, 1) for change in changes)
            for rate in RATES:
                settings = (
                    f"learning_rate={rate * each.rate:g}",
                    f"max_steps={round(each.steps * more)}",
                    f"eval_steps={round(each.eval_steps * more)}",
                )
                yield Arm(name_of(arm, rate, task), each.recipe, (*each.changes, *changes, *settings), each.start)


FAMILY = Family(
    work="thrifty",
    arms=tuple(arms(METHODS, LENGTHS)),
    default=tuple(name_of(*arm) for arm in SHOWN),
    collect=collect,
    tables=tables,
    may_stop=True,
    jobs=1,
)
