"""Cache directory for data that Winnow generates or downloads once."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $WINNOW_CACHE, else $XDG_CACHE_HOME/winnow, else ~/.cache/winnow."""
    own, shared = os.environ.get("WINNOW_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own or Path(shared or Path.home() / ".cache") / "winnow").resolve()
