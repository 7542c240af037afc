"""What a process asks of the kernel for itself. Imports nothing heavy: it comes before all else there."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with(parent: int) -> None:
    """Linux: be killed when the parent's thread ends, also while a C call holds the interpreter."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def call_itself(name: str) -> None:
    """Linux: what `top` and `ps -o comm` show, up to 15 characters."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode())
