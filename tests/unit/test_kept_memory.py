"""`keep_freed_memory`: what tensors freed is used again, and not fetched from the kernel page by page."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from winnow.base.machine import keep_freed_memory
keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    for _ in range(10):
        held = [torch.ones(2 << 20) for _ in range(6)]
        del held
use()
before = faults()
use()
print(faults() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again() -> None:
    """Whether glibc gives it back by default depends on the kernel's large pages, so that is not compared."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, check=True)
    pages = 10 * 6 * (8 << 20) // 4096
    assert int(done.stdout) < pages / 10
