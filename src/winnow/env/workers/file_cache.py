"""Files that a task makes once and reuses, and the processes that make them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...base.files import cache_dir, digest
from .worker import WorkerError, WorkerPool


def kept(task: str, folder: str, key: Any) -> Path:
    """Return the path of the file for a `key` (JSON): <task>/<folder>/<hash>.json in the cache."""
    root = cache_dir()
    (root / task / folder).mkdir(parents=True, exist_ok=True)
    return root / task / folder / f"{digest(key)[:24]}.json"


def loaded(file: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or damaged."""
    try:
        return load_json(file)
    except (OSError, ValueError):
        return None


def load_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def save_json(path: Path, values: Any) -> None:
    """Write atomically. Two writers write the same."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(values), encoding="utf-8")
    partial.replace(path)


@contextmanager
def making(task: str, workers: int, timeout_s: float) -> Iterator[WorkerPool]:
    """Open worker processes for the block. Errors in them become a ValueError that names the task."""
    pool = WorkerPool(workers, timeout_s)
    try:
        yield pool
    except WorkerError as error:
        detail = error.detail.removeprefix("ValueError: ").removeprefix(f"{task}: ")
        raise ValueError(f"{task}: {detail}") from None
    finally:
        pool.close()
