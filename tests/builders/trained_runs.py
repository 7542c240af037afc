"""Build checks of runs whose processes were killed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from winnow.record.ledger import Ledger

from .runs import assert_clean


def assert_trained(run_dir: Path, steps: int) -> None:
    """Every step with its 16 rollouts, none over the bound, every visit accounted for."""
    assert_clean(run_dir)
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        query = (
            "SELECT version - first_version FROM rollouts JOIN steps USING (step)"
            " WHERE fate = 'trained' AND rollouts.void = 0 AND steps.void = 0"
        )
        lags = [row[0] for row in db.execute(query)]
        assert db.execute("SELECT COUNT(*) FROM steps WHERE void = 0").fetchone()[0] == steps
    assert max(lags) <= 2
    with Ledger.open(run_dir / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.in_flight() == []
