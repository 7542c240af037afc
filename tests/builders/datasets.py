"""Data files, and the tasks that read them."""

from __future__ import annotations

import hashlib
import json

from winnow.env.dataset import DatasetConfig


def write(path, *values, end="\n"):
    path.write_text("\n".join(json.dumps(v) for v in values) + end, encoding="utf-8")
    return str(path)


def build(path, **options):
    return DatasetConfig(path=str(path) if not isinstance(path, list) else path, **options).build()


def build_rows(rows, **options):
    return DatasetConfig(path="x", **options).with_rows(rows)


def plain_ids(rows):
    """The rule of ids, one row at a time: a row's own, or a hash of its content with a number if that is taken."""
    taken = []
    for row in rows:
        base = row.get("id") or hashlib.sha256(row["prompt"].strip().encode()).hexdigest()[:16]
        name, number = base, 2
        while name in taken:
            name, number = f"{base}-{number}", number + 1
        taken.append(name)
    return taken
