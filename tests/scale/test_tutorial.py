"""The tutorial of a cluster from top to bottom; its nodes are started and ended by the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..e2e import test_pages as pages
from .test_nodes import cluster  # noqa: F401

pytest.importorskip("ray")


@pytest.mark.parametrize("cluster", [[3, 3]], indirect=True)
def test_the_tutorial_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Any) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)  # what `auto` finds
    text = (pages.ROOT / "docs" / "tutorial-cluster.md").read_text(encoding="utf-8")
    assert pages.make_files(text) == ["cluster.yaml"]
    Path("runs").mkdir()
    shorter = pages.SHORTER | {"train": ["max_steps=2", "save_steps=1", "filter=keep_all"], "resume": ["max_steps=3"]}
    assert pages.run_commands(text, shorter) == [
        *("warm-start", "cluster", "train", "train", "resume", "verify", "report")
    ]
    assert Path("cluster.html").exists()
    assert Path("runs/cluster/model").is_dir()
