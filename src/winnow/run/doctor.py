"""Checks behind `winnow doctor`: what this machine can do, and a remedy for what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from ..base import __version__
from ..base.files import cache_dir
from ..base.machine import PACKAGE, bfloat16_units, install, processor, usable_threads
from ..env.workers.bubblewrap import SandboxError
from ..env.workers.sandbox import Sandbox, SandboxOptions

GIB = 2**30
LITTLE_DISK, LITTLE_MEMORY = 5 * GIB, 4 * GIB
NVIDIA = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version"))
"""Files that an NVIDIA driver makes."""
NOT_FOR_USERS = ("dev", "bench")


def examine() -> list[dict[str, Any]]:
    """Return a finding per check: `what`, `found`, `remedy` (empty if nothing is missing)."""
    findings = [*_software(), *_processor(), *_room(), *_tools(), *_extras()]
    return [{"what": what, "found": found, "remedy": remedy} for what, found, remedy in findings]


Finding = tuple[str, str, str]


def _software() -> Iterator[Finding]:
    fine = sys.version_info >= (3, 11)
    yield "winnow", __version__, ""
    yield "Python", platform.python_version(), "" if fine else "Python 3.11 or newer"
    yield "PyTorch", torch.__version__, ""


def _processor() -> Iterator[Finding]:
    threads, cores = usable_threads(), os.cpu_count() or 1
    remedy = "OMP_NUM_THREADS or the process's affinity limits it" if threads < cores else ""
    yield "processor", processor(), ""
    yield "threads", f"{threads} of {cores} cores", remedy
    units = bfloat16_units()
    yield "bfloat16", f"fast ({', '.join(units)})" if units else "slow here: dtype: auto computes in float32", ""
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, memory = torch.cuda.mem_get_info(i)
            major, minor = torch.cuda.get_device_capability(i)
            bf16 = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bfloat16"
            kind = f"{torch.cuda.get_device_name(i)}, {memory / GIB:.0f} GiB ({free / GIB:.0f} free)"
            yield f"GPU {i}", f"{kind}, compute capability {major}.{minor}, {bf16}", ""
        return
    remedy = ""
    if any(path.exists() for path in NVIDIA):
        remedy = "check the driver (nvidia-smi)"
        if torch.version.cuda is None:
            remedy = f"this torch ({torch.__version__}) has no CUDA; install the CUDA build: pip install torch"
    yield "GPU", "none; training runs on the processor", remedy


def _room() -> Iterator[Finding]:
    memory = _available_memory()
    if memory is not None:
        little = "models from 100M parameters need more; close other programs" if memory < LITTLE_MEMORY else ""
        yield "memory", f"{memory / GIB:.1f} GiB available", little
    for what, path in (("disk here", Path.cwd()), ("disk of the cache", cache_dir())):
        there = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(there).free
        little = "checkpoints and models need more; see save_total_limit, output_dir and WINNOW_CACHE"
        yield what, f"{free / GIB:.0f} GiB free at {path}", little if free < LITTLE_DISK else ""
        if not os.access(there, os.W_OK):
            yield f"{what}, writing", f"not allowed at {there}", "choose another output_dir, or set WINNOW_CACHE"


def _available_memory() -> int | None:
    """Return bytes; None without /proc/meminfo."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _tools() -> Iterator[Finding]:
    try:
        Sandbox(SandboxOptions(slots=1)).close()
        yield "sandbox", "programs of the Python tool are contained", ""
    except SandboxError as error:
        first, _, rest = str(error).removeprefix("sandbox: ").partition(". ")
        remedy = rest or "install bubblewrap (apt install bubblewrap); only python_tool needs it"
        yield "sandbox", f"none: {first}", remedy
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    remedy = "" if compiler else "apt install g++; only adamw_torch_8bit and _4bit on a CPU need one"
    yield "C++ compiler", compiler or "none", remedy
    offline = [name for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(name, "0") not in ("0", "")]
    yield "hub", f"not asked: {', '.join(offline)} is set" if offline else "asked for names that are not here", ""


def _extras() -> Iterator[Finding]:
    wanted: dict[str, list[Requirement]] = {}
    try:
        declared = distribution(PACKAGE)
    except PackageNotFoundError:
        yield "extras", "unknown: the package is not installed", install("")
        return
    for extra in declared.metadata.get_all("Provides-Extra") or []:
        for text in declared.requires or []:
            needed = Requirement(text)
            if needed.marker and needed.marker.evaluate({"extra": extra}) and not needed.marker.evaluate({"extra": ""}):
                wanted.setdefault(extra, []).append(needed)
    for extra, needs in wanted.items():
        if extra not in NOT_FOR_USERS:
            problems = ", ".join(filter(None, map(_problem, needs)))
            found = problems or ", ".join(f"{need.name} {version(need.name)}" for need in needs)
            yield f"extra {extra}", found, install(extra) if problems else ""


def _problem(need: Requirement) -> str:
    try:
        found = version(need.name)
    except PackageNotFoundError:
        return f"{need.name} is not installed"
    return "" if need.specifier.contains(found, prereleases=True) else f"{need.name} is {found}, not {need.specifier}"
