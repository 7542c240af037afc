"""The tutorial of a cluster from top to bottom, and the tokens by which Ray knows who may join."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from winnow.base import cluster

from ..e2e import test_pages as pages

ray = pytest.importorskip("ray")

TEXT = (pages.ROOT / "docs" / "tutorial-cluster.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a user who never ran Ray; its nodes end with the test."""
    found, sessions = tmp_path / "home", Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # sockets have short paths
    found.mkdir()
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": found, "RAY_TMPDIR": sessions, "PATH": f"{BIN}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    yield found
    ray.shutdown()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(sessions) in " ".join(process.cmdline()):
                process.kill()
    for name in ("RAY_AUTH_MODE", cluster.TOKEN):
        os.environ.pop(name, None)  # set by Ray
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # a later test of this process has another


@pytest.fixture
def address(home: Path) -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def typed(lines: list[str], address: str) -> str:
    """What a shell prints; another port than that of the page, which may be taken."""
    script = "set -e\n" + "\n".join(lines).replace("6379", address.partition(":")[2])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines_of_ray() -> list[str]:
    """All but `ray stop`, which would end the nodes of other tests."""
    return [line for line in re.findall(r"^ {4}((?:ray|export) .*)$", TEXT, re.MULTILINE) if "ray stop" not in line]


def test_the_tutorial_of_a_cluster(home: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that it exports is not set here: as in a second terminal."""
    said = typed(lines_of_ray(), address)
    assert said.count("Ray runtime started") == 2
    monkeypatch.setenv("RAY_ADDRESS", address)  # what `auto` finds: others may use this machine
    assert pages.make_files(TEXT) == ["cluster.yaml"]
    Path("runs").mkdir()
    shorter = pages.SHORTER | {"train": ["max_steps=2", "save_steps=1", "filter=keep_all"], "resume": ["max_steps=3"]}
    assert pages.run_commands(TEXT, shorter) == [
        *("warm-start", "cluster", "train", "train", "resume", "verify", "report")
    ]
    assert Path("cluster.html").exists()
    assert Path("runs/cluster/model").is_dir()


def test_an_address_is_joined_with_the_token_that_is_there(home: Path, address: str) -> None:
    """Without one, or with another, the error says where it goes."""
    typed(lines_of_ray()[:3], address)
    check = ["winnow", "cluster", "check", "--address", address]
    done = subprocess.run(check, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for other in ({"HOME": str(home / "other")}, {"RAY_AUTH_MODE": "token", "HOME": "/nowhere"}, {cluster.TOKEN: "x"}):
        done = subprocess.run(check, capture_output=True, text=True, timeout=300, env=os.environ | other)
        assert done.returncode == 1
        assert f"ray_address={address}: " in done.stderr
        assert "`ray get-auth-token`" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_cluster_of_a_run_leaves_no_token(home: Path, tiny_config: dict[str, object]) -> None:
    """Nor anything else, when it was only planned; its actors authenticate all the same."""
    sync = {"name": "ray", "samplers": 1}
    changes = {"sync": sync, "learner": {"name": "fsdp", "ranks": 2}, "max_lag": 1, "correction": "truncate"}
    Path("run.yaml").write_text(yaml.safe_dump(tiny_config | changes), encoding="utf-8")
    done = subprocess.run(["winnow", "train", "run.yaml", "--dry-run"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (home / ".ray").exists()
    assert [path for path in Path(os.environ["RAY_TMPDIR"]).rglob("*") if path.is_file()] == []
    done = subprocess.run(["winnow", "train", "run.yaml"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (home / ".ray").exists()
