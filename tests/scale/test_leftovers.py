"""What faults leave behind on a machine: processes, shared memory, temporary files. Real Ray, vLLM and ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from .. import parity
from ..builders.nodes import restarts, rows, wait_for

pytest.importorskip("ray")
pytest.importorskip("vllm")

MARK = "WINNOW_TEST_RUN"
ENGINE = {"name": "vllm", "slots": 16, "max_length": 64, "args": {"kv_cache_memory_bytes": 1 << 26}}
TRAIN = "import json, sys; from winnow import Trainer; Trainer(config=json.loads(sys.argv[1])).train()"
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


class Run:
    """A driver in a process of its own; what belongs to it is known by a variable and by its temporary directory."""

    def __init__(self, config: dict[str, Any], tmp: Path, log_file: Path) -> None:
        self.config, self.tmp, self.mark, self.log_file = config, tmp, uuid4().hex, log_file
        env = os.environ | {MARK: self.mark, "TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}
        log = log_file.open("w")
        self.driver = subprocess.Popen(
            [sys.executable, "-c", TRAIN, json.dumps(config)], env=env, stdout=log, stderr=log
        )
        self.mapped_before = set(os.listdir("/dev/shm"))

    def processes(self, name: str = "") -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
                if mine and name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def left(self) -> dict[str, list[str]]:
        """Shared memory that others make meanwhile is mapped by a process of theirs."""
        shared = {name for name in os.listdir("/dev/shm") if name.startswith("psm_")} - self.mapped_before
        for process in psutil.process_iter() if shared else []:
            with contextlib.suppress(psutil.Error, OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                shared -= {name for name in shared if name in maps and process.environ().get(MARK) != self.mark}
        names = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it may end meanwhile
                names.append(" ".join(process.cmdline())[:80])
        return {
            "processes": names,
            "shared memory": sorted(shared),
            "files": sorted(path.name for path in self.tmp.iterdir() if path.name not in ("ray", "torchinductor_root")),
        }

    def steps(self, n: int) -> bool:
        """Whether it has made so many; AssertionError, with what it printed, when it has ended before."""
        log = self.log_file.read_text()
        assert self.driver.poll() is None or len(rows(self.config)) >= n, log[-2000:]
        return len(rows(self.config)) >= n

    def stop(self) -> None:
        self.driver.send_signal(signal.SIGINT)
        self.driver.wait(timeout=120)


@pytest.fixture
def run(tiny_config: dict[str, Any], wide_model: Path, tmp_path: Path) -> Iterator[Run]:
    sync = {"name": "ray", "samplers": 1, "timeout_s": 20}
    learner = {"name": "fsdp", "ranks": 2, "timeout_s": 20}
    endless = {"max_steps": 100_000, "max_skipped_steps": 100_000, "save_steps": 100_000, "eval_steps": None}
    config = tiny_config | endless | {"model": str(wide_model), "engine": ENGINE, "sync": sync, "learner": learner}
    config |= {"max_lag": 1, "correction": "truncate", "reward_timeout_s": 5.0}
    tmp = Path(tempfile.mkdtemp())  # short: the paths of Ray's sockets are limited
    found = Run(config | {"reward_funcs": [f"{parity.__file__}:parity_reward"]}, tmp, tmp_path / "driver.log")
    yield found
    for process in found.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()
    shutil.rmtree(tmp, ignore_errors=True)


def nothing(run: Run, seconds: float = 30) -> dict[str, list[str]]:
    """What is left after so many seconds at most."""
    deadline = time.monotonic() + seconds
    while any(left := run.left().values()) and time.monotonic() < deadline:
        time.sleep(0.5)
    del left
    return run.left()


NONE: dict[str, list[str]] = {"processes": [], "shared memory": [], "files": []}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sampler(run: Run, fault: signal.Signals) -> None:
    wait_for(lambda: run.steps(2))
    [sampler] = run.processes("ray::SamplerActor")
    sampler.send_signal(fault)
    wait_for(lambda: restarts(run.config) >= 1)
    run.stop()
    assert nothing(run) == NONE


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank(run: Run, fault: signal.Signals) -> None:
    wait_for(lambda: run.steps(2))
    run.processes("ray::Rank")[0].send_signal(fault)
    assert run.driver.wait(timeout=120) == 1
    assert nothing(run) == NONE


@pytest.mark.slow
def test_the_driver(run: Run) -> None:
    """Two agents of Ray itself look for its raylet once a minute."""
    wait_for(lambda: run.steps(2))
    run.driver.kill()
    run.driver.wait()

    def agents_alone() -> bool:
        return all("agent" in name for name in run.left()["processes"])

    wait_for(agents_alone, 30)
    assert nothing(run, 90) == NONE


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
