"""Checkpoints that somebody made: whole by their manifest, but with a state that no version of Winnow has saved."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.base.packed import pack, unpack
from winnow.cli.errors import EXPECTED
from winnow.run.checkpoint import CheckpointError

from ..pairs.world import make_model

VALUES = [None, -1, 1e999, "x", [], {}, [None], 2**70, True]


def half(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 2) for text in completions]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is behind by two steps: its checkpoint holds groups, work in flight, and what a selector knows."""
    folder = tmp_path_factory.mktemp("hostile")
    make_model(folder / "model")
    rows = [{"prompt": f"p{i % 6} w{i % 50} w{i * 7 % 50}"} for i in range(40)]
    config = {"max_steps": 3, "save_steps": 1, "save_total_limit": 1, "prompts_per_step": 4, "num_generations": 4}
    methods = {"selector": "greso", "rollout_batch": "adaptive", "filter": "zero_variance", "max_lag": 2}
    own = {"threads": 1, "max_completion_length": 6, "output_dir": str(folder / "run")}
    Trainer(str(folder / "model"), train_dataset=rows, reward_funcs=half, config=config | methods | own).train()
    return folder / "run"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a state but the configuration, which is checked as any other; of lists the first two."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in inside:
        if key != "config":
            yield from places(inner, (*path, key))


def with_state(saved: Path, to: Path, state: Any) -> Path:
    shutil.copytree(saved, to)
    (directory,) = (to / "checkpoints").iterdir()
    data = json.dumps(state).encode()
    (directory / "state.json").write_bytes(data)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return to


def resumed(run: Path) -> None:
    rows = [{"prompt": f"p{i % 6} w{i % 50} w{i * 7 % 50}"} for i in range(40)]
    Trainer.resume(run, {"max_steps": 4}, train_dataset=rows, reward_funcs=half).train()


def state_of(saved: Path) -> Any:
    return json.loads(next(saved.glob("checkpoints/*/state.json")).read_text())


def changed(state: Any, rng: random.Random) -> Any:
    state, path = copy.deepcopy(state), rng.choice([*places(state)])
    inside = state
    for key in path[:-1]:
        inside = inside[key]
    if (value := rng.choice([*VALUES, "removed"])) == "removed":
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return state


@pytest.mark.parametrize(
    "numbers", [range(25), pytest.param(range(25, 400), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_any_state_is_refused_by_name_or_trained_on(saved: Path, tmp_path: Path, numbers: range) -> None:
    state, refusals = state_of(saved), []
    for number in numbers:
        run = with_state(saved, tmp_path / str(number), changed(state, random.Random(f"state {number}")))
        try:
            resumed(run)
        except EXPECTED as error:
            refusals.append(str(error))
        shutil.rmtree(run)
    assert len(refusals) > len(numbers) / 2
    assert [text for text in refusals if str(tmp_path) not in text] == []


def test_the_state_as_it_was_is_taken(saved: Path, tmp_path: Path) -> None:
    resumed(with_state(saved, tmp_path / "run", state_of(saved)))


def test_what_is_wrong_is_named(saved: Path, tmp_path: Path) -> None:
    state = state_of(saved)
    state["loop"]["waiting"][0]["rollouts"][0]["reward"] = "1.0"
    with pytest.raises(
        CheckpointError, match=r"state\.json: not what this version saves.*Rollout\.reward cannot be '1.0'"
    ):
        resumed(with_state(saved, tmp_path / "run", state))


def test_a_packed_bomb_stays_packed() -> None:
    import numpy as np

    bomb = pack(np.zeros(1 << 24, np.uint8)) | {"shape": [10]}
    with pytest.raises(ValueError, match="has 10 bytes"):
        unpack(bomb)
