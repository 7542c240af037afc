"""The notebooks of the documentation, cell by cell, with a smaller model and fewer steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
SHORTER = {
    r"WarmStartConfig\(max_steps=200\)": "WarmStartConfig(max_steps=20, batch_size=16, hidden_size=32, num_heads=2, "
    "num_layers=1, intermediate_size=64)",
    r'"max_steps": \d+': '"max_steps": 2, "threads": 1, "max_skipped_steps": 5',
    r'"filter": "zero_variance"': '"filter": "keep_all"',
    r"range\(20\)": "range(2)",
}


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("name", ["own-data", "own-loop"])
def test_a_notebook(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for cell in notebook["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for page in re.findall(r"\]\(([\w./-]+)\)", code):
                assert (FOLDER / page).exists(), page
            continue
        assert cell["outputs"] == []
        for long, short in SHORTER.items():
            code = re.sub(long, short, code)
        exec(code, namespace)
    if name == "own-data":
        assert (tmp_path / "notebook.html").exists()
        assert (tmp_path / "runs" / "notebook" / "model").is_dir()
    else:
        assert len(namespace["rewards"]) == 2


def test_there_are_no_others() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {"own-data", "own-loop"}
