"""The processor: name, fast instructions, and usable threads."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FAST = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""CPU flags that decide which dtype is fast."""


def processor() -> str:
    """Return the processor's name and `FAST` flags."""
    said = _first_core()
    if not said:
        return platform.processor() or platform.machine()
    fast = ", ".join(flag for flag in FAST if flag in _flags(said))
    return f"{said.get('model name', platform.machine())} ({fast})"


def bfloat16_units() -> list[str]:
    """Return the flags for bfloat16 faster than float32: `amx_bf16`, `avx512_bf16`, or an empty list."""
    flags = _flags(_first_core())
    return [flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags]


def usable_threads() -> int:
    """Return OMP_NUM_THREADS if set, else the cores available to this process; at least 1."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if said.isdigit() and int(said):
        return int(said)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _first_core() -> dict[str, str]:
    """Return the fields of the first core in /proc/cpuinfo; empty without that file."""
    info = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    lines = [line.partition(":") for line in info.splitlines()]
    return {key.strip(): value.strip() for key, _, value in reversed(lines) if key.strip()}


def _flags(said: Mapping[str, str]) -> list[str]:
    return said.get("flags", said.get("Features", "")).split()
