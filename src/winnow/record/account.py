"""The account that the loop books to: a `Ledger`, or, where no file is needed, counts in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..methods.group_kind import BY_REWARDS
from ..types import Fate, Group, Visit
from .ledger import Ledger
from .ledger_file import LedgerError
from .records import LEDGER


def is_hosted(run_dir: Path) -> bool:
    """Whether a directory is the account of a run inside TRL or verl, which has its models elsewhere. False for
    one whose ledger cannot be read."""
    with suppress(LedgerError, OSError), Ledger.open(run_dir / LEDGER, read_only=True) as ledger:
        return ledger.get_meta("hosted") == "true"
    return False


class Counts:
    """Counts visits, and rollouts by fate, in memory."""

    def __init__(self) -> None:
        self.judge = BY_REWARDS
        self.visits = 0
        self.rollouts: Counter[Fate] = Counter()
        self.in_flight: set[int] = set()
        """Numbers of visits that are not finished."""

    def visit(self, visits: Sequence[Visit], *, step: int, version: int) -> None:
        self.visits += len(visits)
        self.in_flight.update(visit.number for visit in visits if visit.verdict.keep)

    def finish(self, group: Group, *, step: int) -> None:
        """Raises KeyError on a visit that is not in flight."""
        self.in_flight.remove(group.visit.number)
        self.rollouts.update(rollout.fate for rollout in group.rollouts if rollout.fate is not None)

    def step(
        self, step: int, *, seconds: Mapping[str, float], metrics: Mapping[str, float], version: int | None = None
    ) -> None:
        """Steps are not counted."""

    def evaluation(self, step: int, rollouts: int, tokens: int, seconds: float) -> None:
        """Evaluations have no fate, and are not counted."""

    def failures(self) -> list[tuple[str, str, int]]:
        return []


Account = Ledger | Counts
