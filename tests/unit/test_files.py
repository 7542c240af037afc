"""Files that somebody put where others should be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from winnow.base.files import bytes_of, from_json
from winnow.cli.main import app
from winnow.run.checkpoint import CheckpointError, marks

from ..builders.pages import make_run


def test_an_ordinary_file_is_read_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert bytes_of(tmp_path / "a") == b"abc"
    with pytest.raises(OSError, match=r"too large \(3 bytes, at most 2\)"):
        bytes_of(tmp_path / "a", 2)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match=f"{name}: not a regular file"):
            bytes_of(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        bytes_of(tmp_path / "b")


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_json_that_is_nested_too_deeply_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        from_json(text)


@pytest.mark.parametrize("name", ["start.json", "config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_no_command_waits_for_what_never_ends(tmp_path: Path, name: str, kind: str) -> None:
    run = make_run(tmp_path / "run", steps=4)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name) if kind == "pipe" else (run / name).symlink_to("/dev/zero")
    for command in (["verify"], ["report", "-o", str(tmp_path / "page.html")], ["compare", str(run)], ["resume"]):
        done = CliRunner().invoke(app, [command[0], str(run), *command[1:]])
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)
    if name == "start.json":
        with pytest.raises(CheckpointError, match=r"start\.json: .*not a regular file"):
            marks(run)


def test_messages_do_not_steer_the_terminal(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"\\u001b]0;owned\\u0007\\u202e": "x"}\n')
    config = tmp_path / "c.yaml"
    config.write_text(f"{{model: m, env: {{name: dataset, path: {rows}}}, output_dir: {tmp_path / 'run'}}}")
    done = CliRunner().invoke(app, ["train", str(config)])
    assert done.exit_code == 1
    assert "owned" in done.output
    assert not {"\x1b", "\x07", "\u202e"} & set(done.output)
