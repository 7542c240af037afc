"""What bounds reward code: memory, the environment that it sees, and, where it is asked for, bubblewrap around it."""

from __future__ import annotations

import os
import shutil
import site
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import psutil
import pytest

from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.env.rewards.rewarder import Rewarder
from winnow.env.rewards.workers import RewardWorkers
from winnow.env.workers import bwrap_worker
from winnow.env.workers.bubblewrap import SandboxError
from winnow.env.workers.bwrap_worker import Cage
from winnow.env.workers.sandbox import Sandbox, SandboxOptions
from winnow.env.workers.worker import WorkerError, WorkerPool
from winnow.run.build import build_rewarder
from winnow.run.inputs import build_task
from winnow.types import Group, Prompt, Rollout, Verdict, Visit

from ..builders.rewards import score_all

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

CODE = """
import os, socket, subprocess
def one(completions, **_): return [1.0] * len(completions)
def wrong(completions, **_):
    return [{}["answer"] for _ in completions]
def big(completions, **_):
    held = bytearray(400 << 20)
    return [1.0] * len(completions)
def forks(completions, **_):
    os.fork()
    return [1.0] * len(completions)
def key(completions, **_): return [float(os.environ["JUDGE_KEY"])] * len(completions)
def keys(completions, **_): return [float("SECRET" in os.environ)] * len(completions)
def look(path): return sorted(os.listdir(path))
def write(path): open(path, "w").write("x")
def read(path): return open(path).read()
def connect(port): socket.create_connection(("127.0.0.1", port), 2); return "connected"
def user(): return os.getuid()
def daemon():
    subprocess.Popen(["/bin/sh", "-c", "exec sleep 987654"], start_new_session=True)
    return "started"
"""


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    """A directory that every user may enter, as pytest's own is not."""
    directory = Path(f"/tmp/winnow-cage-{os.getpid()}")
    directory.mkdir()
    directory.chmod(0o755)
    (directory / "judged.py").write_text(CODE)
    yield directory
    shutil.rmtree(directory)


def group() -> Group:
    rollouts = [
        Rollout(i, (1,), np.arange(3), np.ones(3, bool), np.zeros(3, np.float32), np.zeros(3, np.int32), text="x")
        for i in range(2)
    ]
    return Group(Visit(0, 0, Prompt("p", 0, "q"), Verdict(True)), rollouts)


def scored(code: Path, name: str, workers: RewardWorkers | None = None, calls: int = 1) -> list[Rollout]:
    rewarder = Rewarder(f"{code / 'judged.py'}:{name}", timeout_s=20, workers=workers or RewardWorkers(1))
    try:
        groups = [group() for _ in range(calls)]
        for one in groups:
            score_all(rewarder, [one])
    finally:
        rewarder.close()
    return [rollout for one in groups for rollout in one.rollouts]


def test_memory_is_bounded_and_the_next_call_has_a_worker(code: Path) -> None:
    found = scored(code, "big", RewardWorkers(1, memory_mb=256))
    assert [r.reward for r in found] == [None, None]
    assert "MemoryError" in found[0].reason
    assert [r.reward for r in scored(code, "big", RewardWorkers(1, memory_mb=1024))] == [1.0, 1.0]


def test_a_reward_that_raises_names_its_line(code: Path) -> None:
    found = scored(code, "wrong")
    assert found[0].reason == "reward wrong: KeyError: 'answer' (judged.py:5)"

    def here(completions: list[str], **_: object) -> list[float]:
        raise KeyError("answer")

    rewarder = Rewarder(here)
    judged = group()
    score_all(rewarder, [judged])
    rewarder.close()
    line = here.__code__.co_firstlineno + 1
    assert judged.rollouts[0].reason == f"reward here: KeyError: 'answer' ({os.path.relpath(__file__)}:{line})"


def test_a_reward_that_forks_is_scored_again_and_again(code: Path) -> None:
    assert [r.reward for r in scored(code, "forks", calls=4)] == [1.0] * 8


def test_only_what_reward_env_names_is_seen(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "0.25")
    monkeypatch.setenv("SECRET", "0.5")
    assert "KeyError: 'JUDGE_KEY'" in scored(code, "key")[0].reason
    workers = RewardWorkers(1, env=("JUDGE_KEY",))
    assert scored(code, "key", workers)[0].reward == 0.25
    assert scored(code, "keys", workers)[0].reward == 0.0
    with pytest.raises(ValueError, match="reward_env: not set in the environment: JUDGE_KEZ"):
        RewardWorkers(1, env=("JUDGE_KEZ",)).pool([], 1.0)


