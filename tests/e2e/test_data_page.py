"""docs/data.md as a stranger would use it: its files copied out, its commands run, shorter."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from winnow.cli.main import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
TEXT = PAGE.read_text(encoding="utf-8")
FILES = dict(re.findall(r"```\w+\n# (\w+\.\w+)\n(.*?)```", TEXT, re.DOTALL))
COMMANDS = [shlex.split(line.strip()[len("winnow ") :]) for line in re.findall(r"^\s*winnow .*$", TEXT, re.MULTILINE)]
SHORTER = {
    "warm-start": ["max_steps=2", "batch_size=4", "threads=1"],
    "train": [
        "num_train_epochs=0.05",
        "num_generations=2",
        "eval_generations=2",
        "eval_prompts=2",
        "filter=keep_all",
        "threads=1",
    ],
    "report": [],
}
SMALL = ["hidden_size=32", "num_heads=2", "num_layers=1"]


def test_the_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_text(content, encoding="utf-8")
    runpy.run_path("make_sums.py")
    rows = [json.loads(line) for line in Path("sums.jsonl").read_text().splitlines()]
    assert f"This makes {len(rows)} sums" in TEXT
    assert [command[0] for command in COMMANDS] == ["warm-start", "train", "report", "warm-start"]
    for command in COMMANDS:
        small = SMALL if command[0] == "warm-start" and "model=models/sums" not in command else []
        done = CliRunner().invoke(app, [*command, *SHORTER[command[0]], *small])
        assert done.exit_code == 0, done.output
    assert Path("sums.html").exists()
    assert Path("models/taught/model.safetensors").exists()
