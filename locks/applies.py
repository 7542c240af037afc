"""Exit code 0 where the locks are of this Python and machine, else 1."""

from __future__ import annotations

import platform
import sys


def applies() -> bool:
    own = platform.python_implementation(), sys.version_info[:2], platform.system(), platform.machine()
    return own == ("CPython", (3, 11), "Linux", "x86_64")


if __name__ == "__main__":
    sys.exit(not applies())
