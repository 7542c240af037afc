"""Build a server of the live page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from winnow.study.watch import Watch


@contextmanager
def serving(*runs: Path, **options: Any) -> Iterator[Watch]:
    with Watch(runs, **{"token": "geheim"} | options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
