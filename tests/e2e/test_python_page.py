"""The blocks of docs/python.md, as they stand there, one after the other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def test_the_blocks_of_the_page(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 8
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"block {number} of {PAGE.name}", "exec"), names)
    assert names["metrics"]["step"] == 3
    assert all((tmp_path / "runs" / name / "model" / "config.json").exists() for name in ("a", "stops"))
    assert not (tmp_path / "runs" / "mine" / "model").exists()  # left before max_steps
    assert len(names["groups"]) == 4
    assert len(names["advantages"]) == len(names["teaching"]) > 0
    np.testing.assert_allclose(names["rloo"](np.array([1.0, 0.0, 0.0, 1.0])), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert names["engine"].version == 1
    assert "trained" in capsys.readouterr().out
