from __future__ import annotations

import errno
from pathlib import Path

import pytest

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
    assert checkpoint.load_state(latest) == {"step": 4}


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
