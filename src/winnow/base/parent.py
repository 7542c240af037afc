"""Processes that must not outlive the one that started them. Imports nothing heavy: it comes before all else there."""

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
