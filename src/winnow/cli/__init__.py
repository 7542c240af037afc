"""The command `winnow`, with one file per family of commands."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command; Ctrl-C ends it without a traceback, also during imports."""
    try:
        from .main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
