"""Tiers 1 and 2 of the mid-trajectory gate: the same rollouts with and without it, and updates over a fixed buffer."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from winnow.config import RunConfig, method
from winnow.env.base import Task
from winnow.env.rewards.rewarder import Rewarder
from winnow.learner.step import OptimizerStep
from winnow.methods.correct import STEP_SCALES
from winnow.methods.gate import GATES, Gate, GateContext
from winnow.methods.gate.audit import rules_of
from winnow.methods.gate.divergence import Divergence
from winnow.methods.group_kind import is_zero_variance
from winnow.rollout.evaluate import run_jobs
from winnow.rollout.runner import RolloutRunner
from winnow.run.build import build_learner, build_loss, build_policy, build_task, rollout_options, step_options
from winnow.study.gate_calibration import RESAMPLES
from winnow.types import Group, Job, Rollout, Turn, Visit

BUFFER_EPOCHS = 1_000_000
"""Epochs of recorded groups are counted from here: keeps their noise apart from that of training."""
STEPS, GROUPS_A_STEP = 20, 4
"""Of tier 2, as in the paper."""


class Arena:
    """A policy and what it plays, for rollouts without updates."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        c = config
        self.config, self.task = config, task
        if isinstance(c.threads, int):
            torch.set_num_threads(c.threads)
        policy, engine = build_policy(c, None, None, None)
        assert engine is not None
        self.rewarder = Rewarder(c.reward_funcs or task.reward_funcs, c.reward_weights, c.reward_timeout_s)
        self.runner = RolloutRunner(engine, task, policy.tokenizer, self.rewarder, rollout_options(c))

    def groups(self, n: int, gates: Mapping[str, Gate] | None = None, *, epoch: int = 0) -> tuple[list[Group], float]:
        """Groups of `n` training prompts, and the seconds it took. Equal epochs have equal noise."""
        self.runner.set_rules(rules_of(gates or {}))
        prompts = random.Random(0).sample(list(self.task.train), n)  # the first ones are known from the warm start
        started = time.perf_counter()
        visits = [Visit(i, BUFFER_EPOCHS + epoch, prompt) for i, prompt in enumerate(prompts)]
        found = run_jobs(self.runner, [Job(visit, self.config.num_generations) for visit in visits])
        return found, time.perf_counter() - started

    def close(self) -> None:
        self.rewarder.close()


def recorded(config: RunConfig, n: int, epochs: int) -> list[Group]:
    """Groups that ran to their end, to calibrate a gate on."""
    task = build_task(config.env)
    with closing(Arena(config, task)) as arena:
        return [g for epoch in range(epochs) for g in arena.groups(n, epoch=100 + epoch)[0]]


def by_progress(groups: Sequence[Group], steps: Sequence[int], limits: Sequence[float]) -> list[dict[str, Any]]:
    """What stopping groups would have done in which nobody's progress is beyond a limit at step k."""
    zero = np.array([_zero_variance(g) for g in groups])
    total = sum(_steps(g) for g in groups)
    rows = []
    for k in steps:
        best = np.array([max(_progress(r, k) for r in g.siblings) for g in groups])
        left = np.array([sum(max(0, len(_taken(r)) - k) for r in g.siblings) for g in groups])
        for limit in limits:
            cut = (best <= limit) & (left > 0)
            counts = {
                "cut": int(cut.sum()),
                "tp": int((cut & zero).sum()),
                "can_be_cut": int((left > 0).sum()),
                "measured_pct": 100 * left[cut].sum() / total,
            }
            rows.append({"k": k, "progress": limit, **counts, "precision": counts["tp"] / max(counts["cut"], 1)})
    return rows


def tier_1_and_2(config: RunConfig, gates: dict[str, dict[str, Any]], n: int, repeats: int) -> dict[str, Any]:
    """Both tiers on `n` prompts, for each gate; the un-gated groups of tier 1 are the buffer of tier 2."""
    task = build_task(config.env)
    seconds: dict[str, list[float]] = {name: [] for name in ("", *gates)}
    arms: dict[str, list[Group]] = {}
    with closing(Arena(config, task)) as arena:
        arena.groups(min(n, 8), epoch=99)  # processes and games are loaded
        for repeat in range(repeats):
            for name in list(seconds)[:: -1 if repeat % 2 else 1]:
                context = GateContext(name, config.seed)
                gate = {name: method(GATES, gates[name], "gates").build(context)} if name else {}
                arms[name], took = arena.groups(n, gate)
                seconds[name].append(took)
    found: dict[str, Any] = {}
    for name, gate in gates.items():
        options = Divergence(**{k: v for k, v in gate.items() if k != "name"})
        pairs = list(zip(seconds[""], seconds[name], strict=True))
        found[name] = {
            "tier1": tier_1(arms[""], arms[name], pairs, options),
            "tier2": tier_2(config, arms[""], [g.verdict.keep for g in arms[name]]),
        }
    return found


