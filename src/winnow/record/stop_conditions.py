"""Detect that a run can make no more progress, from what its groups taught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import Field

from ..base.errors import ExpectedError
from ..base.state import Count, State, Stateful
from ..methods.filter import Filter
from ..methods.group_kind import GroupJudge
from ..types import LIMITS, Group, GroupKind, Visit
from .step_metrics import Tally

MIN_FAILURES_JUDGED = 32
"""Finished rollouts whose failed share can stop the run. A step of fewer can, too, if it has all of its groups."""


class RunStoppedError(ExpectedError):
    """The run can make no more progress; the message has cause and remedy. Progress so far is saved."""


class TaskSolvedError(RunStoppedError):
    """No group has a signal and answers are right, so nothing is left to learn. A success: the run is finished."""


class OutOfMemoryError(RunStoppedError):
    """Memory ran out within a step: nothing is saved, and the run resumes from its last checkpoint."""


def nothing_left(step: int, visits: Sequence[Visit]) -> RunStoppedError:
    """Return the error for a selector that skipped all of `visits`, its last ones."""
    reason = next((v.verdict.reason for v in reversed(visits)), "")
    return RunStoppedError(
        f"step {step}: the selector skipped the last {len(visits):,} visits, more than a whole epoch, so nothing is "
        f"left to roll out (last reason: {reason}). The prompts are too easy or too hard for this policy: use other "
        "prompts, or selector: uniform"
    )


@contextmanager
def memory_errors(when: str) -> Iterator[None]:
    """Turn memory errors of a GPU, a CPU or Python into OutOfMemoryError, with the keys that help."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        raise OutOfMemoryError(
            f"{when}: out of memory: {text}. Check what else uses it, or lower tokens_per_microbatch (a longer rollout "
            "is a micro-batch by itself), engine.slots or max_completion_length, or set gradient_checkpointing: true; "
            "`winnow resume` accepts tokens_per_microbatch, gradient_checkpointing and engine.slots"
        ) from None


_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Limits:
    """Limits at which a run ends: in success, or without progress."""

    max_steps: int
    max_failed_share: float
    max_skipped_steps: int
    mask_truncated: bool = False
    """Whether truncated completions are left out of the loss."""
    no_fault: frozenset[str] = frozenset()
    """Reasons of failed rollouts that do not count towards `max_failed_share`."""
    teacher: bool = False
    """Whether a teacher makes every rollout teach."""
    fewest_rejected: int = 0
    """Groups that a refill rejects in a row before it may end the run."""


class StopCounts(State):
    skipped_steps: Count
    """Consecutive steps without a signal."""
    solved_steps: Count
    """The latest consecutive ones in which every group was solved."""
    unjudged_failures: dict[str, Count] = Field(default_factory=dict)  # earlier versions did not save them
    unjudged_rollouts: Count = 0
    """Failed rollouts by cause, and all rollouts, of the latest steps that were too small to be judged."""


