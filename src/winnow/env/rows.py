"""Rows of data from files, Hugging Face datasets and Python objects, each with the place it came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from ..base.dotted import nearest
from ..base.install import install
from .made import PREFIX, made_rows
from .row_files import SUFFIXES, DataError, Row, read_file


def read_rows(paths: str | Sequence[str], split: str = "train", subset: str | None = None) -> list[Row]:
    """All rows of one or several sources, in order.

    A source is a file in a format of `row_files.FORMATS`, a glob of such files, `made:` and a name in `made.MADE`, a
    directory of `Dataset.save_to_disk`, or a directory or hub name for `datasets.load_dataset`. Raises DataError.
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
            rows.extend(read_file(file))
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
        siblings = [p.name for p in path.parent.glob("*") if p.name.endswith(SUFFIXES)] if path.parent.is_dir() else []
        raise DataError(f"{path}: no such file.{nearest(path.name, siblings)}")
    return [path]


def _hugging_face(source: str, split: str, subset: str | None) -> Iterator[Row]:
    directory = Path(source).expanduser()
    if source.startswith((".", "/", "~")) and not directory.is_dir():
        raise DataError(f"{source}: no such file or directory")
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{source}: not a {', '.join(SUFFIXES)} file, and for a Hugging Face dataset the package 'datasets' is "
            f"missing; {install('hub')}"
        ) from None
    try:
        if any((directory / name).is_file() for name in ("state.json", "dataset_dict.json")):
            rows = datasets.load_from_disk(str(directory))
            rows = rows[split] if isinstance(rows, Mapping) else rows
        else:
            rows = datasets.load_dataset(source, subset, split=split)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise DataError(
            f"{source}: cannot be loaded as a Hugging Face dataset (split '{split}'): "
            f"{reason[0] if reason else type(error).__name__}"
        ) from None
    for number, values in enumerate(rows, start=1):
        yield Row(f"{source}[{split}], row {number}", dict(values))


def rows_of(data: Iterable[Any], name: str) -> list[Row]:
    """Rows of a `datasets.Dataset`, a pandas data frame, or any iterable of mappings; read to its end.

    `name` is what messages call it. Raises DataError naming the row.
    """
    if isinstance(data, Mapping):
        splits = ", ".join(map(repr, data))
        raise DataError(f"{name}: has splits or columns {splits}; give one split, e.g. dataset['train'], or rows")
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        data = data.to_dict("records")
    rows = []
    for number, values in enumerate(data, start=1):
        where = f"{name}, row {number}"
        if not isinstance(values, Mapping):
            raise DataError(f'{where}: expected a mapping like {{"prompt": ...}}, found {type(values).__name__}')
        rows.append(Row(where, dict(values)))
    if not rows:
        raise DataError(f"{name}: no rows")
    return rows
