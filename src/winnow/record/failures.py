"""Rollouts that failed, by cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..methods.success import Success
from ..types import LIMITS, Fate, Group
from .ledger import Ledger
from .ledger_file import LEDGER

_PLACE = re.compile(r" \(([^()]+:\d+)\)")
"""File and line of an exception, as `describe_error` writes them."""
_ERROR = re.compile(r"\b[A-Z]\w*:")
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


def cause_of(reason: str, prompt_id: str = "") -> str:
    """Return what reasons of one cause share: error and place, or the text without prompt id, quotes and numbers.

    An exception's message often quotes the completion, so its type, file and line decide if they are known.
    """
    places, error = _PLACE.findall(reason), _ERROR.search(reason)
    if places and error:
        return f"{reason[: error.end()]} ({places[-1]})"
    own = re.sub(rf"(?<!\w){re.escape(prompt_id)}(?!\w)", "_", reason) if prompt_id else reason
    return _VARYING.sub("_", own)


class Failures:
    """Counts of failed rollouts by cause, each with its first reason and that prompt's id."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, tuple[str, str]] = {}

    def add(self, reason: str, prompt_id: str, count: int = 1) -> None:
        cause = cause_of(reason, prompt_id)
        self.counts[cause] += count
        self.first.setdefault(cause, (reason, prompt_id))

    def most_common(self) -> list[tuple[str, int]]:
        """Return the first reason and count of each cause, the most frequent first."""
        return [(self.first[cause][0], count) for cause, count in self.counts.most_common()]


def failures_of(run_dir: Path) -> dict[str, int]:
    """Count a run's failed rollouts by first reason, from its ledger; the most frequent cause first."""
    failed = Failures()
    with Ledger.open(run_dir / LEDGER, read_only=True) as ledger:
        for reason, prompt_id, count in ledger.failures():
            failed.add(reason, prompt_id, count)
    return dict(failed.most_common())


def truncated_of(run_dir: Path) -> dict[str, int]:
    """Count a run's truncated rollouts by the key of the limit, from its ledger; the most frequent first."""
    with Ledger.open(run_dir / LEDGER, read_only=True) as ledger:
        counts = ledger.stop_reasons()
    return {LIMITS[reason]: count for reason, count in counts.items() if reason in LIMITS}


class FailureWatch:
    """Warns once for each cause of failed rollouts, for each note, and where right answers are unknown.

    `known`: (reason, prompt id, count) of earlier steps. `success`: the run's; None: not looked at.
    """

    def __init__(self, known: Iterable[tuple[str, str, int]] = (), success: Success | None = None) -> None:
        self._warned = {("rollouts", cause_of(reason, prompt_id)) for reason, prompt_id, _ in known}
        self._success = success
        """None once its warning is given."""

    def observe(self, groups: Sequence[Group], what: str = "rollouts") -> Iterator[str]:
        """Yield a warning for each cause that is new for `what`, with its share of `groups`."""
        if self._success is not None and self._success.undecided:
            yield (
                f"success: {self._success}. No pass@k is reported, the run cannot end as solved, and selectors, "
                "sizes and gates by pass rates learn nothing more"
            )
            self._success = None
        failed, noted, rollouts = Failures(), Failures(), 0
        for group in groups:
            rollouts += len(group.rollouts)
            for rollout in group.rollouts:
                if rollout.fate == Fate.FAILED:
                    failed.add(rollout.reason, group.prompt.id)
                for note in rollout.notes:
                    noted.add(note, group.prompt.id)
        for reason, prompt_id, count in self._new(failed, what):
            yield (
                f"{count} of {rollouts} {what} failed ({count / rollouts:.0%}): {reason}; first at prompt "
                f"'{prompt_id}'. They are left out and never count as reward 0; this cause is not reported again"
            )
        for note, prompt_id, count in self._new(noted, f"notes of {what}"):
            yield f"{count} of {rollouts} {what}: {note}; first at prompt '{prompt_id}'. This is not reported again"

    def _new(self, found: Failures, what: str) -> Iterator[tuple[str, str, int]]:
        """Yield first reason, its prompt's id and count of the causes not reported before."""
        for cause, count in found.counts.most_common():
            if (what, cause) not in self._warned:
                self._warned.add((what, cause))
                yield (*found.first[cause], count)