def test_the_settings_reach_the_workers(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "0.75")
    values = {"model": "m", "env": "countdown", "reward_funcs": [f"{code / 'judged.py'}:key"]}
    config = validate({**values, "reward_env": ["JUDGE_KEY"], "reward_memory_mb": 512})
    rewarder = build_rewarder(config, build_task(config.env))
    judged = group()
    score_all(rewarder, [judged])
    assert (judged.rollouts[0].reward, rewarder._pool.memory_mb) == (0.75, 512)
    rewarder.close()
    with pytest.raises(ConfigError, match="reward_sandbox"):
        validate({**values, "reward_sandbox": "firejail"})


# ---- bubblewrap around them ---------------------------------------------------------------------------------------


def caged(code: Path) -> Cage:
    """As root, an interpreter in root's home cannot be used; then Debian's, which is of the same version or skipped."""
    try:
        return Cage([str(code)])
    except SandboxError:
        assert os.geteuid() == 0
        return Cage([str(code)], python="/usr/bin/python3")


@pytest.fixture
def pool(code: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    import winnow

    "x".encode("idna")  # loaded now, while the standard library can be found
    own = [str(Path(winnow.__file__).parents[1]), *site.getsitepackages()]
    monkeypatch.setattr(sys, "path", own)
    monkeypatch.chdir(code)
    monkeypatch.setattr(bwrap_worker, "FIRST_SLOT", 256 + 16 * (os.getpid() % 250))
    pool = WorkerPool(1, 10.0, cage=caged(code))
    yield pool
    pool.close()


@needs_bubblewrap
def test_a_caged_worker_sees_and_changes_nothing_else(pool: WorkerPool, code: Path, tmp_path: Path) -> None:
    def ask(name: str, **kwargs: object) -> object:
        return pool.call(f"judged:{name}", kwargs).result(60)

    def refused(name: str, **kwargs: object) -> str:
        with pytest.raises(WorkerError) as caught:
            ask(name, **kwargs)
        return str(caught.value)

    assert ask("one", completions=["a"]) == [1.0]
    assert ask("look", path=str(code)) == ["judged.py"]
    assert "judged.py" not in str(ask("look", path="/tmp")).replace(code.name, "")
    (tmp_path / "secret").write_text("hunter2")
    assert "FileNotFoundError" in refused("read", path=str(tmp_path / "secret"))
    assert "FileNotFoundError" in refused("read", path="/etc/passwd")
    assert "Read-only file system" in refused("write", path=str(code / "new"))
    assert "Read-only file system" in refused("write", path="/new")
    mark = Path("/tmp") / f"new-{uuid4()}"
    ask("write", path=str(mark))
    assert not mark.exists()
    assert ask("user") == 65_534


@needs_bubblewrap
def test_a_caged_worker_has_no_network(pool: WorkerPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(WorkerError, match=r"OSError|ConnectionRefused|Network is unreachable"):
            pool.call("judged:connect", {"port": port}).result(60)


@needs_bubblewrap
def test_what_a_caged_worker_starts_ends_with_it(pool: WorkerPool) -> None:
    def sleeping() -> list[int]:
        return [p.pid for p in psutil.process_iter() if "987654" in _command(p)]

    def soon(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 10
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        return condition()

    assert pool.call("judged:daemon", {}).result(60) == "started"
    assert soon(lambda: bool(sleeping()))  # the shell becomes `sleep` a moment later
    pool.close()
    assert soon(lambda: not sleeping())


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) if process.name() == "sleep" else ""
    except psutil.Error:
        return ""


def test_objects_are_refused_beside_the_cage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RewardWorkers, "pool", lambda self, *_: WorkerPool())

    def own(completions: list[str], **_: object) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match=r"reward_sandbox: own was given as a Python object.*module:function"):
        Rewarder(own, workers=RewardWorkers(1, sandbox="bwrap"))
    Rewarder("exact", workers=RewardWorkers(1, sandbox="bwrap")).close()


@needs_bubblewrap
def test_a_home_directory_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    with pytest.raises(SandboxError, match=r"reward_sandbox: Python imports from .*start from a directory of its own"):
        Cage()


# ---- the sandbox of programs that models write --------------------------------------------------------------------


@needs_bubblewrap
def test_files_are_counted_and_the_machine_is_not_told() -> None:
    sandbox = Sandbox(SandboxOptions(files=50))
    try:
        many = sandbox.run("for i in range(300_000): open(f'/tmp/{i}', 'w').close()")
        seen = sandbox.run("import os, platform\nprint(platform.node(), os.listdir('/usr/local'), os.listdir('/tmp'))")
    finally:
        sandbox.close()
    assert "No space left on device: '/tmp/49'" in many.stderr
    assert seen.stdout == "sandbox [] ['main.py']\n"
