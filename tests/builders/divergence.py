"""Build walks that converge or diverge, for the gate `divergence`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from winnow.env.base import StepResult
from winnow.record.ledger import Ledger
from winnow.types import EnvStep, GroupView, Prompt, Visit

from .toy_rollouts import SHORT_TURNS


def view_of(actions: list[list[str]], k: int, columns: dict[str, Any] | None = None, **rest: Any) -> GroupView:
    frozen = tuple(tuple(a) for a in actions)
    visit = Visit(0, 0, Prompt("p0", 0, text="x", columns=columns or {}))
    return GroupView(visit, EnvStep(k), frozen, frozen, tuple(len(a) >= k for a in actions), **rest)


@dataclass
class Walk:
    """A task of five turns in which some prompts make every sibling do the same."""

    name: str = "walk"
    max_turns: int = 5
    stop: tuple[str, ...] = SHORT_TURNS
    reward_funcs: tuple[Any, ...] = ()
    train: list[Prompt] = field(
        default_factory=lambda: [
            Prompt(f"p{i}", i, text=f"numbers {i} :", columns={"task_type": "ab"[i % 2]}) for i in range(8)
        ]
    )
    test: list[Prompt] = field(default_factory=list)
    count: Any = field(default_factory=itertools.count)

    def make_env(self, prompt: Prompt) -> Any:
        return WalkEnv(prompt.ordinal % 3 == 0)

    def fingerprint(self) -> str:
        return "walk"


class WalkEnv:
    """Its reward is the parity of what was said, so that it varies."""

    def __init__(self, same: bool) -> None:
        self.same, self.said = same, list[str]()

    def reset(self) -> str | None:
        return None

    def step(self, text: str) -> StepResult:
        self.said.append(text)
        done = len(self.said) == 4
        reward = float(sum(len(s.split()) for s in self.said) % 2) if done else None
        return StepResult("8 9", reward, done, action="look" if self.same else None)


def digest(run_dir: Path) -> str:
    with Ledger.open(run_dir / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
        return ledger.digest()
