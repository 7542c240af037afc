"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from winnow.base.processor import processor


def machine(device: str, *packages: str) -> dict[str, Any]:
    """Processor, cores, load and versions, as benchmarks keep them beside their figures."""
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_at_start": os.getloadavg()[0],
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "winnow-rl", *packages)},
    }


def matmul_rate(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> float:
    """FLOP/s of a large matrix product with the threads that are set, the best of a few."""
    a = torch.randn(2048, 2048).to(dtype)
    times = []
    for _ in range(12):
        started = clock()
        a @ a
        times.append(clock() - started)
    return 2 * 2048**3 / min(times)
