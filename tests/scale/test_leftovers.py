"""What a killed process with a vLLM engine leaves behind: no temporary files, no shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from .test_nodes import wait_for

pytest.importorskip("vllm")

SCRATCH = """
import os, sys, tempfile
from multiprocessing.shared_memory import SharedMemory
from winnow.engine.vllm.scratch import Scratch
scratch = Scratch()
with scratch.used():
    tempfile.mkstemp()
    shared = SharedMemory(create=True, size=4096)
print(scratch.path, shared.name, flush=True)
sys.stdin.read()
"""


def test_a_killed_engine_leaves_neither_files_nor_shared_memory() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRATCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder, shared = process.stdout.readline().split()
    paths = [Path(folder), Path("/dev/shm", shared)]
    assert [path.exists() for path in paths] == [True, True]
    for child in psutil.Process(process.pid).children():
        child.kill()  # Ray ends the children of a process that it kills, Python's own cleaner of shared memory, too
    process.kill()
    process.wait()
    wait_for(lambda: not any(path.exists() for path in paths), 10)