def tier_1(
    base: Sequence[Group], gated: Sequence[Group], seconds: Sequence[tuple[float, float]], gate: Divergence
) -> dict[str, Any]:
    """What the gate saves and gets wrong, `base` being the truth. Intervals: 95%, prompts resampled."""
    cut = np.array([not g.verdict.keep for g in gated])
    zero = np.array([_zero_variance(g) for g in base])
    tokens = np.array([[_tokens(g) for g in groups] for groups in (base, gated)], float)
    steps = np.array([[_steps(g) for g in groups] for groups in (base, gated)], float)
    first = max(gate.plan())
    before = [[_actions(r, first) for g in groups for r in g.siblings] for groups in (base, gated)]
    pairs = [(a, b) for x, y in zip(*before, strict=True) for a, b in zip(x, y, strict=True)]
    ratios = [1 - with_gate / without for without, with_gate in seconds]
    stopped = np.array([_tokens(g, first) for g in base], float)
    left = np.array([any(len(_taken(r)) > first for r in g.siblings) for g in base])
    return {
        "groups": len(base),
        "cut": int(cut.sum()),
        "right": int((cut & zero).sum()),
        "zero_variance": int(zero.sum()),
        "same_actions": sum(a == b for a, b in pairs) / len(pairs),
        "seconds_saved": {"median": float(np.median(ratios)), "min": min(ratios), "max": max(ratios)},
        "tokens_saved": _saved(tokens),
        "steps_saved": _saved(steps),
        "random_saved": _saved(np.stack([tokens[0], tokens[0] - cut.sum() / left.sum() * (tokens[0] - stopped)])),
        "oracle_saved": _saved(np.stack([tokens[0], np.where(zero, stopped, tokens[0])])),
        "barrier_wait_s": float(np.mean([r.barrier_wait_s for g in gated for r in g.siblings])),
    }


def _saved(cost: np.ndarray) -> dict[str, float]:
    """Share of the cost ([2, N], without and with) that the gate saves."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, cost.shape[1], (RESAMPLES, cost.shape[1]))
    without, with_ = cost[0][picks].sum(1), cost[1][picks].sum(1)
    low, high = np.quantile(1 - with_ / without, [0.025, 0.975])
    return {"share": float(1 - cost[1].sum() / cost[0].sum()), "low": float(low), "high": float(high)}


def tier_2(config: RunConfig, buffer: Sequence[Group], keep: Sequence[bool]) -> dict[str, Any]:
    """`STEPS` updates from the same weights on the same draws, with all groups and without those that are cut."""
    rng = random.Random(config.seed)
    draws = [rng.sample(range(len(buffer)), GROUPS_A_STEP) for _ in range(STEPS)]
    draws = [draw for draw in draws if any(keep[i] for i in draw)]
    arms = {}
    for name, wanted in (("base", [True] * len(buffer)), ("gated", keep)):
        step = _optimizer_step(config)
        batches = [[buffer[i] for i in draw if wanted[i]] for draw in draws]
        started = time.perf_counter()
        norms = [step(batch, i).get("grad_norm", 0.0) for i, batch in enumerate(batches)]
        zero = [np.mean([_zero_variance(g) for g in batch]) for batch in batches]
        arms[name] = {
            "seconds": time.perf_counter() - started,
            "grad_norm": float(np.mean(norms)),
            "zero_share": float(np.mean(zero)),
            "groups": sum(map(len, batches)),
            "norms": norms,
        }
    base, gated = arms["base"], arms["gated"]
    return {
        "steps": len(draws),
        "arms": arms,
        "seconds_saved": 1 - gated["seconds"] / base["seconds"],
        "norm_ratio": gated["grad_norm"] / base["grad_norm"],
        "predicted_ratio": (1 - gated["zero_share"]) / (1 - base["zero_share"]),
    }


def _optimizer_step(config: RunConfig) -> OptimizerStep:
    """From the weights of `config.model`."""
    from winnow.methods.advantage import ADVANTAGES

    policy, _ = build_policy(config, None, None, None)
    options = step_options(config)
    advantage = method(ADVANTAGES, config.advantage, "advantage")
    scale = method(STEP_SCALES, config.step_scale, "step_scale").build()
    return OptimizerStep(build_learner(policy, config), advantage, build_loss(config), scale, options)


def _zero_variance(group: Group) -> bool:
    return bool(is_zero_variance(group.rewards()))


def _tokens(group: Group, turns: int | None = None) -> int:
    """Sampled tokens, of the first turns alone if told."""
    return sum(turn.stop - turn.start for r in group.siblings for turn in r.turns[:turns])


def _steps(group: Group) -> int:
    return sum(len(_taken(r)) for r in group.siblings)


def _actions(rollout: Rollout, k: int) -> list[str | None]:
    return [turn.canonical for turn in _taken(rollout)[:k]]


def _progress(rollout: Rollout, k: int) -> float:
    """As its environment put it after step k, or its last before."""
    return max((turn.progress or 0.0 for turn in _taken(rollout)[:k][-1:]), default=0.0)


def _taken(rollout: Rollout) -> list[Turn]:
    """Its environment steps."""
    return [turn for turn in rollout.turns if turn.taken]
