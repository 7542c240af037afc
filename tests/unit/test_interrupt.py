"""Signals: what the handler does must be safe between any two instructions."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

import pytest

from winnow.cli import run
from winnow.run.trainer import StopSignals


def test_a_signal_in_the_middle_of_an_import_that_announcing_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needed_to_speak.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nWORD = 'saving'\n")
    monkeypatch.syspath_prepend(tmp_path)
    requested: list[bool] = []
    said: list[str] = []

    def announce() -> None:
        said.append(importlib.import_module("needed_to_speak").WORD)

    with StopSignals(lambda: requested.append(True), announce):
        importlib.import_module("needed_to_speak")
        assert requested == [True]
    assert said == ["saving"]


def test_the_second_signal_stops_at_once_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    said: list[int] = []
    with StopSignals(lambda: None, lambda: said.append(1)):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt, match="at once"):
            signal.raise_signal(signal.SIGINT)
    assert said == [1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_while_the_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Importing:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "winnow.cli.main", Importing())
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 130
