"""The processor: its name, what it computes fast, and how many threads this process may use of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FAST = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""What decides which number type is fast."""


def cpu_info() -> str:
    """The text of /proc/cpuinfo; empty where there is none."""
    return CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""


def processor(info: str | None = None) -> str:
    """Name of the processor and what it computes fast with. `info`: text of /proc/cpuinfo; None is this machine's."""
    said = _first(cpu_info() if info is None else info)
    if not said:
        return platform.processor() or platform.machine()
    fast = ", ".join(flag for flag in FAST if flag in _flags(said))
    return f"{said.get('model name', platform.machine())} ({fast})"


def bfloat16_units(info: str | None = None) -> list[str]:
    """What multiplies bfloat16 faster than float32: `amx_bf16`, `avx512_bf16`, or nothing."""
    flags = _flags(_first(cpu_info() if info is None else info))
    return [flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags]


def usable_threads(environment: Mapping[str, str] | None = None) -> int:
    """OMP_NUM_THREADS where it is set, else the cores that this process may run on; at least 1."""
    said = (os.environ if environment is None else environment).get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if said.isdigit() and int(said):
        return int(said)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _first(info: str) -> dict[str, str]:
    """What it says of the first core."""
    lines = [line.partition(":") for line in info.splitlines()]
    return {key.strip(): value.strip() for key, _, value in reversed(lines) if key.strip()}


def _flags(said: Mapping[str, str]) -> list[str]:
    return said.get("flags", said.get("Features", "")).split()
