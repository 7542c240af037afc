"""Count one training step as groups finish, and turn the counts into metrics under TRL's names."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ..methods.group_kind import GroupJudge
from ..types import Fate, Group, GroupKind
from .failures import Failures


class Tally:
    """Counts of every group that finished during a step, whatever its fate, and the seconds of each phase."""

    def __init__(self, judge: GroupJudge) -> None:
        self.judge = judge
        self.groups = 0
        self.sizes: list[int] = []
        self.reward_sets: list[np.ndarray] = []
        self.rewarded_sizes: list[int] = []
        """Sizes of the groups in `reward_sets`."""
        self.by_function: dict[str, list[float]] = {}
        self.kinds: Counter[GroupKind] = Counter()
        self.lengths: list[int] = []
        self.distinct: list[float] = []
        """Share of distinct completions in each group with at least two finished ones."""
        self.rollouts = 0
        self.sampled_tokens = 0
        """This and `rollouts` include greedy baselines, which other figures leave out."""
        self.kept_tokens = 0
        """Sampled tokens that were read from drafts."""
        self.truncated = 0
        self.failed = Failures()
        self.refused: Counter[str] = Counter()
        """Groups with missing rewards, by reason."""
        self.turns: list[list[str]] = []
        """Stop reasons of the turns of each rollout."""
        self.segments: list[int] = []
        """Number of segments of each rollout."""
        self.barrier_wait_s = 0.0
        self.tokens: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall-clock time of the block to `seconds/<name>`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def finished(self, group: Group) -> None:
        """Count a group that returned from the runner."""
        self.groups += 1
        self.sizes.append(len(group.siblings))
        rewards_G = group.rewards()
        present = rewards_G[~np.isnan(rewards_G)]
        if len(present):
            self.reward_sets.append(present)
            self.rewarded_sizes.append(len(group.siblings))
        self.kinds[self.judge.kind(group)] += 1
        if len(present) > 1:
            ended = [rollout for rollout in group.siblings if rollout.reward is not None]
            self.distinct.append(len({rollout.token_ids.tobytes() for rollout in ended}) / len(ended))
        for rollout in group.rollouts:
            self.rollouts += 1
            self.sampled_tokens += int(np.count_nonzero(rollout.action_mask))
            self.kept_tokens += rollout.kept
            self.barrier_wait_s += rollout.barrier_wait_s
            if rollout.fate == Fate.FAILED:
                self.failed.add(rollout.reason, group.prompt.id)
        for rollout in group.siblings:
            self.lengths.append(int(np.count_nonzero(rollout.action_mask)))
            self.truncated += rollout.stop_reason == "length"
            self.turns.append([turn.stop_reason for turn in rollout.turns])
            self.segments.append(len(rollout.segments))
            for name, value in rollout.rewards.items():
                if value is not None:
                    self.by_function.setdefault(name, []).append(value)

    def fated(self, group: Group) -> None:
        """Count the tokens of a group by fate."""
        for rollout in group.rollouts:
            self.tokens[str(rollout.fate)] += int(np.count_nonzero(rollout.action_mask))

    @property
    def judged(self) -> int:
        """Number of groups known to teach or not, including groups cut on evidence."""
        return self.groups - self.kinds[GroupKind.NOT_JUDGED]

    def zero_share(self) -> float | None:
        """Return the share of zero-variance groups among the judged ones; None without any."""
        zero = sum(count for kind, count in self.kinds.items() if kind.zero_variance)
        return zero / self.judged if self.judged else None

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
        if any(len(ends) > 1 for ends in self.turns):
            ends = [end for rollout in self.turns for end in rollout]
            metrics["turns/mean"] = len(ends) / len(self.turns)
            metrics["turns/clipped_ratio"] = ends.count("length") / len(ends)
        if any(n > 1 for n in self.segments):
            metrics["segments/mean"] = float(np.mean(self.segments))
        if self.barrier_wait_s:
            metrics["barrier_wait_s"] = self.barrier_wait_s
        if self.distinct:
            metrics["completions/distinct"] = float(np.mean(self.distinct))
        if self.reward_sets:
            # By size: a mean over groups is biased where the first rewards decide how large a group becomes.
            means = [rewards.mean() for rewards in self.reward_sets]
            metrics["reward"] = float(np.average(means, weights=self.rewarded_sizes))
            metrics["reward_std"] = float(np.mean([r.std() for r in self.reward_sets]))
        for name, values in sorted(self.by_function.items()):
            metrics |= {f"rewards/{name}/mean": float(np.mean(values)), f"rewards/{name}/std": float(np.std(values))}
        metrics |= {f"tokens/{fate}": float(count) for fate, count in sorted(self.tokens.items())}
        return metrics | {f"seconds/{name}": s for name, s in self.seconds.items()}

    def _of_groups(self) -> dict[str, float]:
        return {
            "groups/size_mean": float(np.mean(self.sizes)),
            "completions/mean_length": float(np.mean(self.lengths)) if self.lengths else 0.0,
            "completions/max_length": float(max(self.lengths, default=0)),
            "completions/clipped_ratio": self.truncated / max(len(self.lengths), 1),
            "rollouts/failed_share": self.failed_share(),
        }

    def _of_kinds(self) -> dict[str, float]:
        """Return shares of the judged groups; empty without any. `frac_zero_unknown`: cut by a gate."""
        share = self.zero_share()
        if share is None:
            return {}
        kinds = [GroupKind.EASY, GroupKind.HARD, *([GroupKind.UNKNOWN] if self.kinds[GroupKind.UNKNOWN] else [])]
        return {"frac_reward_zero_std": share} | {f"frac_zero_{kind}": self.kinds[kind] / self.judged for kind in kinds}
