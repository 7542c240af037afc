"""Runs that are resolved on this machine, or on one that differs from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from winnow.config import RunConfig
from winnow.engine.initial_model import InitialModel
from winnow.env.base import Task
from winnow.run.budget import Budget, Shapes
from winnow.run.resolve import engine_for_run, resolve
from winnow.run.resolved import Machine, Options, Resolved
from winnow.sampler import SamplerContext


def resolved(
    c: RunConfig, model: InitialModel | None = None, *, resumed: bool = False, alone: bool = False, **machine: Any
) -> Resolved:
    """Resolve `c`; `machine`: what differs from this one."""
    there = replace(Machine.here(c.device), **machine)
    model = (model or InitialModel.from_config(c)).read(c)
    return resolve(c, Options.from_config(c), there, model, resumed=resumed, alone=alone)


def budget(c: RunConfig, shapes: Shapes, memory: int, *, learner: bool = True, sampler: bool = True) -> Budget:
    options = Options.from_config(c)
    engine = engine_for_run(c, options, alone=not learner)
    return Budget(c, shapes, memory, engine, options.ranks, learner, sampler)


def sampler_context(c: RunConfig, task: Task, tokenizer: Any, behind: int) -> SamplerContext:
    """Return what a sampler of its own engines is built from."""
    return SamplerContext(
        settings=c.model_dump(mode="json"),
        run_dir=Path(c.output_dir),
        task=task,
        tokenizer=tokenizer,
        greedy_baseline=False,
        behind=behind,
        runner=None,
        seed=c.seed,
        device=c.device,
    )
