"""Reasons for which a run cannot usefully go on, judged by what its groups taught."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ..methods.filter import Filter
from ..methods.group_kind import GroupJudge
from ..types import Group, GroupKind
from .step_metrics import Tally

MIN_FAILURES_JUDGED = 32
"""Rollouts of a step that must have come back before their failed share can stop the run."""


class RunStoppedError(RuntimeError):
    """The run cannot usefully go on; the message says why and what to do. What was reached is saved."""


class TaskSolvedError(RunStoppedError):
    """Nothing is left to learn, as every rollout has the full reward. A success: the run is finished where it is."""


class OutOfMemoryError(RunStoppedError):
    """Memory was not enough in the middle of a step: nothing is saved, and the run goes on from its last checkpoint."""


@contextmanager
def memory_errors(when: str) -> Iterator[None]:
    """Raises OutOfMemoryError, with the keys that help, for an error about memory: of a GPU, of a CPU or of Python."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        raise OutOfMemoryError(
            f"{when}: out of memory: {text}. See what else uses it, or lower tokens_per_microbatch, engine.slots or "
            "max_completion_length, or set gradient_checkpointing: true; `winnow resume` takes tokens_per_microbatch, "
            "gradient_checkpointing and engine.slots, too"
        ) from None


_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Limits:
    """Limits at which a run ends: in success, or because going on is useless."""

    max_steps: int
    max_failed_share: float
    max_skipped_steps: int
    mask_truncated: bool = False
    """Completions that ran out of tokens are left out of the loss."""
    no_fault: frozenset[str] = frozenset()
    """Reasons of failed rollouts that do not count towards `max_failed_share`."""


class _Rejected(NamedTuple):
    """A group that a refill got nothing from."""

    name: str
    """Prompt and reason."""
    lacks: bool
    """Rewards are missing."""
    teaches: bool
    """It had a signal, and the filter did not want it."""
    kind: GroupKind


