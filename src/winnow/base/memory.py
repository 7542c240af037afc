"""Memory of this process."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def gpu_gib() -> dict[str, float]:
    """`gpu_memory_gib`: most GiB of its GPU that this process's tensors have held; nothing without a GPU in use."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    return {"gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30}


def gpu_memory_since(device: Any) -> dict[str, float]:
    """Return GiB that this process's tensors hold on the GPU, and most since the last call; nothing on a CPU."""
    import torch

    if device.type != "cuda":
        return {}
    held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"gpu/memory_gib": held / 2**30, "gpu/peak_memory_gib": peak / 2**30}


def resident_mib() -> float:
    """MiB that it holds in memory, shared pages among them; the most that it ever held where Linux does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def heap_frozen() -> Iterator[None]:
    """Leave modules, prompts and all else that exists now out of the body's garbage collections, which walk them."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
