"""What a run writes is its owner's alone: prompts and answers may be nobody else's business on a shared machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.base.sanitize import redact
from winnow.config.paths import tilde
from winnow.record.stop_conditions import RunStoppedError
from winnow.study.report import write_report


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


JUDGE = """
import os
def judge(completions, **columns):
    if os.environ["JUDGE"].endswith("a"):
        raise RuntimeError(
            "GET https://user:hunter-two@judge.example/v1?n=1&api_key=hunter-three 401, sent Bearer hunter-four, "
            + os.environ["JUDGE"] + " of " + os.environ["ASKED_TOKEN"] + " in " + os.path.dirname(__file__)
        )
    return [float(len(text) % 2) for text in completions]
"""


@pytest.fixture
def at_home(tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run whose files lie in a home directory, and whose reward has secrets."""
    home = tmp_path / "home-of-hunter-one"
    shutil.copytree(tiny_config["model"], home / "model")
    (home / "judge.py").write_text(JUDGE)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("JUDGE", "hunter-five-a")
    monkeypatch.setenv("ASKED_TOKEN", "hunter-six")
    (home / "rows.jsonl").write_text("".join(f'{{"prompt": "numbers 1 2 target {i}"}}\n' for i in range(3, 9)))
    files = {"model": str(home / "model"), "output_dir": str(home / "run")}
    task = {"env": {"name": "dataset", "path": str(home / "rows.jsonl")}, "eval_steps": None, "max_steps": 2}
    judge = {"reward_funcs": [f"{home / 'judge.py'}:judge"], "reward_env": ["JUDGE", "ASKED_TOKEN"]}
    return tiny_config | files | task | judge


def texts_with(word: bytes, *places: Path) -> list[str]:
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*"))]
    return [file.name for file in files if file.is_file() and word in file.read_bytes()]


def test_no_secret_is_in_run_directory_or_page(at_home: dict[str, Any], tmp_path: Path) -> None:
    run = Path(at_home["output_dir"])
    with pytest.raises(RunStoppedError) as caught:
        Trainer(config=at_home).train()
    said = "https://***@judge.example/v1?n=1&api_key=*** 401, sent Bearer ***, $JUDGE of $ASKED_TOKEN in ~"
    assert said in str(caught.value)
    write_report([run], tmp_path / "page.html")
    assert texts_with(b"$ASKED_TOKEN", run) == ["ledger.sqlite"], "where the test below would find what it looks for"
    assert texts_with(b"hunter", run, tmp_path / "page.html") == []


def test_home_may_move_between_a_save_and_a_resume(
    at_home: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE", "hunter-five-b")
    Trainer(config=at_home).train()
    before = Path(at_home["output_dir"])
    assert texts_with(b"hunter", before) == []
    assert json.loads((before / "config.json").read_text())["model"] == "~/model"
    before.parent.rename(tmp_path / "moved")
    monkeypatch.setenv("HOME", str(tmp_path / "moved"))
    trainer = Trainer.resume(tmp_path / "moved" / "run", {"max_steps": 3})
    assert trainer.config.model == str(tmp_path / "moved" / "model")
    trainer.train()
    assert texts_with(b"hunter", tmp_path / "moved" / "run") == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("a token=abc in prose", "a token=abc in prose"),
        ("wss://u@h/x", "wss://***@h/x"),
        ("https://h/a@b?sig=1&x=2", "https://h/a@b?sig=***&x=2"),
        ("https://h/?X-Amz-Signature=ab&access_token=c#d", "https://h/?X-Amz-Signature=***&access_token=***#d"),
        ("/home/me/x and /home/me2 and /home/me", "~/x and /home/me2 and ~"),
        ("value-of-a-secret, value-of-a", "$SOME_API_KEY, value-of-a"),
        ("short", "short"),
    ],
)
def test_what_is_taken_out_of_a_text(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HOME", "/home/me"), ("SOME_API_KEY", "value-of-a-secret"), ("A_TOKEN", "short")):
        monkeypatch.setenv(name, value)
    assert redact(text) == shown


@pytest.mark.parametrize("place", ["/", ""])
def test_no_home_hides_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container `HOME` may be `/`, which every path begins with."""
    monkeypatch.setenv("HOME", place)
    assert redact("/data/model") == "/data/model"
    assert tilde("/data/model") == "/data/model"
