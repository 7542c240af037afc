"""Published weights as safetensors files in the run's directory: written whole, read by mapping, removed when old."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

KEPT = 3
"""Versions on disk: a sampler that comes late to one has been told of a newer one by then."""


class PublishedWeights:
    """`directory` is emptied at the start: what a killed run left there is of no use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.version = -1
        shutil.rmtree(directory, ignore_errors=True)

    def path(self, version: int) -> Path:
        return self.directory / f"{version}.safetensors"

    def write(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        apart = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}  # tied weights share storage
        writing = self.directory / ".writing"
        save_file(apart, writing)
        writing.rename(self.path(version))
        self.version = version
        for old in sorted(self.directory.glob("*.safetensors"), key=lambda p: int(p.stem))[:-KEPT]:
            old.unlink()

    def newest(self) -> dict[str, torch.Tensor]:
        return load_file(self.path(self.version))

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