class StopConditions(Stateful):
    """Counts groups and steps without a signal. Each `of_...` returns the error that stops the run, or None.

    `refill_round`: groups in one round of a refilling filter.
    """

    state_model = StopCounts

    def __init__(self, judge: GroupJudge, limits: Limits, filter_: Filter, refill_round: int) -> None:
        self._judge, self._limits, self._filter, self._refill_round = judge, limits, filter_, refill_round
        self.skipped_steps = self.solved_steps = 0
        self.unjudged_failures: dict[str, int] = {}
        self.unjudged_rollouts = 0
        self._judged = False
        """Whether failures have stopped the run: they are not counted for its resume."""
        self.forget_rejected()

    def forget_rejected(self) -> None:
        """Forget what a refill has rejected, as after a group that was accepted."""
        self._rejected: list[str] = []
        """Prompts and reasons of consecutive groups that a refill rejected."""
        self._easy = self._lacking = self._teaching = self._cut = 0
        """Number of them that are solved, lack rewards, had a signal that the filter rejected, or that a gate cut."""

    def rejected(self, group: Group, reason: str, refusal: str | None) -> None:
        """Count a group that a refilling filter rejected, or that was refused before it (`refusal`)."""
        first = next((r.reason for r in group.rollouts if r.reason), reason)
        self._rejected.append(f"{group.prompt.id} ({first})")
        self._easy += self._judge.kind(group) is GroupKind.EASY
        self._lacking += group.verdict.keep and refusal is not None
        self._cut += not group.verdict.keep
        self._teaching += refusal is None and self._judge.teaches(group)

    def of_refill(self, step: int) -> RunStoppedError | None:
        """Stop a refill that adds nothing; accepted groups are still trained."""
        rounds, fewest, n = self._filter.max_refill_rounds, self._limits.fewest_rejected, len(self._rejected)
        if not self._filter.refill or n < max(rounds * self._refill_round, fewest):
            return None
        if self._easy == n:
            return TaskSolvedError(f"step {step}: solved: {n} groups in a row had right answers and no signal")
        said, remedy = (
            f"{n} groups in a row had no signal",
            "The prompts are too easy or too hard for this policy: use other prompts, more num_generations, or "
            "filter: keep_all",
        )
        if self._teaching:
            said = f"{n} groups in a row were rejected, {self._teaching} of them with a signal"
            remedy = "Check what the filter requires"
        elif self._lacking:
            said = f"of {n} groups in a row {self._lacking} had missing rewards, and the others no signal"
            remedy = "Find out why rollouts fail" if 2 * self._lacking > n else remedy
        elif self._cut:
            said = f"of {n} groups in a row gates cut {self._cut}, and the others had no signal"
            remedy = "Let gates cut later or less, or set refill: false" if 2 * self._cut > n else remedy
        remedy += self._unknown()
        limit = f"max_refill_rounds={rounds}" + (f", and at least {fewest} groups" if fewest else "")
        return RunStoppedError(
            f"step {step}: {said} ({limit}), so the batch cannot be filled; the last were: "
            f"{'; '.join(self._rejected[-5:])}. {remedy}"
        )

    def of_failures(self, step: int, tally: Tally, wanted: int) -> RunStoppedError | None:
        """Stop on too large a share of failed rollouts, in this step and those before it that were too small.

        `wanted`: new groups of the step."""
        if not (tally.failed.counts or self.unjudged_failures):
            return None
        failed, finished, enough = self._failures(tally, wanted)
        faults = [(cause, n) for cause, n in failed.most_common() if cause not in self._limits.no_fault]
        size = tally.rollouts / tally.groups
        planned = max(finished, self.unjudged_rollouts + size * wanted)  # those in flight may well succeed
        share = sum(n for _, n in faults) / planned
        if not enough or share <= self._limits.max_failed_share:
            return None
        self.unjudged_failures, self.unjudged_rollouts, self._judged = {}, 0, True  # they stop no resume once more
        cause, count = faults[0]
        so_far = f", {sum(n for _, n in faults)} of the {finished} that have finished" if finished < planned else ""
        return RunStoppedError(
            f"step {step}: {share:.0%} of the rollouts failed{so_far} (max_failed_share="
            f"{self._limits.max_failed_share:.0%}); most often ({count}x): {cause}"
        )

    def _failures(self, tally: Tally, wanted: int) -> tuple[Counter[str], int, bool]:
        """Return failed rollouts by cause and the number of all, since the last step that could be judged, and whether
        they can be judged now. One group alone, as in a step of one prompt, says nothing."""
        failed = Counter(self.unjudged_failures) + Counter(dict(tally.failed.most_common()))
        finished = self.unjudged_rollouts + tally.rollouts
        several = tally.groups > 1 or self.unjudged_rollouts > 0
        whole = 1 < wanted <= tally.groups  # a second group of a step of one is a refill
        many = finished >= MIN_FAILURES_JUDGED or whole
        return failed, finished, several and many

    def of_step(
        self, step: int, groups: Sequence[Group], update: Mapping[str, float], tally: Tally, wanted: int
    ) -> RunStoppedError | None:
        """Stop when prompts are all solved or all hopeless, so that more steps would only spend tokens.

        An update without any signal, by a KL or entropy term alone, counts as skipped.
        """
        failed, finished, enough = self._failures(tally, wanted)
        enough = enough or self._judged
        self.unjudged_failures, self.unjudged_rollouts = ({}, 0) if enough else (dict(failed), finished)
        if not groups and not tally.groups:
            return None  # its places were taken by groups that an earlier step has counted
        signal = self._limits.teacher or any(self._judge.teaches(g) for g in groups)
        taught, kinds = bool(update["updated"]) and signal, tally.kinds
        easy = all(self._judge.kind(group) is GroupKind.EASY for group in groups)
        solved = not taught and easy and tally.groups == kinds[GroupKind.EASY]  # a batch may have finished before
        self.skipped_steps = 0 if taught else self.skipped_steps + 1
        self.solved_steps = self.solved_steps + 1 if solved else 0
        if self.skipped_steps < self._limits.max_skipped_steps:
            return None
        if self.solved_steps >= self._limits.max_skipped_steps:
            return TaskSolvedError(
                f"step {step}: solved: all groups of {self.solved_steps} steps had right answers and no signal"
            )
        if cause := self.untrained(groups, update, tally):
            return RunStoppedError(
                f"step {step}: {self.skipped_steps} steps in a row trained nothing (max_skipped_steps="
                f"{self._limits.max_skipped_steps}). In the last of them {cause}"
            )
        return RunStoppedError(
            f"step {step}: {self.skipped_steps} steps in a row had no group with a signal (max_skipped_steps="
            f"{self._limits.max_skipped_steps}); of the last {tally.groups} groups {kinds[GroupKind.EASY]} were "
            f"solved and {kinds[GroupKind.HARD]} were not, and {tally.failed_share():.0%} of the "
            f"rollouts could not be judged. Use other prompts, or more num_generations{self._unknown()}"
        )

    def _unknown(self) -> str:
        """Return a hint for a run that may be solved while `success` is undecided."""
        success = self._judge.success
        return f". Whether the prompts are solved is unknown: success is {success}" if success.undecided else ""

    def untrained(self, groups: Sequence[Group], update: Mapping[str, float], tally: Tally) -> str | None:
        """Return why a step trained no rollout; None if it trained some, or rewards are simply equal."""
        members = [r for group in groups for r in group.siblings if r.reward is not None]
        limits = Counter(LIMITS[r.stop_reason] for r in members if self._limits.mask_truncated and r.truncated)
        cut = limits.total()
        missed = cut == len(members) or (not update["updated"] and tally.kinds[GroupKind.SIGNAL] > 0)
        if cut and missed:
            keys = " and ".join(limits)
            return (
                f"{cut} of {len(members)} completions were cut off at {keys}, and "
                "mask_truncated_completions leaves those out of the loss; no other completion had a gradient. Raise "
                f"{keys}, or set mask_truncated_completions: false"
            )
        if not groups and tally.refused and tally.refused.total() == tally.groups:
            reason, count = tally.refused.most_common(1)[0]
            found = f"none of the {tally.groups} groups could be trained on ({count}x: {reason})"
            if not tally.failed.counts:
                return f"{found}: agents that sampled tokens have no reward"
            cause, failed = tally.failed.most_common()[0]
            return (
                f"{found}, because {tally.failed_share():.0%} of the rollouts failed, most often ({failed}x): {cause}"
            )
        if update.get("correction/masked_share") == 1:
            return (
                "the correction left out every token: the policy is too far from the one that sampled. Widen the "
                "bounds of `correction`, or lower max_lag, num_iterations or learning_rate"
            )
        if update["updated"] and update.get("grad_norm") == 0 and any(self._judge.teaches(g) for g in groups):
            clipped = update.get("clip_ratio/region_mean", 0.0)
            return (
                f"the gradient was 0 although advantages were not: {clipped:.0%} of the tokens were clipped. Check "
                "epsilon, learning_rate and which parameters are trained"
            )
        return None
