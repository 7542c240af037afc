"""What the children of the tests' fork servers run: orders over standard input, answers over standard output."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np


def main() -> None:
    for line in sys.stdin:
        order = line.strip()
        if order == "draw":
            print(random.random(), np.random.random(), flush=True)
        elif order == "start":
            print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
        elif order == "environment":
            print(os.environ.get("COLOUR"), os.getpgid(0) == os.getpid(), os.getcwd(), flush=True)
        elif order == "fail":
            raise ValueError("on order")
        elif order.startswith("exit"):
            sys.exit(int(order.split()[1]))


def _no_room() -> int:
    raise BlockingIOError(11, "no room")


def crowded() -> None:
    """Never run: its server cannot fork."""


if os.environ.get("CROWDED"):
    os.fork = _no_room
