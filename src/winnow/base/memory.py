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
    """Return `gpu_memory_gib`, the peak GiB of this process's tensors on its GPU; empty without a GPU in use."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    return {"gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30}


def gpu_memory_since(device: Any) -> dict[str, float]:
    """Return GiB of this process's tensors on the GPU, now and at the peak since the last call; empty on a CPU."""
    import torch

    if device.type != "cuda":
        return {}
    held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"gpu/memory_gib": held / 2**30, "gpu/peak_memory_gib": peak / 2**30}


def resident_mib() -> float:
    """Return resident MiB, shared pages included; the peak where Linux does not report the current value."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def heap_frozen() -> Iterator[None]:
    """Exclude all existing objects (modules, prompts) from the body's garbage collections, which would walk them.

    With many samplers that walk was a quarter of the driver's time. A heap that the caller has frozen stays as it is:
    the collector can only unfreeze everything.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
