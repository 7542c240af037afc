"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

FAST = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""What decides which number type is fast."""


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


def processor() -> str:
    """Name of the processor and what it computes fast with."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    lines = [line.partition(":") for line in info.read_text(encoding="utf-8").splitlines()]
    said = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    flags = said.get("flags", said.get("Features", "")).split()
    return f"{said.get('model name', platform.machine())} ({', '.join(f for f in FAST if f in flags)})"
