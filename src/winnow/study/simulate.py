"""`winnow simulate`: what selectors, sizes and filters would roll out, without a model.

The loop's own collector runs against made rewards: a rollout of prompt i is right with probability p_i. The rates come
from a pass-rate profile; each is drawn from its posterior, whose prior is a Beta distribution with the spread of all.
They rise together while the policy learns: logit p_i + ability, where ability grows with the groups that taught.

`reuse` is simulated as if every group kept its effective sample size, so that it is used as often as it may be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ConfigError
from ..base.machine import heap_frozen
from ..base.noise import noise_key, uniform_array
from ..collect import Batch
from ..config import RunConfig
from ..methods.pass_rates import PassRate, read_profile
from ..record.account import Counts
from ..reuse import Reuse
from ..run.build_methods import build_collector, build_methods
from ..run.inputs import build_task
from ..run.preflight import in_steps
from ..run.resolved import Options
from ..sampler.base import JobQueue
from ..types import Fate, Group, Job, Prompt, Rollout

SIMULATE_STREAM = 10
LARGEST_GROUP = 1 << 20
"""Draws that the noise reserves for each visit."""
MOST_GROWTH = 1000.0
"""Where the search for a growth gives up."""
EDGE = 1e-6
"""Rates are kept so far from 0 and 1, for their logits."""


@dataclass
class Policy:
    """A policy by what it solves."""

    logit_N: np.ndarray
    """Of each prompt's rate at the start."""
    ability: float = 0.0

    def rates(self) -> np.ndarray:
        """Return the probability that a rollout of each prompt is right, float64 [N]."""
        return 1.0 / (1.0 + np.exp(-(self.logit_N + self.ability)))


def policy_of(prompts: Sequence[Prompt], profile: Mapping[str, PassRate], seed: int) -> Policy:
    """Return a policy whose rates are draws from the posteriors of a profile.

    Prompts that the profile lacks get draws for random ones of it. Raises ConfigError when it has none of them, or a
    single rollout of each.
    """
    known = [profile[prompt.id] for prompt in prompts if prompt.id in profile]
    if not known:
        raise ConfigError("rates: the profile has none of the task's training prompts; make one of the same env")
    draws = np.random.default_rng(seed)
    shape = _beta([rate.rate for rate in known], [rate.n for rate in known])
    of_each = [profile.get(prompt.id) or known[draws.integers(len(known))] for prompt in prompts]
    right, wrong = np.array([[rate.correct, rate.n - rate.correct] for rate in of_each], dtype=np.float64).T
    rate_N = np.clip(draws.beta(right + shape[0], wrong + shape[1]), EDGE, 1 - EDGE)
    return Policy(np.log(rate_N / (1 - rate_N)))


