"""Weights published as files in the run's directory, and fingerprints that learner and samplers must share."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..base.weights import WeightSource, save_tensors
from ..env.base import Task
from ..env.prompting import tokenizer_digest

KEPT_VERSIONS = 3
"""On disk; a sampler loads the newest one it received a message about."""


def fingerprints(task: Task, tokenizer: Any) -> dict[str, str]:
    """Return digests of what a sampler builds itself and must build as the learner did."""
    return {"task": task.fingerprint(), "tokenizer": tokenizer_digest(tokenizer)}


class Transport:
    """Carries weights from the learner to samplers."""

    version = -1
    """Newest version; -1 before the first."""
    bytes = 0
    """Size of the newest weights."""
    located: Any = None
    """Where samplers find them, as the channel carries it: a path, or a reference of Ray's."""

    def write(self, weights: WeightSource, version: int) -> None:
        """Make these the newest weights that samplers can read."""
        raise NotImplementedError

    def message(self) -> dict[str, Any]:
        """Return the message that locates the newest weights."""
        return {"weights": self.located, "version": self.version, "bytes": self.bytes}

    def remove(self) -> None:
        """Remove all weights."""
        raise NotImplementedError


def read_weights(message: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Load the weights that a message locates."""
    return load_file(message["weights"])


class PublishedWeights(Transport):
    """Weights as safetensors files, written atomically. The first write empties `directory`: until then it may be that
    of another run, which a second start of the same run must leave alone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, weights: WeightSource, version: int) -> None:
        if self.located is None:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        writing, file = self.directory / ".writing", self.directory / f"{version}.safetensors"
        save_tensors(weights, writing)
        writing.rename(file)
        self.located, self.version, self.bytes = str(file), version, file.stat().st_size
        for old in sorted(self.directory.glob("*.safetensors"), key=lambda p: int(p.stem))[:-KEPT_VERSIONS]:
            old.unlink()

    def remove(self) -> None:
        if self.located is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
