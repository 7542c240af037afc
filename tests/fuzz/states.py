"""Checkpoints, and what they say of methods and of groups that wait, given to a loop as a resume does."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from winnow.run.resolved import Options

METHODS: dict[str, Any] = {
    "env": "world",
    "max_lag": 2,
    "filter": "zero_variance",
    "rollout_batch": {"name": "fixed", "size": 6},
    "selector": {"name": "greso", "p_easy": 0.2, "p_hard": 0.2},
    "group_size": {"name": "adaptive_k", "window": 1, "tau": 0.1, "high": 6},
    "gates": [
        {"name": "arrol", "at": 2, "cold_start": 1, "head_width": 4},
        {"name": "divergence", "k": 1, "threshold": 0.6},
    ],
    "audit": {"epsilon": 0.5, "max_signal_loss": 0.5},
    "step_scale": {"name": "ess", "reference": "measured"},
    "threads": 1,
}


def checkpoint(file: str, made: Callable[[], Path], *, seal: bool) -> Callable[[bytes, Path], object]:
    """`seal`: with a manifest that is right about the bytes, as somebody who made the checkpoint would write it.

    `made`: a run directory.
    """

    def run(data: bytes, folder: Path) -> object:
        from winnow.run.checkpoint import load_run_state, marks, verify

        shutil.copytree(made(), folder, dirs_exist_ok=True)
        directory = next((folder / "checkpoints").glob("step-*"))
        (directory / file).write_bytes(data)
        if seal:
            manifest = json.loads((directory / "manifest.json").read_bytes())
            manifest["files"][file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            (directory / "manifest.json").write_text(json.dumps(manifest))
        found = marks(folder)
        verify(directory)
        return load_run_state(directory), found

    return run


@cache
def _behind() -> tuple[Any, dict[str, Any]]:
    """Configuration of a run that is two steps behind, and its last state in which groups wait."""
    from winnow import Trainer

    from ..pairs.compose import make_place
    from ..pairs.world import World

    place = make_place(Path(tempfile.mkdtemp(prefix="fuzz-states-")))
    trainer = Trainer(config=place.config(METHODS), env=World())
    trainer.train()
    files = sorted((place.folder / "whole").glob("checkpoints/*/state.json"))
    states = [json.loads(file.read_text())["loop"] for file in files]
    return trainer.config, [state for state in states if state["waiting"]][-1]


def _loop() -> Any:
    """As a resume makes it, but for what a state does not reach."""
    from winnow.collect import Collector
    from winnow.loop import Loop
    from winnow.record.stop_conditions import Limits
    from winnow.run.build_methods import build_methods
    from winnow.sampler.buffer import Buffer
    from winnow.sampler.codec import prompts_of
    from winnow.sampler.scheduling import AsyncPace

    from ..pairs.world import World

    config, world = _behind()[0], World()
    m, nothing = build_methods(config, Options.from_config(config), world.train), cast(Any, None)
    step = cast(Any, SimpleNamespace(scale=m.step_scale))
    ledger = cast(Any, SimpleNamespace(failures=list))
    collector = Collector(
        prompts=prompts_of(world),
        sampler=nothing,
        selector=m.selector,
        group_size=m.group_size,
        filter=m.filter,
        buffer=(buffer := Buffer(config.prompts_per_step, config.max_lag, carry=True)),
        pace=AsyncPace(buffer, nothing),
        refill_round=3,
        ledger=ledger,
        judge=m.judge,
        limits=Limits(9, 1.0, 9),
        gates=m.gates,
        audits=m.audits,
    )
    return Loop(collector, nothing, nothing, step, nothing)


def resume(name: str) -> Callable[[bytes, Path], object]:
    """`name`: `waiting`, of which the bytes are one group, or `methods`, of which they are all states."""

    def run(data: bytes, folder: Path) -> object:
        from winnow.run.checkpoint import parsed, understood

        file, loop, whole = folder / "state.json", _loop(), _behind()[1]
        file.write_bytes(data)
        with understood(file):
            found = parsed(file)
            state = whole | ({"waiting": [found]} if name == "waiting" else {"waiting": []} | found)
            loop.load_state_dict(state)
        parts = loop.collector
        for group in parts.buffer.groups:
            parts.judge.kind(group), repr(group)
        parts.buffer.ready(loop.step)
        for gate in parts.gates.values():
            gate.end_step()
            gate.rule(), gate.metrics()
        parts.selector.select(4)
        parts.selector.end_step()
        parts.group_size.observe_step({"frac_reward_zero_std": 0.5})
        return parts.group_size.size_for(parts.selector.prompts[0]), parts.selector.metrics(), loop.state_dict

    return run


def seeds(name: str) -> Callable[[], Sequence[bytes]]:
    def of_a_run() -> list[bytes]:
        state = _behind()[1]
        names = ("selector", "group_size", "gates", "step_scale")
        found = state["waiting"][:2] if name == "waiting" else [{key: state[key] for key in names}]
        return [json.dumps(each).encode() for each in found]

    return of_a_run
