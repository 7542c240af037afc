"""Build a server of the live page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from winnow.study import watch
from winnow.study.watch import Watch


@contextmanager
def serving(*runs: Path, **options: Any) -> Iterator[Watch]:
    """A server whose pages count as quickly read, on whatever machine."""
    with patch.object(watch, "AT_ONCE_S", 60.0), Watch(runs, **{"token": "geheim"} | options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
