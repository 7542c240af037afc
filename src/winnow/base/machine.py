"""This machine and this process: processor, memory, imports of large libraries, install commands of extras."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import platform
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

GIB, MIB = 2**30, 2**20
CPUINFO = Path("/proc/cpuinfo")
LIMITS = Path("/sys/fs/cgroup")
"""Of the container, where there is one: files of control groups, version 2."""
FAST = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""CPU flags that decide which dtype is fast."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
KEPT_FREE, LARGEST_KEPT = 64 * MIB, 32 * MIB
"""glibc allows no larger `LARGEST_KEPT`."""


def main_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or fewer in a container with a limit."""
    memory, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _limit("memory.max")
    return min(memory, limit[0]) if limit else memory


def _limit(name: str) -> list[int]:
    """Return the numbers of a container's limit; empty without one."""
    try:
        return [int(number) for number in (LIMITS / name).read_text(encoding="ascii").split()]
    except (OSError, ValueError):  # `max`
        return []


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
    """Return OMP_NUM_THREADS if set, else `usable_cores`."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if said.isdigit() and int(said):
        return int(said)
    return usable_cores()


def usable_cores() -> int:
    """Return the cores that this process may use, or its container's share of them; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _limit("cpu.max")  # microseconds of all cores in each period, and the period
    return max(1, min(cores, share[0] // share[1])) if share else cores


def _first_core() -> dict[str, str]:
    """Return the fields of the first core in /proc/cpuinfo; empty without that file."""
    info = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    lines = [line.partition(":") for line in info.splitlines()]
    return {key.strip(): value.strip() for key, _, value in reversed(lines) if key.strip()}


def _flags(said: Mapping[str, str]) -> list[str]:
    return said.get("flags", said.get("Features", "")).split()


def gpu_gib() -> dict[str, float]:
    """Return `gpu_memory_gib`, the peak GiB of this process's tensors on its GPU; empty without a GPU in use."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    return {"gpu_memory_gib": torch.cuda.max_memory_allocated() / GIB}


def gpu_memory_since(device: Any) -> dict[str, float]:
    """Return GiB of the GPU in use by all processes, now and at the peak since the last call; empty on a CPU.

    The peak adds what this process's PyTorch has freed since its own peak: it does not see another allocator's memory,
    such as that of a sleeping vLLM.
    """
    import torch

    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    freed = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"gpu/memory_gib": (total - free) / GIB, "gpu/peak_memory_gib": min(total, total - free + freed) / GIB}


def resident_mib() -> float:
    """Return resident MiB, shared pages included; the peak where Linux does not report the current value."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def keep_freed_memory() -> None:
    """Keep up to `KEPT_FREE` freed bytes of tensors of up to `LARGEST_KEPT` bytes in this process.

    By default glibc returns much of it to the kernel after every operation, and getting it back, zeroed page by page,
    took 10% of the processor time of a small model's update. Elsewhere than in glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE)


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


NOISY = ("torchao", "torch.utils._pytree")
"""torchao names its kernels for absent GPUs; torch logs a deprecated call of torchao's."""


def quiet_imports() -> None:
    """Silence noisy loggers and progress bars in our own processes; a program that imports the package keeps both."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers follows it
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Disable garbage collection, a sixth of the import time: these objects last as long as the process."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


PACKAGE = "winnow-rl"


def install(extra: str) -> str:
    """Return the command that installs `extra` (empty for the package alone) from this copy's origin: its checkout,
    directory, wheel or address."""
    extras = f"[{extra}]" if extra else ""
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}{extras}'"
    try:
        text = distribution(PACKAGE).read_text("direct_url.json")  # PEP 610; absent for a package of an index
    except PackageNotFoundError:
        text = None
    origin = json.loads(text) if text else {}
    vcs, url = origin.get("vcs_info", {}).get("vcs"), origin.get("url")
    source = f" @ {vcs}+{url}" if vcs else f" @ {url}"
    return f"pip install '{PACKAGE}{extras}{source if url else ''}'"
