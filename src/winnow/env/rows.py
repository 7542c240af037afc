"""Rows of data from JSONL and parquet files and from Hugging Face datasets, each with the place it came from."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from ..base.dotted import nearest
from .made import PREFIX, made_rows

MAX_LINE = 64 << 20
"""Longest line of a JSONL file in bytes."""
SUFFIXES = (".jsonl", ".json", ".parquet")


class DataError(ValueError):
    """Data that cannot be used; the message names the file and the line or row, and the remedy."""


@dataclass(frozen=True, slots=True)
class Row:
    where: str
    """Place for messages, e.g. `train.jsonl, line 3`."""
    values: dict[str, Any]


def read_rows(paths: str | Sequence[str], split: str = "train", subset: str | None = None) -> list[Row]:
    """All rows of one or several sources, in order.

    A source is a `.jsonl`, `.json` (one object a line) or `.parquet` file, a glob of such files, `made:` and a name in
    `made.MADE`, or a directory or hub name for `datasets.load_dataset`. Raises DataError.
    """
    rows: list[Row] = []
    for source in [paths] if isinstance(paths, str) else paths:
        if source.startswith(PREFIX):
            rows.extend(_made(source, split))
            continue
        if not source.endswith(SUFFIXES) and not has_magic(source):
            rows.extend(_hugging_face(source, split, subset))
            continue
        for file in _files(source):
            rows.extend(_parquet(file) if file.suffix == ".parquet" else _jsonl(file))
    if not rows:
        raise DataError(f"{paths}: no rows")
    return rows


def _made(source: str, split: str) -> Iterator[Row]:
    try:
        rows = made_rows(source.removeprefix(PREFIX), split)
    except ValueError as error:
        raise DataError(str(error)) from None
    for number, values in enumerate(rows, start=1):
        yield Row(f"{source}[{split}], row {number}", values)


def _files(source: str) -> list[Path]:
    if has_magic(source):
        found = sorted(Path(p) for p in glob(source, recursive=True))
        if not found:
            raise DataError(f"{source}: no file matches")
        return found
    path = Path(source).expanduser()
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES] if path.parent.is_dir() else []
        raise DataError(f"{path}: no such file.{nearest(path.name, siblings)}")
    return [path]


def _jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > MAX_LINE:
                    raise DataError(f"{where}: longer than {MAX_LINE >> 20} MiB; is this JSONL, one object a line?")
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield Row(where, _json_object(line, where))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    if "\0" in text:
        raise DataError(f"{where}: contains a NUL byte at column {text.index(chr(0)) + 1}")
    try:
        values = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f'{where}: expected an object like {{"prompt": ...}}, found {type(values).__name__}')
    if "\\u" in text:
        try:
            json.dumps(values, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            lone = error.object[error.start]
            raise DataError(f"{where}: contains a lone surrogate ({lone!r}), which is not text; remove it") from None
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        values = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from None
    for number, row in enumerate(values, start=1):
        yield Row(f"{path}, row {number}", row)


def _hugging_face(source: str, split: str, subset: str | None) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{source}: not a {', '.join(SUFFIXES)} file, and for a Hugging Face dataset the package 'datasets' is "
            "missing; pip install 'winnow-rl[hub]'"
        ) from None
    try:
        rows = datasets.load_dataset(source, subset, split=split)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise DataError(
            f"{source}: cannot be loaded as a Hugging Face dataset (split '{split}'): "
            f"{reason[0] if reason else type(error).__name__}"
        ) from None
    for number, values in enumerate(rows, start=1):
        yield Row(f"{source}[{split}], row {number}", dict(values))
