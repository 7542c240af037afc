"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
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
