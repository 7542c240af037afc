"""Data sets of millions of rows: what a row costs."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

from winnow.env.dataset import DatasetConfig


def test_a_row_costs_a_few_bytes_of_memory(tmp_path: Path) -> None:
    """Rows stay on the disk: version 0.1 held 1.3 kB for each of these."""

    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{i} {'x' * 300}", "answer": i}) + "\n" for i in range(count)))
        tracemalloc.start()
        try:
            task = DatasetConfig(str(path)).build()
            assert len(task.train) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak(3_000), peak(9_000)
    assert (many - few) / 6_000 < 150
