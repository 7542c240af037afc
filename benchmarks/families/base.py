"""What a family of claims is made of: its arms, the models that they start from, and the tables of its result files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs import Run, summary
from tables import Figures, Summary

FINAL = {"eval_generations": 8, "eval_greedy": True}
"""Evaluation of a finished run: all held-out prompts."""


@dataclass(frozen=True)
class Start:
    """A model that runs begin with, in `NAME-sSEED`: a warm start on the recipe's environment."""

    recipe: str
    settings: Mapping[str, Any]
    """Of `WarmStartConfig`."""
    name: str = "warm"
    shared: bool = False
    """All seeds start from the model of seed 0."""
    overrides: tuple[str, ...] = ()
    """Of the recipe."""

    def seed(self, seed: int) -> int:
        return 0 if self.shared else seed

    def directory(self, seed: int, work: Path) -> Path:
        return work / f"{self.name}-s{self.seed(seed)}"


@dataclass(frozen=True)
class Arm:
    """A recipe and what is changed in it."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    """`WORK` in them is the work directory."""
    start: Start | None = None
    profiled: bool = False
    """Leaves out prompts by their pass rates under the start, which are measured first."""
    votes: tuple[str, ...] = ()
    """Weights of votes among 32 answers, measured at the end."""


@dataclass(frozen=True)
class Family:
    work: str
    """Directory under runs/."""
    arms: tuple[Arm, ...]
    tables: Mapping[str, Callable[[Figures], dict[str, str]]]
    """File under results/ -> the tables made of it, by name."""
    of_run: Callable[[Run], Summary] = summary
    """A finished run -> what the JSON file keeps of it."""
    twins: Mapping[str, str] = field(default_factory=dict)
    """Arm -> the name under which its runs are kept once more, with the tokens that the engine decoded."""
    draw: Callable[[Figures, Path], None] | None = None
    final: Mapping[str, Any] = field(default_factory=lambda: FINAL)
    default: tuple[str, ...] = ()
    """Arms that are run if none are named; empty: all."""
    seeds: int = 4
    jobs: int = 2
    vote_settings: Mapping[str, Any] = field(default_factory=dict)
    may_stop: bool = False
    """A run that stops early, as nothing has a signal any more, counts as finished."""
    prepare: Callable[[Path], list[str]] = lambda work: []
    """Makes what all runs need in the work directory; returns overrides for every run."""
    around: Callable[[Arm], AbstractContextManager[None]] = lambda arm: nullcontext()
    """What a run needs while it goes on."""

    def figures(self, runs: Mapping[str, list[Run]]) -> Figures:
        """Finished runs by arm -> what the JSON file keeps of them."""
        figures = {arm: [self.of_run(run) for run in of_arm] for arm, of_arm in runs.items()}
        for arm, twin in self.twins.items():
            if arm in runs:
                figures[twin] = [summary(run, decoded=True) for run in runs[arm]]
        return figures

    def by_name(self) -> dict[str, Arm]:
        return {arm.name: arm for arm in self.arms}
