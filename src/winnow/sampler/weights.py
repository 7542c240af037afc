"""What learner and samplers must agree on: weights, published as files in the run's directory, and where all starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..base.weights import WeightSource
from ..env.base import Task
from ..env.prompting import tokenizer_digest

KEPT = 3
"""Versions on disk; a sampler takes the newest that it was told of."""


def fingerprints(task: Task, tokenizer: Any) -> dict[str, str]:
    """Of what a sampler builds for itself, and must build as the learner did."""
    return {"task": task.fingerprint(), "tokenizer": tokenizer_digest(tokenizer)}


class PublishedWeights:
    """Safetensors, written whole. `directory` is emptied at the start: what a killed run left there is of no use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.version = -1
        shutil.rmtree(directory, ignore_errors=True)

    def path(self, version: int) -> Path:
        return self.directory / f"{version}.safetensors"

    def write(self, weights: WeightSource, version: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        apart = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}  # tied weights share storage
        writing = self.directory / ".writing"
        save_file(apart, writing)
        writing.rename(self.path(version))
        self.version = version
        for old in sorted(self.directory.glob("*.safetensors"), key=lambda p: int(p.stem))[:-KEPT]:
            old.unlink()

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
