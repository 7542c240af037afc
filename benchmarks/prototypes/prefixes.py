"""Visits that begin with words of an earlier rollout (2605.05112, 2601.20829) or a demonstration of their prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from winnow.base.noise import noise_key
from winnow.methods.group_kind import GroupJudge
from winnow.methods.select.thompson import Thompson, ThompsonSelector
from winnow.tasks.countdown import Countdown, CountdownConfig, countdown_reward, sample_solution
from winnow.types import Group, Prompt, Verdict, Visit

DEMONSTRATION_STREAM = 102
LIMIT = CountdownConfig().limit


@dataclass(frozen=True)
class Prefixes(Thompson):
    """Thompson draws, and visits that begin with words of an earlier rollout of their prompt (2605.05112, 2601.20829).

    A prompt that mostly fails gets a head start from a right rollout, one that is mostly solved a handicap from a wrong
    one. The words are part of the prompt, so they are context. Their number moves by one towards a mixed group.
    """

    share: float = 0.25
    """Largest share of the visits with a prefix, taken from those that Thompson draws skip."""
    hard: float = 0.15
    easy: float = 0.85
    """Expected pass rates below and above which a prompt gets a prefix."""
    head_start: int = 3
    handicap: int = 1
    """Words of a prompt's first one."""

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge) -> PrefixSelector:  # type: ignore[override]
        return PrefixSelector(prompts, seed, self, judge)


class PrefixSelector(ThompsonSelector):
    """Pass rates learn from visits without a prefix alone."""

    options: Prefixes

    def __init__(self, prompts: Sequence[Prompt], seed: int, options: Prefixes, judge: GroupJudge) -> None:
        super().__init__(prompts, seed, options, judge)
        self.answers: dict[tuple[int, bool], list[str]] = {}
        """Words of the last right and the last wrong rollout of each prompt."""
        self.lengths: dict[tuple[int, bool], int] = {}
        """Words of the next prefix."""
        self.tried = self.mixed = 0

    def select(self, n: int, audit: Any = None) -> list[Visit]:
        visits = super().select(n - round(self.options.share * n), audit)
        missing = n - sum(visit.verdict.keep for visit in visits)
        for i, visit in enumerate(visits):
            if missing and not visit.verdict.keep and (begun := self._begun(visit.prompt)) is not None:
                visits[i] = replace(visit, prompt=begun, verdict=Verdict(True, "with a prefix"))
                missing -= 1
        return [*visits, *super().select(missing, audit)] if missing else visits

    def _begun(self, prompt: Prompt) -> Prompt | None:
        """Return the prompt with its prefix; None if it is neither hard nor easy, or has no rollout for one."""
        right, wrong = 1.0 + self.right_N[prompt.ordinal], 1.0 + self.wrong_N[prompt.ordinal]
        rate = right / (right + wrong)
        head_start = bool(rate < self.options.hard)
        key = prompt.ordinal, head_start
        words = [] if self.options.hard <= rate <= self.options.easy else self.words_for(prompt, head_start)
        if not words:
            return None
        length = self.lengths.setdefault(key, self.options.head_start if head_start else self.options.handicap)
        length = min(length, len(words) - 1)
        if length < 1:
            return None
        prefix = " ".join(words[:length])
        columns = {**prompt.columns, "prefix": prefix, "head_start": head_start}
        # Another ordinal, or a visit without prefix would take these answers for drafts.
        ordinal = (2 * length + head_start) * len(self.prompts) + prompt.ordinal
        return replace(prompt, ordinal=ordinal, text=f"{prompt.text} {prefix}", columns=columns)

    def words_for(self, prompt: Prompt, head_start: bool) -> list[str]:
        """Return the words that the prompt's next prefix may be of; none if there is no answer to take them from."""
        return self.answers.get((prompt.ordinal, head_start), [])

    def remember(self, ordinal: int, right: bool, text: str) -> None:
        """Take a rollout without prefix for later ones."""
        self.answers[ordinal, right] = text.split()

    def observe_group(self, group: Group) -> None:
        judged = {id(r): self.judge.success.right(r) for r in group.siblings if r.reward is not None}
        ordinal = group.prompt.ordinal % len(self.prompts)
        if not group.prompt.columns["prefix"]:
            for rollout in group.siblings:
                if id(rollout) in judged:
                    self.remember(ordinal, bool(judged[id(rollout)]), rollout.text)
            super().observe_group(group)
            return
        self.tried += 1
        if len(set(judged.values())) != 1:
            self.mixed += len(judged) > 0
            return
        head_start = group.prompt.columns["head_start"]
        key = ordinal, head_start
        change = -1 if head_start == all(judged.values()) else 1  # a head start too easy, a handicap too hard
        self.lengths[key] = min(max(self.lengths[key] + change, 1), len(self.answers[key]) - 1)

    def metrics(self) -> dict[str, float]:
        found = super().metrics() | {"prefix/visits": float(self.tried), "prefix/mixed": float(self.mixed)}
        self.tried = self.mixed = 0
        return found


@dataclass(frozen=True)
class Demonstrations(Prefixes):
    """Head starts for hard prompts, from worked steps instead of own right rollouts, which most of them do not have."""

    easy: float = 1.0
    """No prompt gets a handicap."""

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge) -> DemonstrationSelector:  # type: ignore[override]
        return DemonstrationSelector(prompts, seed, self, judge)


class DemonstrationSelector(PrefixSelector):
    """A prompt's demonstration is drawn once: of all solutions, uniformly."""

    def words_for(self, prompt: Prompt, head_start: bool) -> list[str]:
        key = prompt.ordinal, head_start
        if key not in self.answers:
            numbers, target = tuple(prompt.columns["numbers"]), prompt.columns["target"]
            rng = random.Random(noise_key(self.seed, DEMONSTRATION_STREAM, prompt.ordinal))
            self.answers[key] = sample_solution(numbers, target, LIMIT, rng).split()
        return self.answers[key]

    def remember(self, ordinal: int, right: bool, text: str) -> None:
        """Demonstrations are not replaced by rollouts."""


@dataclass(frozen=True)
class CountdownWithPrefixes(CountdownConfig):
    """Countdown whose answers begin with the prefix of their prompt."""

    def build(self) -> Countdown:
        task = Countdown(self)
        task.train, task.test = (
            [replace(prompt, columns={**prompt.columns, "prefix": ""}) for prompt in part]
            for part in (task.train, task.test)
        )
        task.reward_funcs = [whole_answer_reward]
        return task


def whole_answer_reward(
    completions: Sequence[str], numbers: Any, target: Any, style: Any, prefix: Sequence[str]
) -> list[float | None]:
    """Return Countdown's reward of prefix and completion."""
    whole = [f"{begun} {completion}" for begun, completion in zip(prefix, completions, strict=True)]
    return countdown_reward(whole, numbers, target, style)
