"""Build a ledger with booked steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from winnow.record.ledger import Ledger
from winnow.types import Fate, Group, Prompt, Rollout, Verdict, Visit


def visit(number: int, verdict: Verdict | None = None) -> Visit:
    return Visit(number, number // 10, Prompt(f"p{number % 10}", number % 10, "text"), verdict or Verdict(True))


def rollout(sibling: int, fate: Fate | None = Fate.TRAINED, reward: float | None = 1.0, version: int = 0) -> Rollout:
    """Seven tokens, of which two are the environment's; sampled by `version` and the one after."""
    mask = np.array([1, 1, 1, 0, 0, 1, 1], bool)
    versions = np.where(mask, version, -1).astype(np.int32)
    versions[-1] += 1
    reward = None if fate in (Fate.FAILED, Fate.PRUNED) else reward
    tokens, logp = np.arange(7), np.zeros(7, np.float32)
    return Rollout(sibling, (1, 2, 3), tokens, mask, logp, versions, reward=reward, fate=fate, seconds=0.25)


def group(number: int, fates: list[Fate], rewards: list[float | None] | None = None) -> Group:
    rewards = rewards or [float(i % 2) for i in range(len(fates))]
    return Group(visit(number), [rollout(i, f, r) for i, (f, r) in enumerate(zip(fates, rewards, strict=True))])


def book_step(ledger: Ledger, step: int, *, visits: int = 2, late: int = 0) -> None:
    """Dispatch `visits`, finish them all, except that each is finished `late` steps after it was dispatched."""
    ledger.visit([visit(step * visits + i) for i in range(visits)], step=step, version=step)
    for i in range(visits):
        if step >= late:
            ledger.finish(group((step - late) * visits + i, [Fate.TRAINED] * 3), step=step)
    ledger.step(step, seconds={"generate": 0.1}, metrics={"reward": 0.5 * step, "step_time": 0.1}, version=step)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger.open(path) as opened:
        yield opened
