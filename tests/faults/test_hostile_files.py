"""Checkpoints that somebody made: whole by their manifest, but with weights, settings or moments of another kind."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from winnow import Trainer
from winnow.cli.console import EXPECTED

from ..builders.hostile_state import changed, seal
from ..pairs.compose import make_place
from ..pairs.variants import together, variants
from ..pairs.world import World

ANYWHERE = ("not finite; it was not published",)
"""What is told of a weight, not of a file: moments may be any numbers, and only an update shows what they lead to."""


@pytest.fixture(scope="module", params=["whole", "lora"])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run two steps old with a gate that learns, a reference that moves and a sampler that is behind."""
    place = make_place(tmp_path_factory.mktemp("files"))
    chosen = [next(v for v in variants() if v.name == name) for name in ("selector=greso", "gates=arrol")]
    reference = {"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 1} if request.param == "whole" else {}
    settings = {"max_lag": 2, "threads": 1, "max_steps": 2, "save_total_limit": 1} | together(*chosen) | reference
    settings |= {"lora": {"r": 2}} if request.param == "lora" else {}
    Trainer(config=place.config(settings), env=World()).train()
    return place.folder / "whole"


def change(file: Path, rng: random.Random) -> None:
    """One tensor, one setting or one bit is another, or the file is gone."""
    if rng.random() < 0.1:
        file.unlink()
    elif file.suffix == ".safetensors":
        tensors = load_file(file)
        name = rng.choice(sorted(tensors))
        tensor = tensors.pop(name)
        others = {
            "removed": None,
            "renamed": None,
            "short": tensor.reshape(-1)[: max(1, tensor.numel() // 2)].clone(),
            "empty": tensor.new_zeros(0),
            "other type": tensor.to(torch.float64),
            "whole numbers": tensor.to(torch.int64),
            "not finite": torch.full_like(tensor, float("nan")),
            "negative": torch.full_like(tensor, -1),
        }
        kind = rng.choice([*others])
        if kind != "removed":
            tensors[name + "x" * (kind == "renamed")] = tensor if kind == "renamed" else others[kind]
        save_file(tensors, file, metadata={"format": "pt"})
    elif file.suffix == ".json" and (values := json.loads(file.read_text())):
        file.write_text(json.dumps(changed(values, rng)))
    elif data := bytearray(file.read_bytes()):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)


@pytest.mark.parametrize(
    "numbers",
    [
        range(5),
        pytest.param(range(5, 15), marks=pytest.mark.slow),
        pytest.param(range(15, 300), marks=pytest.mark.exhaustive),
    ],
    ids=["few", "more", "many"],
)
def test_any_file_is_refused_by_name_or_trained_with(saved: Path, tmp_path: Path, numbers: range) -> None:
    refusals = []
    for number in numbers:
        rng, run = random.Random(f"file {number}"), tmp_path / "changed"
        shutil.copytree(saved, run)
        (directory,) = (run / "checkpoints").iterdir()
        # any text is a template, and an empty list of frozen parameters has nothing to change
        known = ("manifest.json", "state.json", "chat_template.jinja", "frozen.json")
        file = rng.choice(sorted(p for p in directory.rglob("*") if p.is_file() and p.name not in known))
        change(file, rng)
        seal(directory)
        try:
            Trainer.resume(run, {"max_steps": 3}, env=World()).train()
        except EXPECTED as error:
            refusals.append((number, file, str(error)))
        except Exception as error:
            error.add_note(f"{number}: {file}")
            raise
        shutil.rmtree(run)
    assert len(refusals) > len(numbers) // 20  # few files of a run with adapters can be wrong
    named = [(n, f, text) for n, f, text in refusals if f.name in text or str(tmp_path) in text]
    rest = [(n, f, text) for n, f, text in refusals if (n, f, text) not in named]
    assert [found for found in rest if not any(text in found[2] for text in ANYWHERE)] == []


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("value", [{}, [None], "2", 1.5, True, [2, [3]]])
def test_an_end_that_is_no_token_is_named(saved: Path, tmp_path: Path, value: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (directory,) = (run / "checkpoints").iterdir()
    file = directory / "model" / "generation_config.json"
    if not file.exists():  # beside adapters there is none
        pytest.skip("adapters have no such file")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": value}))
    seal(directory)
    with pytest.raises(ValueError, match=r"eos_token_id of its GenerationConfig is .*, no token id"):
        Trainer.resume(run, {"max_steps": 3}, env=World())


@pytest.mark.parametrize("steps", [-1.0, float("nan"), 1e30])
def test_steps_that_no_optimizer_has_made_are_named(saved: Path, tmp_path: Path, steps: float) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (directory,) = (run / "checkpoints").iterdir()
    file = directory / "optimizer.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(":step"))
    save_file(tensors | {name: torch.full_like(tensors[name], steps)}, file)
    seal(directory)
    with pytest.raises(ValueError, match=r"optimizer\.safetensors: .*:step is "):
        Trainer.resume(run, {"max_steps": 3}, env=World()).train()
