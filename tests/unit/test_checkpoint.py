from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from winnow.base.errors import ConfigError
from winnow.run import checkpoint
from winnow.run.checkpoint import CheckpointError


def write_weights(directory: Path) -> None:
    (directory / "model").mkdir()
    (directory / "model" / "weights.bin").write_bytes(bytes(range(256)))


def save(run: Path, step: int, keep: int = 3) -> Path:
    return checkpoint.save(run, step, {"step": step}, write_weights, keep_last=keep)


def test_round_trip_and_keep_last(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert checkpoint.steps(tmp_path) == [3, 4]
    latest = checkpoint.latest(tmp_path)
    assert latest is not None
    assert checkpoint.parsed(latest / checkpoint.STATE) == {"step": 4}


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "manifest", "no manifest"])
def test_damage_is_refused_and_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    victim = save(tmp_path, 2) / "model" / "weights.bin"
    data = victim.read_bytes()
    if damage == "flip":
        victim.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    elif damage == "truncate":
        victim.write_bytes(data[:-1])
    elif damage == "empty":
        victim.write_bytes(b"")
    elif damage == "remove":
        victim.unlink()
    else:
        victim = victim.parents[1] / "manifest.json"
        victim.write_text("{") if damage == "manifest" else victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name) as caught:
        checkpoint.latest(tmp_path)
    assert "step 1" in str(caught.value), "it names the checkpoint that could be used instead"


def test_a_failed_save_leaves_the_others(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def full_disk(directory: Path) -> None:
        (directory / "part").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(tmp_path, 2, {}, full_disk, keep_last=1)
    assert checkpoint.steps(tmp_path) == [1]
    assert not list((tmp_path / "checkpoints").glob(".writing*"))
    assert checkpoint.latest(tmp_path) is not None


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".writing-step-000009"
    leftover.mkdir(parents=True)
    save(tmp_path, 1)
    assert not leftover.exists()
    assert checkpoint.steps(tmp_path) == [1]


def test_a_state_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.save(tmp_path, 1, {"x": float("nan")}, write_weights, keep_last=1)
    assert checkpoint.steps(tmp_path) == []


def test_reader_of_a_running_run_keeps_what_it_reads(tmp_path: Path) -> None:
    """`winnow eval` of a run that saves and rotates all the time: always a whole checkpoint, and always a new one."""
    save(tmp_path, 1, keep=1)
    stop = threading.Event()

    def run() -> None:
        step = 2
        while not stop.is_set():
            save(tmp_path, step, keep=1)
            step += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        seen = []
        for _ in range(200):
            with checkpoint.newest_model(tmp_path) as (model, _):
                directory = model.parent
                while directory.name == f"step-{checkpoint.steps(tmp_path)[-1]:06d}":
                    assert thread.is_alive(), "a save failed beside a reader"
                    time.sleep(0.001)  # until the run has taken it away
                assert (directory / "model" / "weights.bin").read_bytes() == bytes(range(256))
                assert checkpoint.parsed(directory / checkpoint.STATE)["step"] == int(directory.name[5:])
                seen.append(directory.name)
    finally:
        stop.set()
        thread.join()
    assert seen == sorted(set(seen))
    assert not list((tmp_path / "checkpoints").glob(".reading-*"))


def test_held_checkpoint_may_be_absent_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished model or checkpoint yet"), checkpoint.newest_model(tmp_path):
        pass
    weights = save(tmp_path, 1) / "model" / "weights.bin"
    weights.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=str(weights)), checkpoint.newest_model(tmp_path):
        pass


def test_links_that_a_killed_reader_left_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    left, used = (tmp_path / "checkpoints" / name for name in (".reading-old", ".reading-new"))
    left.mkdir()
    used.mkdir()
    os.utime(left, (0, 0))
    save(tmp_path, 2)
    assert (left.exists(), used.exists()) == (False, True)


def test_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a directory")
    with pytest.raises(CheckpointError, match=r"checkpoints: cannot be read \(Not a directory\)"):
        checkpoint.latest(tmp_path)
