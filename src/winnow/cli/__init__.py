"""The command `winnow`: one file a family of commands."""

from __future__ import annotations

import sys


def run() -> None:
    """The command; Ctrl-C while it is still being imported ends it without a traceback, as later."""
    try:
        from .main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