def _beta(rates: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """Return a and b of the Beta distribution of the true rates, by moments.

    The rate of n rollouts has the variance V + (m (1 - m) - V) / n, for true rates of mean m and variance V. Raises
    ConfigError where every prompt has a single rollout, which leaves V unknown.
    """
    mean = float(np.clip(np.mean(rates), 0.01, 0.99))
    noise = float(np.mean(1 / np.array(counts)))
    if noise == 1:
        raise ConfigError(
            "rates: one rollout of each prompt cannot tell how their rates differ; profile with -n 2 or more"
        )
    spread = max((float(np.var(rates)) - mean * (1 - mean) * noise) / (1 - noise), 1e-3 * mean * (1 - mean))
    strength = max(mean * (1 - mean) / spread - 1, 0.02)
    return mean * strength, (1 - mean) * strength


class Rewards(JobQueue):
    """Finishes every group at the next poll, with rewards of 0 and 1; a `GroupSource`."""

    def __init__(self, policy: Policy, length: int, seed: int) -> None:
        super().__init__()
        self.policy, self.version, self.rates_N = policy, 0, policy.rates()
        self._key = noise_key(seed, SIMULATE_STREAM)
        self._mask = np.ones(length, dtype=bool)
        self._ids, self._logp = np.zeros(length, np.int64), np.zeros(length, np.float32)

    def run(self, jobs: Sequence[Job]) -> list[Group]:
        numbers_J = np.array([job.visit.number for job in jobs])
        rates_J = self.rates_N[[job.visit.prompt.ordinal for job in jobs]]
        siblings_G = np.arange(max(job.first + job.size for job in jobs))
        draws_JG = uniform_array(self._key, np.add.outer(LARGEST_GROUP * numbers_J, siblings_G))
        rewards_JG = (draws_JG < rates_J[:, None]).astype(np.float64).tolist()
        versions = np.full(len(self._ids), self.version, np.int32)
        return [self._finished(job, rewards_G, versions) for job, rewards_G in zip(jobs, rewards_JG, strict=True)]

    def update(self, logits: float) -> None:
        """Add `logits` to the policy's ability and count one version."""
        self.policy.ability += logits
        self.version += 1
        self.rates_N = self.policy.rates()

    def _finished(self, job: Job, rewards_G: Sequence[float], versions: np.ndarray) -> Group:
        rollouts = []
        for sibling in range(job.first, job.first + job.size):
            reward = rewards_G[sibling]
            rollout = Rollout(sibling, (0,), self._ids, self._mask, self._logp, versions, stop_reason="eos")
            rollout.reward, rollout.rewards = reward, {"env": reward}
            rollouts.append(rollout)
        return Group(job.visit, rollouts)


@dataclass
class Simulation:
    """Steps of a configuration's own collector against simulated rewards.

    Raises ConfigError on settings that it cannot simulate: gates, and advantages that need more than rewards.
    """

    c: RunConfig
    prompts: Sequence[Prompt]
    source: Rewards
    growth: float = 0.0

    def __post_init__(self) -> None:
        c = self.c
        if c.gates:
            raise ConfigError(
                "gates: they decide by tokens and states of rollouts, of which a simulation has none; remove it"
            )
        self.options = Options.from_config(c)
        self.methods = m = build_methods(c, self.options, self.prompts)
        if m.advantage.greedy_baseline:
            raise ConfigError(
                f"advantage: {self.options.names['advantage'][0]} needs a greedy rollout a group, which has no pass "
                "rate; choose rloo"
            )
        if any(m.selector.wants_profile(step) for step in range(1, c.max_steps)):
            raise ConfigError("selector: it asks for new pass rates during the run, of which a simulation has none")
        self.counts = Counts()
        self.reuse: Reuse | None = None
        self.stopped = ""

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batch of each step before the policy learns from it."""
        c, m = self.c, self.methods
        if c.reuse is not None:
            self.reuse = Reuse(c.reuse, c.prompts_per_step, c.seed, m.judge, _unchanged, self.source.run)
        collector = build_collector(
            c,
            m,
            self.source,
            self.counts,
            {"train": self.prompts},
            asynchronous=self.options.asynchronous,
            reuse=self.reuse,
        )
        step = 0
        while step < c.max_steps and collector.stop is None:
            batch = collector.collect(step)
            if not batch.groups:
                break
            yield batch
            teaching = sum(m.judge.teaches(group) for group in batch.trained_on)
            collector.trained(step, batch, {"updated": float(teaching > 0)})
            collector.end_step(step, batch.trained_on, {})
            self.source.update(self.growth * teaching / 1000)
            step += 1
        self.stopped = str(collector.stop or "")
        collector.close(step, [])


def simulate(c: RunConfig, profile: Path, *, growth: float = 0.0, length: int = 1) -> dict[str, Any]:
    """Simulate the run of a configuration; return tokens by fate, signal, and the oracle's.

    `growth`: logits of ability for 1,000 groups with a signal. `length`: tokens of a rollout. Raises ConfigError as
    `Simulation` does.
    """
    task = build_task(c.env)
    c = in_steps(c, len(task.train))
    source = Rewards(policy_of(task.train, read_profile(profile), c.seed), length, c.seed)
    simulation = Simulation(c, task.train, source, growth)
    trained, oracle, started, step = 0.0, 0.0, time.perf_counter(), 0
    with heap_frozen():
        for batch in simulation:
            trained += sum(squares(group.known_rewards()) for group in batch.groups)
            oracle += _best_signal(source.rates_N, c.prompts_per_step, batch.groups)
            step += 1
    counts = simulation.counts
    tokens = counts.rollouts.total() * length
    per_token, best = trained / max(1, tokens), oracle / max(1, step) / length
    return {
        "steps": step,
        "stopped": simulation.stopped,
        "visits": counts.visits,
        "rollouts": counts.rollouts.total(),
        "tokens": tokens,
        "tokens_by_fate": {fate.value: counts.rollouts[fate] * length for fate in Fate if counts.rollouts[fate]},
        "signal_per_1000_tokens": 1000 * per_token,
        "oracle_per_1000_tokens": 1000 * best,
        "share_of_oracle": per_token / best if best else 0.0,
        "growth": growth,
        "mean_rate": float(source.rates_N.mean()),
        "seconds": round(time.perf_counter() - started, 2),
    }


def growth_to(c: RunConfig, profile: Path, goal: float) -> float:
    """Return the growth with which the mean pass rate ends at `goal`, by bisection. Raises ConfigError if none does."""

    def ends_at(growth: float) -> float:
        return float(simulate(c, profile, growth=growth)["mean_rate"])

    begins = ends_at(0.0)
    if not begins < goal < 1:
        raise ConfigError(f"ends-at: {goal} must be below 1 and above the mean rate at the start, {begins:.3f}")
    low, high = 0.0, 0.25
    while ends_at(high) < goal:
        low, high = high, 2 * high
        if high > MOST_GROWTH:
            raise ConfigError(f"ends-at: too few groups teach for a mean rate of {goal}; raise max_steps, or lower it")
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if ends_at(middle) < goal else (low, middle)
    return (low + high) / 2


def _best_signal(rates: np.ndarray, best: int, groups: Sequence[Group]) -> float:
    """Return squared deviations a rollout if groups of these sizes were of the `best` most promising prompts."""
    size = np.mean([len(group.rollouts) for group in groups])
    best = min(best, len(rates))
    spread = np.partition(rates * (1 - rates), -best)[-best:]
    return float(spread.mean() * (size - 1) / size)


def squares(rewards: Sequence[float]) -> float:
    """Return the sum of squared deviations of a group's rewards from their mean."""
    return float(np.var(rewards) * len(rewards)) if rewards else 0.0


def _unchanged(groups: Sequence[Group]) -> list[np.ndarray]:
    """Return log ratios of a policy that is still the one that sampled."""
    return [np.zeros(len(group.rollouts)) for group in groups]
