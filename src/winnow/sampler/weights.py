"""Weights published as files in the run's directory, and fingerprints on which learner and samplers must agree."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

from ..base.weights import WeightSource, save_tensors
from ..env.base import Task
from ..env.prompting import tokenizer_digest

KEPT = 3
"""Versions on disk; a sampler takes the newest that it was told of."""


def fingerprints(task: Task, tokenizer: Any) -> dict[str, str]:
    """Digests of what a sampler builds for itself, and must build as the learner did."""
    return {"task": task.fingerprint(), "tokenizer": tokenizer_digest(tokenizer)}


class Transport(Protocol):
    """How weights come from the learner to samplers."""

    version: int
    """That of the newest; -1 before there are any."""
    bytes: int
    """Size of the newest."""

    def write(self, weights: WeightSource, version: int) -> None:
        """Make them the newest that samplers can read."""
        ...

    def told(self) -> dict[str, Any]:
        """Message that says where the newest weights are: `weights`, as the channel carries it, and `version`."""
        ...

    def remove(self) -> None: ...


def read_weights(told: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights that a sampler was told of."""
    return load_file(told["weights"])


class PublishedWeights:
    """Safetensors, written whole. `directory` is emptied at the start: what a killed run left there is of no use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.version = -1
        self.bytes = 0
        shutil.rmtree(directory, ignore_errors=True)

    def path(self, version: int) -> Path:
        return self.directory / f"{version}.safetensors"

    def told(self) -> dict[str, Any]:
        return {"weights": str(self.path(self.version)), "version": self.version}

    def write(self, weights: WeightSource, version: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        writing = self.directory / ".writing"
        save_tensors(weights, writing)
        writing.rename(self.path(version))
        self.version, self.bytes = version, self.path(version).stat().st_size
        for old in sorted(self.directory.glob("*.safetensors"), key=lambda p: int(p.stem))[:-KEPT]:
            old.unlink()

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