class StopConditions:
    """What went by without teaching, and for how long; each judgement is the reason to stop, or None.

    `refill_round`: groups of one round of a filter that refills.
    """

    def __init__(self, judge: GroupJudge, limits: Limits, filter_: Filter, refill_round: int) -> None:
        self._judge, self._limits, self._filter, self._refill_round = judge, limits, filter_, refill_round
        self._rejected: list[_Rejected] = []
        """Groups in a row that a refill got nothing from."""
        self.skipped_steps = 0
        """Steps in a row without a signal."""
        self.solved_steps = 0
        """The last of these in a row in which every group was solved."""

    def begin_step(self) -> None:
        self._rejected = []

    accepted = begin_step

    def rejected(self, group: Group, reason: str, refusal: str | None) -> None:
        """A filter that refills did not want this group, or it was refused before (`refusal`)."""
        first = next((r.reason for r in group.rollouts if r.reason), reason)
        lacks, teaches = group.verdict.keep and refusal is not None, refusal is None and self._judge.teaches(group)
        self._rejected.append(_Rejected(f"{group.prompt.id} ({first})", lacks, teaches, self._judge.kind(group)))

    def of_refill(self, step: int) -> RunStoppedError | None:
        """A refill that adds nothing, before it goes on; what was already accepted is still trained."""
        rounds, n = self._filter.max_refill_rounds, len(self._rejected)
        if not self._filter.refill or n < rounds * self._refill_round:
            return None
        if all(group.kind is GroupKind.EASY for group in self._rejected):
            return TaskSolvedError(f"step {step}: solved: every rollout of {n} groups in a row had the full reward")
        said, remedy = (
            f"{n} groups in a row had no signal",
            "The prompts are too easy or too hard for this policy: use other prompts, more num_generations, or "
            "filter: keep_all",
        )
        if teaching := sum(group.teaches for group in self._rejected):
            said = f"{n} groups in a row were rejected, {teaching} of them with a signal"
            remedy = "Look at what the filter asks for"
        elif lacking := sum(group.lacks for group in self._rejected):
            said = f"of {n} groups in a row {lacking} lacked rewards, and the others had no signal"
            remedy = "Look for why rollouts fail" if 2 * lacking > n else remedy
        remedy += self._unknown()
        return RunStoppedError(
            f"step {step}: {said} (max_refill_rounds={rounds}), so the batch cannot be filled; the last were: "
            f"{'; '.join(group.name for group in self._rejected[-5:])}. {remedy}"
        )

    def of_failures(self, step: int, tally: Tally, prompts_per_step: int) -> RunStoppedError | None:
        """Too many rollouts that failed."""
        enough = sum(tally.sizes) >= MIN_FAILURES_JUDGED or tally.groups >= prompts_per_step
        faults = [(cause, n) for cause, n in tally.failed.most_common() if cause not in self._limits.no_fault]
        share = sum(n for _, n in faults) / max(tally.rollouts, 1)
        if not enough or share <= self._limits.max_failed_share:
            return None
        cause, count = faults[0]
        return RunStoppedError(
            f"step {step}: {share:.0%} of the rollouts failed (max_failed_share="
            f"{self._limits.max_failed_share:.0%}); most often ({count}x): {cause}"
        )

    def of_step(
        self, step: int, groups: Sequence[Group], update: Mapping[str, float], tally: Tally
    ) -> RunStoppedError | None:
        """Prompts that are all solved, or all hopeless: going on would only spend tokens.

        An update without any signal, by a KL or entropy term alone, counts as skipped too.
        """
        taught, kinds = bool(update["updated"]) and any(self._judge.teaches(g) for g in groups), tally.kinds
        solved = not taught and 0 < tally.groups == kinds[GroupKind.EASY]
        self.skipped_steps = 0 if taught else self.skipped_steps + 1
        self.solved_steps = self.solved_steps + 1 if solved else 0
        if self.skipped_steps < self._limits.max_skipped_steps:
            return None
        if self.solved_steps >= self._limits.max_skipped_steps:
            return TaskSolvedError(
                f"step {step}: solved: every rollout of {self.solved_steps} steps had the full reward"
            )
        if cause := self.untrained(groups, update, tally):
            return RunStoppedError(
                f"step {step}: {self.skipped_steps} steps in a row trained nothing (max_skipped_steps="
                f"{self._limits.max_skipped_steps}). In the last of them {cause}"
            )
        return RunStoppedError(
            f"step {step}: {self.skipped_steps} steps in a row had no group with a signal (max_skipped_steps="
            f"{self._limits.max_skipped_steps}); of the last {tally.groups} groups {kinds[GroupKind.EASY]} were "
            f"solved and {kinds[GroupKind.HARD]} failed throughout, and {tally.failed_share():.0%} of the "
            f"rollouts could not be judged. Use other prompts, or more num_generations{self._unknown()}"
        )

    def _unknown(self) -> str:
        """What to add where the run might be over because all is solved, and nothing says whether it is."""
        success = self._judge.success
        return f". Whether the prompts are solved is unknown: success is {success}" if success.undecided else ""

    def untrained(self, groups: Sequence[Group], update: Mapping[str, float], tally: Tally) -> str | None:
        """Why a step trained on none of its rollouts, unless their rewards are simply equal; None otherwise."""
        members = [r for group in groups for r in group.siblings if r.reward is not None]
        cut = sum(r.stop_reason == "length" for r in members) if self._limits.mask_truncated else 0
        missed = cut == len(members) or (not update["updated"] and tally.kinds[GroupKind.SIGNAL] > 0)
        if cut and missed:
            return (
                f"{cut} of {len(members)} completions were cut off at max_completion_length, and "
                "mask_truncated_completions leaves those out of the loss; no other completion had a gradient. Raise "
                "max_completion_length, or set mask_truncated_completions: false"
            )
        if not groups and tally.failed.total and tally.refused.total() == tally.groups:
            (reason, count), (cause, failed) = tally.refused.most_common(1)[0], tally.failed.most_common()[0]
            return (
                f"none of the {tally.groups} groups could be trained on ({count}x: {reason}), because "
                f"{tally.failed_share():.0%} of the rollouts failed, most often ({failed}x): {cause}"
            )
        if update.get("correction/masked_share") == 1:
            return (
                "the correction left out every token: the policy is too far from the one that sampled. Widen the "
                "bounds of `correction`, or lower max_lag, num_iterations or learning_rate"
            )
        if update["updated"] and update.get("grad_norm") == 0 and any(self._judge.teaches(g) for g in groups):
            clipped = update.get("clip_ratio/region_mean", 0.0)
            return (
                f"the gradient was 0 although advantages were not: {clipped:.0%} of the tokens were clipped. See "
                "epsilon, learning_rate and which parameters are trained"
            )
        return None
