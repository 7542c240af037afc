"""What a run writes is its owner's alone: prompts and answers may be nobody else's business on a shared machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer


@pytest.mark.parametrize("made", [False, True], ids=["new", "a-directory-that-was-there"])
def test_others_read_nothing_of_a_run(tiny_config: dict[str, Any], made: bool) -> None:
    run = Path(tiny_config["output_dir"])
    if made:
        run.mkdir(mode=0o755, parents=True)
        run.chmod(0o755)
    before = os.umask(0o022)
    try:
        Trainer(config=tiny_config | {"max_steps": 2, "save_steps": 1}).train()
    finally:
        os.umask(before)
    assert run.stat().st_mode & 0o777 == (0o755 if made else 0o700)
    entered = [path for path in run.iterdir() if path.is_dir() and path.name != "model"]
    assert [path for path in entered if path.stat().st_mode & 0o077] == []
    assert {path.name for path in entered} == {"checkpoints"}
    files = [path for path in run.iterdir() if path.is_file()]
    assert {"config.json", "ledger.sqlite", "metrics.jsonl", "samples.jsonl"} <= {path.name for path in files}
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []
