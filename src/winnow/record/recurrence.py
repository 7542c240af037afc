"""Zero-variance prompts that are visited again, GRESO's assumption (Zheng et al. 2025, section 3.3, figure 4a).

Read from the ledger. Only visits judged by their rewards count; a group that a gate cut is no evidence. The paper
reports, by epoch, whether a prompt with zero variance in any earlier epoch still has it. Here successive visits are
compared, by the epochs between them, because a selector does not visit every prompt in every epoch. A selector that
skips by history visits the most stubborn prompts least often, so long gaps hold more of them than in a run without one.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

HEAD = ("epochs between", "visits", "zero-variance again")
LONGEST_GAP = 10
"""Gaps of this length or more are counted together."""

_BY_GAP = f"""
    SELECT MIN(epoch - previous_epoch, {LONGEST_GAP}), COUNT(*), SUM(kind <> 'none') FROM (
      SELECT v.epoch, LAG(v.epoch) OVER prompt AS previous_epoch,
             o.zero_variance AS kind, LAG(o.zero_variance) OVER prompt AS previous_kind
      FROM visits v JOIN outcomes o ON o.visit = v.visit AND o.void = 0
      WHERE v.void = 0 AND o.fate <> 'cut' AND o.zero_variance IN ('none', 'easy', 'hard', 'unknown')
      WINDOW prompt AS (PARTITION BY v.ordinal ORDER BY v.visit))
    WHERE previous_kind <> 'none' GROUP BY 1 ORDER BY 1"""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Visits whose prompt had zero variance `gap` epochs before, and how many have it again."""

    gap: int
    """Epochs; `LONGEST_GAP` means that many or more."""
    visits: int
    zero: int


def recurrence(db: sqlite3.Connection) -> list[Recurrence]:
    """Return recurrence by gap, ascending, for gaps that occur. Takes one pass over the visits."""
    return [Recurrence(*row) for row in db.execute(_BY_GAP)]


def rows(found: list[Recurrence]) -> list[list[str]]:
    """Return cells under `HEAD`, one row a gap."""
    return [
        [f"{a.gap}{' and more' if a.gap == LONGEST_GAP else ''}", f"{a.visits:,}", f"{a.zero / a.visits:.1%}"]
        for a in found
    ]
