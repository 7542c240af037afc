"""Rows of data from files, Hugging Face datasets and Python objects, each with its place of origin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob, has_magic
from itertools import chain, count, cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np

from ..base.dotted import nearest
from ..base.machine import install
from .row_files import BATCH, SUFFIXES, DataError, Row, read_file
from .synthetic_data import PREFIX, made_rows

SAVED = "state.json"
"""File of a directory of `Dataset.save_to_disk`."""
MAX_UNCOUNTED_ROWS = 10_000_000
"""Rows after which an iterable without a length counts as endless."""


def read_rows(paths: str | Sequence[str], split: str, subset: str | None) -> Iterator[Row]:
    """Yield all rows of one or several sources, in order.

    A source is a file in a format of `row_files.FORMATS`, a glob of such files, `made:` and a name in
    `synthetic_data.MADE`, a directory of `Dataset.save_to_disk`, or a directory or hub name for
    `datasets.load_dataset`. Raises DataError.
    """
    empty = True
    for source in [paths] if isinstance(paths, str) else paths:
        for row in _of_source(source, split, subset):
            empty = False
            yield row
    if empty:
        raise DataError(f"{paths}: no rows")


def _of_source(source: str, split: str, subset: str | None) -> Iterator[Row]:
    if source.startswith(PREFIX):
        yield from _made(source, split)
    elif not of_files(source):
        yield from _hugging_face(source, split, subset)
    else:
        for file in _files(source):
            yield from read_file(file)


def of_files(source: str) -> bool:
    """Return whether these are files to read."""
    return source.endswith(SUFFIXES) or has_magic(source)


def has_splits(source: str) -> bool:
    """Return False for files, and for a directory that `Dataset.save_to_disk` made of one split."""
    return not of_files(source) and not Path(source, SAVED).expanduser().is_file()


def may_be_sliced(source: str) -> bool:
    """Return whether `split` may be a slice such as `train[:4]`."""
    return not of_files(source) and not source.startswith(PREFIX)


def _made(source: str, split: str) -> Iterator[Row]:
    for number, values in enumerate(made_rows(source.removeprefix(PREFIX), split), start=1):
        yield Row(f"{source}[{split}], row", number, values)


def _files(source: str) -> list[Path]:
    if has_magic(source):
        files = sorted(path for p in glob(source, recursive=True) if (path := Path(p)).is_file())
        if not files:
            raise DataError(f"{source}: no file matches")
        return files
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
        if any((directory / name).is_file() for name in (SAVED, "dataset_dict.json")):
            saved = datasets.load_from_disk(str(directory))
            if subset is not None:
                raise ValueError(f"this directory has no subset '{subset}'")
            parts = saved if isinstance(saved, Mapping) else {"train": saved, "test": saved}
            lengths = {name: len(part) for name, part in parts.items()}
            chosen = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
            ranges = [(c.splitname, range(lengths[c.splitname])[c.from_ : c.to]) for c in chosen]
            rows = chain.from_iterable(parts[name].select(numbers) for name, numbers in ranges)
        else:
            rows = datasets.load_dataset(source, subset, split=split)
    except Exception as error:
        reason = str(error).strip().splitlines()
        remedy = "; set HF_HOME to a folder that you can write" if isinstance(error, PermissionError) else ""
        raise DataError(
            f"{source}: cannot be loaded as a Hugging Face dataset (split '{split}'): "
            f"{reason[0] if reason else type(error).__name__}{remedy}"
        ) from None
    for number, values in enumerate(rows, start=1):
        yield Row(f"{source}[{split}], row", number, dict(values))


def rows_of(data: Iterable[Any], name: str) -> Iterator[Row]:
    """Yield rows of a `datasets.Dataset`, a pandas data frame, an arrow table, or any iterable of mappings, to its end.

    `name` is its name in messages. Raises DataError naming the row, or for an iterable that does not end.
    """
    if isinstance(data, Mapping):
        splits = ", ".join(map(repr, data))
        raise DataError(f"{name}: has splits or columns {splits}; give one split, e.g. dataset['train'], or rows")
    if isinstance(data, count | cycle | repeat):
        raise _endless(data, name)
    uncounted, number = not hasattr(data, "__len__"), 0
    for number, values in enumerate(_one_by_one(data), start=1):
        if not isinstance(values, Mapping):
            kind = type(values).__name__
            raise DataError(f'{name}, row {number}: expected a mapping like {{"prompt": ...}}, found {kind}')
        if uncounted and number > MAX_UNCOUNTED_ROWS:
            raise _endless(data, name)
        yield Row(f"{name}, row", number, dict(values))
    if not number:
        raise DataError(f"{name}: no rows")


def _one_by_one(data: Any) -> Iterator[Any]:
    """Yield the rows; for a table without making objects of all of them at once."""
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        for start in range(0, len(data), BATCH):
            for values in data.iloc[start : start + BATCH].to_dict("records"):
                yield {name: _of_cell(value) for name, value in values.items()}
    elif hasattr(data, "to_batches") and hasattr(data, "to_pylist"):
        for batch in data.to_batches(BATCH):
            yield from batch.to_pylist()
    else:
        yield from data


def _of_cell(value: Any) -> Any:
    """Return None for what pandas has for a missing value (NaN, NaT, NA), a list for an array of objects."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return value.tolist()
    missing = type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))
    return None if missing else value


def _endless(data: Any, name: str) -> DataError:
    """Return the error for endless data: epochs, ids and selectors need a number of prompts known at the start."""
    kind = type(data).__name__
    take = f"{name}.take(n)" if hasattr(data, "take") else f"itertools.islice({name}, n)"
    return DataError(
        f"{name}: a {kind} has no length, and no end within {MAX_UNCOUNTED_ROWS:,} rows; training needs a number of "
        f"prompts that is known at the start: give {take}, or a list, a Dataset or a file"
    )
