"""Build the command line, called in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from winnow.cli.main import app

REWARD = """
def words(completions, numbers, **columns):
    return [float(len(c.split()) % 2) for c in completions]
"""


def winnow(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])
