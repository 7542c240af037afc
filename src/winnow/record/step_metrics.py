"""Count one training step as groups finish, and turn the counts into metrics under TRL's names."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Self

import numpy as np

from ..base.state import Count, State
from ..methods.agents import rewarded_agents, unrewarded_tokens
from ..methods.group_kind import GroupJudge
from ..types import LIMITS, Fate, Group, GroupKind, sum_known
from .failures import Failures

ZERO = "frac_reward_zero_std"
UNREWARDED, ABANDONED = "unrewarded", "abandoned"
"""Tokens of trained rollouts sampled as agents without a reward (`tokens/unrewarded`, not `tokens/trained`), and those
of answers that an agent had given up, which are under no fate."""


class Tally:
    """Counts of every group that finished during a step, whatever its fate."""

    def __init__(self, judge: GroupJudge) -> None:
        self.judge = judge
        self.groups = 0
        self.sizes: list[int] = []
        self.rewards: list[float] = []
        """Rewards of all groups, one group after another."""
        self.reward_counts: list[int] = []
        """Number of rewards of each group that has some."""
        self.rewarded_sizes: list[int] = []
        """Sizes of those groups."""
        self.by_function: defaultdict[str, list[float]] = defaultdict(list)
        self.kinds: Counter[GroupKind] = Counter()
        self.forced: Counter[GroupKind] = Counter()
        """Those of groups that an audit forced."""
        self.lengths: list[int] = []
        self.distinct: list[float] = []
        """Share of distinct completions in each group with at least two finished ones."""
        self.rollouts = 0
        self.sampled_tokens = 0
        """This and `rollouts` include greedy baselines, which other figures leave out."""
        self.decoded_tokens = 0
        """Sampled tokens that took a decoding step of their own."""
        self.computed_tokens: int | None = 0
        """Positions that went through the model to sample them; None: an engine does not count them."""
        self.drawn_tokens, self.drawn_nats = 0, 0.0
        """Sampled tokens without greedy baselines, and minus the sum of their log-probabilities."""
        self.truncated: Counter[str] = Counter()
        """Rollouts that a limit cut, by its key."""
        self.failed = Failures()
        self.refused: Counter[str] = Counter()
        """Groups with missing rewards, by reason."""
        self.turns: list[int] = []
        """Number of turns of each rollout."""
        self.truncated_turns = 0
        self.abandoned_turns = 0
        self.segments: list[int] = []
        """Number of segments of each rollout."""
        self.barrier_wait_s = 0.0
        self.tokens: Counter[str] = Counter()
        self._started = time.monotonic()

    def finished(self, group: Group) -> None:
        """Count a group that returned from the runner."""
        siblings = group.siblings
        self.groups += 1
        self.sizes.append(len(siblings))
        rewards = group.known_rewards()
        if rewards:
            self.rewards += rewards
            self.reward_counts.append(len(rewards))
            self.rewarded_sizes.append(len(siblings))
        kind = self.judge.kind(group)
        self.kinds[kind] += 1
        self.forced[kind] += group.visit.verdict.override_probability is not None
        if len(rewards) > 1:
            distinct = {rollout.token_ids.tobytes() for rollout in siblings if rollout.reward is not None}
            self.distinct.append(len(distinct) / len(rewards))
        for rollout in group.rollouts:
            logp = rollout.sampler_logp[rollout.action_mask]
            tokens = len(logp)
            sampled = tokens + rollout.abandoned_tokens
            self.rollouts += 1
            self.sampled_tokens += sampled
            self.decoded_tokens += sampled - rollout.num_reused_tokens
            self.computed_tokens = sum_known(self.computed_tokens, rollout.num_computed_tokens)
            self.barrier_wait_s += rollout.barrier_wait_s
            if rollout.fate == Fate.FAILED:
                self.failed.add(rollout.reason, group.prompt.id)
            if rollout.greedy:
                continue
            self.lengths.append(tokens)
            self.drawn_tokens += tokens
            self.drawn_nats -= float(np.add.reduce(logp, dtype=np.float64))
            if rollout.truncated:
                self.truncated[LIMITS[rollout.stop_reason]] += 1
            self.turns.append(len(rollout.turns))
            for turn in rollout.turns:
                self.truncated_turns += turn.stop_reason == "length"
                self.abandoned_turns += turn.abandoned
            self.segments.append(1 + len(rollout.later_segments))
            for name, value in rollout.rewards.items():
                if value is not None:
                    self.by_function[name].append(value)

    def fated(self, group: Group) -> None:
        """Count the tokens of a group by fate."""
        names = rewarded_agents(group)
        for rollout in group.rollouts:
            assert rollout.fate is not None
            unrewarded = unrewarded_tokens(rollout, names) if rollout.fate == Fate.TRAINED else 0
            self.tokens[rollout.fate] += int(np.count_nonzero(rollout.action_mask)) - unrewarded
            if unrewarded:
                self.tokens[UNREWARDED] += unrewarded
            if abandoned := rollout.abandoned_tokens:
                self.tokens[ABANDONED] += abandoned

    @property
    def judged(self) -> int:
        """Number of groups known to teach or not, including groups cut on evidence."""
        return self.groups - self.kinds[GroupKind.NOT_JUDGED]

    def zero_share(self) -> float | None:
        """Return the share of zero-variance groups among the judged ones; None without any."""
        return _zero_share(self.kinds)

    def without_forced(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return a step's metrics with the zero-variance share of the groups that no audit forced."""
        share = _zero_share(self.kinds - self.forced)
        rest = {name: value for name, value in metrics.items() if name != ZERO}
        return rest if share is None else rest | {ZERO: share}

    def failed_share(self) -> float:
        return self.failed.counts.total() / max(self.rollouts, 1)

    def metrics(self) -> dict[str, float]:
        step_time = time.monotonic() - self._started
        metrics = {
            "groups/rolled_out": float(self.groups),
            "groups/judged": float(self.judged),
            "rollouts/sampled": float(self.rollouts),
            "step_time": step_time,
            "tokens_per_second": self.sampled_tokens / max(step_time, 1e-9),
        }
        if self.groups:  # asynchronous samplers may have finished none
            metrics |= self._of_groups() | self._of_kinds()
        if any(n > 1 for n in self.turns):
            metrics["turns/mean"] = sum(self.turns) / len(self.turns)
            metrics["turns/clipped_ratio"] = self.truncated_turns / sum(self.turns)
        if self.abandoned_turns:
            metrics["turns/abandoned"] = float(self.abandoned_turns)
        if any(n > 1 for n in self.segments):
            metrics["segments/mean"] = float(np.mean(self.segments))
        if self.barrier_wait_s:
            metrics["barrier_wait_s"] = self.barrier_wait_s
        if 0 < self.drawn_nats < np.inf:  # some engines give no log-probabilities, which are then 0 or NaN
            # -log p of a sampled token is an unbiased estimate of the entropy; an update has the exact one of its rows
            metrics["entropy"] = metrics["sampling/entropy"] = self.drawn_nats / self.drawn_tokens
        if self.distinct:
            metrics["completions/distinct"] = float(np.mean(self.distinct))
        if self.rewards:
            means, stds = self._means_and_stds()
            # By size: a mean over groups is biased where the first rewards decide how large a group becomes.
            metrics["reward"] = float(np.average(means, weights=self.rewarded_sizes))
            metrics["reward_std"] = float(np.mean(stds))
        for name, values in sorted(self.by_function.items()):
            metrics |= {f"rewards/{name}/mean": float(np.mean(values)), f"rewards/{name}/std": float(np.std(values))}
        return metrics | {f"tokens/{fate}": float(count) for fate, count in sorted(self.tokens.items())}

    def _means_and_stds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of the rewards of each group that has some."""
        rewards, counts = np.array(self.rewards, dtype=np.float64), np.array(self.reward_counts)
        starts = np.cumsum(counts) - counts
        means = np.add.reduceat(rewards, starts) / counts
        squares = (rewards - np.repeat(means, counts)) ** 2
        return means, np.sqrt(np.add.reduceat(squares, starts) / counts)

    def _of_groups(self) -> dict[str, float]:
        return {
            "groups/size_mean": sum(self.sizes) / len(self.sizes),
            "completions/mean_length": sum(self.lengths) / max(len(self.lengths), 1),
            "completions/max_length": float(max(self.lengths, default=0)),
            "completions/clipped_ratio": self.truncated.total() / max(len(self.lengths), 1),
            **{f"truncated/{key}": count / len(self.lengths) for key, count in sorted(self.truncated.items())},
            "rollouts/failed_share": self.failed_share(),
        }

    def _of_kinds(self) -> dict[str, float]:
        """Return shares of the judged groups; empty without any. `frac_zero_unknown`: it is not known which."""
        share = self.zero_share()
        if share is None:
            return {}
        kinds = [GroupKind.EASY, GroupKind.HARD, *([GroupKind.UNKNOWN] if self.kinds[GroupKind.UNKNOWN] else [])]
        return {ZERO: share} | {f"frac_zero_{kind}": self.kinds[kind] / self.judged for kind in kinds}


class TokenTotals(State):
    """Tokens of a run's finished training groups; the fields are metrics, and keys of a checkpoint."""

    num_tokens: Count
    """Sampled."""
    num_decoded_tokens: Count
    """Sampled, but neither accepted from a draft nor decoded together with a sibling's."""
    num_computed_tokens: Count | None = None  # earlier versions did not count them
    """Positions that went through the model to sample them: decoded, prefilled, read as a draft. None: unknown."""
    num_teacher_tokens: Count = 0
    """Read by a teacher."""

    def plus(self, **counts: int | None) -> Self:
        """Return the totals with more of these counts."""
        return self.model_copy(update={name: sum_known(getattr(self, name), n) for name, n in counts.items()})

    def with_step(self, tally: Tally) -> Self:
        """Return the totals with what a step sampled."""
        decoded, computed = tally.decoded_tokens, tally.computed_tokens
        return self.plus(num_tokens=tally.sampled_tokens, num_decoded_tokens=decoded, num_computed_tokens=computed)

    def metrics(self) -> dict[str, float]:
        """Return the known ones. Decoded tokens alone would count a draft that was read as free."""
        counts = self.model_dump()
        unknown = ["num_decoded_tokens", "num_computed_tokens"] if self.num_computed_tokens is None else []
        unused = [] if self.num_teacher_tokens else ["num_teacher_tokens"]
        return {name: count for name, count in counts.items() if name not in (*unknown, *unused)}


def _zero_share(kinds: Counter[GroupKind]) -> float | None:
    judged = kinds.total() - kinds[GroupKind.NOT_JUDGED]
    return sum(count for kind, count in kinds.items() if kind.zero_variance) / judged if judged else None
