"""Sharded tensors in a folder: safetensors with the position of each shard, readable by any number of ranks.

Not PyTorch's own format: its index is a pickle, which can execute code.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..local.optimizer import parameter_of


def save_shards(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the shards. Call it on all ranks at once."""
    folder.mkdir(parents=True, exist_ok=True)
    if state:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_shards(state: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Return `state` filled from `folder`, but for parameters that have nothing there. Call it on all ranks at once.

    Raises ValueError if names, shapes or types differ from `state`, or a shard is missing or damaged.
    """
    try:
        saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder}: cannot be read ({type(error).__name__}: {error})") from None
    if other := sorted(file.name for file in folder.iterdir() if file.suffix != ".safetensors"):
        raise ValueError(f"{folder}: {other[0]} is no part of a saved optimizer. Start a new run")
    if not saved:
        return {}
    known = {parameter_of(name) for name in saved}
    state = {name: tensor for name, tensor in state.items() if parameter_of(name) in known}
    if different := sorted(saved.keys() ^ state.keys())[:3]:
        raise ValueError(f"{folder}: not the optimizer of this model; differs in {different}")
    for name, tensor in state.items():
        if not _is_whole(saved[name], tensor):
            raise ValueError(f"{folder}: not the optimizer of this model; differs in {name}")
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    return state


def load_files(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill `state` from the files of a Hugging Face model; each rank reads its slices. Call it on all ranks at once.

    Raises ValueError if this machine has no such directory, or a file is damaged.
    """
    if not folder.is_dir():
        raise ValueError(f"model: {folder}: is not on {platform.node()}; ranks read it on every machine that has one")
    try:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise ValueError(f"model: {folder}: cannot be read ({next(iter(error.failures.values()))[0]})") from None


def _is_whole(saved: object, tensor: torch.Tensor) -> bool:
    if not isinstance(saved, TensorStorageMetadata):
        return False
    numbers = sum(chunk.sizes.numel() for chunk in saved.chunks)
    return (saved.size, saved.properties.dtype, numbers) == (tensor.shape, tensor.dtype, tensor.numel())
