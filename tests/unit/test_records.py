from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.config import validate
from winnow.config.paths import as_saved
from winnow.record.records import METRICS, SAMPLES, Records, RunDirectoryError, lock
from winnow.types import Decision, Token, Verdict

from ..builders.groups import make_group


@pytest.fixture
def settings() -> dict[str, Any]:
    return as_saved(validate({"model": "m", "env": "countdown", "log_completions": 2}))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_beyond_the_checkpoint_are_cut_off(tmp_path: Path, settings: dict[str, Any]) -> None:
    records = Records(tmp_path, settings)
    records.metrics({"step": 1, "reward": 0.5})
    records.samples(1, [make_group(i, [1.0, 0.0]) for i in range(5)], "train")
    offsets = records.offsets()
    records.metrics({"step": 2, "reward": 0.6})
    records.close()
    again = Records(tmp_path, settings, offsets)
    again.metrics({"step": 2, "reward": 0.7})
    again.close()
    assert [m["reward"] for m in read(tmp_path / METRICS)] == [0.5, 0.7]
    assert len(read(tmp_path / SAMPLES)) == 2


def test_a_fresh_run_starts_with_empty_files(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / METRICS).write_text("left over\n")
    Records(tmp_path, settings).close()
    assert (tmp_path / METRICS).read_text() == ""


def test_a_file_that_is_too_short_opens_no_tracker(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would close it: in MLflow and W&B the run would go on."""
    monkeypatch.setattr("winnow.record.records.Trackers", lambda *args: pytest.fail("a tracker was opened"))
    (tmp_path / SAMPLES).write_text("{}\n")
    with pytest.raises(RunDirectoryError, match="has 3 bytes, the checkpoint was saved with 9; restore the file"):
        Records(tmp_path, settings, {METRICS: 0, SAMPLES: 9}, step=1)


def test_metrics_must_be_finite(tmp_path: Path, settings: dict[str, Any]) -> None:
    records = Records(tmp_path, settings)
    with pytest.raises(FloatingPointError, match="reward, loss"):
        records.metrics({"step": 1, "reward": float("nan"), "loss": float("inf")})
    records.close()
    assert (tmp_path / METRICS).read_text() == ""


def test_numbers_of_numpy_are_written_as_plain_ones(tmp_path: Path, settings: dict[str, Any]) -> None:
    """As a gate or metrics of the user's own return them."""
    verdict = Verdict(np.bool_(True), "kept", np.float32(0.5))  # type: ignore[arg-type]
    group = make_group(0, [1.0, 0.0])
    group.rollouts[0].decisions = [Decision("own", Token(3), verdict)]
    records = Records(tmp_path, settings)
    records.metrics({"step": 1, "mine/kept": np.int64(3), "mine/mean": np.float32(0.5)})
    records.samples(1, [group], "train")
    records.close()
    assert read(tmp_path / METRICS) == [{"step": 1, "mine/kept": 3, "mine/mean": 0.5}]
    (decision,) = read(tmp_path / SAMPLES)[0]["decisions"]
    assert (decision["keep"], decision["probability"]) == (True, 0.5)


def test_hostile_completions_are_one_line_each(tmp_path: Path, settings: dict[str, Any]) -> None:
    group = make_group(0, [1.0, 0.0])
    group.rollouts[0].text = "</script>\n\u2028\x00\ud800"
    records = Records(tmp_path, settings)
    records.samples(1, [group], "train")
    records.close()
    (sample,) = read(tmp_path / SAMPLES)
    assert sample["completion"] == group.rollouts[0].text


def test_two_holders_of_one_directory(tmp_path: Path) -> None:
    held = lock(tmp_path)
    with pytest.raises(RunDirectoryError, match="another run"):
        lock(tmp_path)
    held.close()
    lock(tmp_path).close()
