"""The plot of `winnow gate`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from winnow.cli.main import app

from ..builders.gate_tables import make_rows, weighted, write


def test_the_plot_shows_gate_and_controls(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    heavy, _ = weighted(make_rows(n=60))
    path = str(write(tmp_path / "g.csv", heavy))
    for name in ("p.png", "p.svg"):
        result = CliRunner().invoke(app, ["gate", path, "--precision", "0.6", "--picture", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "p.svg").read_text()
    for words in ("held out", "oracle", "chosen", "(measured)", "K = 15"):
        assert words in text, "in the drawing, as a comment next to its glyphs"


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = str(write(tmp_path / "g.csv", make_rows()))
    result = CliRunner().invoke(app, ["gate", path, "--picture", str(tmp_path / "p.png")])
    assert result.exit_code == 1
    assert "[gate]'" in "".join(result.stderr.split())
