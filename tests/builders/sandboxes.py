"""Limits of a sandbox, and programs that try to leave it."""

from __future__ import annotations

import os

import psutil

from winnow.env.workers.bubblewrap import FIRST_UID
from winnow.env.workers.sandbox import SandboxOptions

OPTIONS = SandboxOptions(timeout_s=3.0, memory_mb=128, disk_mb=4, max_output=10_000)


OWN_UID = FIRST_UID + 16 * (1 + os.getpid() % 250)
"""Other tests use the sandbox meanwhile, in other processes; nobody else has these users."""


def inside() -> list[psutil.Process]:
    """Processes of the slots' users, and bubblewraps of this process."""
    mine = {p.pid for p in psutil.Process().children(recursive=True)}
    found = []
    for p in psutil.process_iter(["uids"]):
        uids = p.info["uids"]
        if (uids and OWN_UID <= uids.real < OWN_UID + 16) or (p.pid in mine and "bwrap" in p.name()):
            found.append(p)
    return found


FORK_BOMB = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
