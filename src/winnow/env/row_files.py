"""Rows of one file: JSONL, JSON, CSV and parquet, the first three also compressed with gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..base.errors import ConfigError

MAX_LINE = 64 << 20
"""Longest line of a JSONL file in bytes."""
MAX_LIST = 1 << 30
"""Longest list in one JSON file in bytes, also when unpacked: all of it is in memory at a time."""
BATCH = 1024
"""Rows of a table that are Python objects at a time."""


class DataError(ConfigError):
    """Unusable data; the message names the file and the line or row, and the remedy."""


@dataclass(frozen=True, slots=True)
class Row:
    place: str
    """Source and its counting unit, e.g. `train.jsonl, line`."""
    number: int
    values: dict[str, Any]

    @property
    def where(self) -> str:
        """Return the place for messages, e.g. `train.jsonl, line 3`."""
        return f"{self.place} {self.number}"


def read_file(path: Path) -> Iterator[Row]:
    """Yield rows of a file whose name ends with one of `SUFFIXES`. Raises DataError naming file, line and remedy."""
    name = path.name.removesuffix(".gz")
    reader = FORMATS.get(Path(name).suffix)
    if reader is None:
        raise DataError(f"{path}: not a {', '.join(SUFFIXES)} file")
    try:
        yield from reader(path)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _open(path: Path) -> BinaryIO:
    """Open a file of text after its byte-order mark. Raises DataError if its first bytes show that it is not UTF-8."""
    file = cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))  # noqa: SIM115
    try:
        encoding = json.detect_encoding(file.read(4))
        if not encoding.startswith("utf-8"):
            raise _not_utf8(path, encoding.upper().replace("-LE", "LE").replace("-BE", "BE"))  # as iconv spells it
        file.seek(3 if encoding == "utf-8-sig" else 0)
    except BaseException:
        file.close()
        raise
    return file


def _not_utf8(path: Path, encoding: str, what: str = "") -> DataError:
    return DataError(
        f"{path}: {what}is {encoding}, not UTF-8; save it as UTF-8, e.g. iconv -f {encoding} -t UTF-8 {path.name} > NEW"
    )


def _json(path: Path) -> Iterator[Row]:
    """Yield rows of a list of objects, or else one object a line."""
    with _open(path) as file:
        start = file.tell()
        is_list = file.read(1024).lstrip().startswith(b"[")
        file.seek(start)
        if not is_list:
            yield from _lines(path, file)
            return
        if len(content := file.read(MAX_LIST + 1)) > MAX_LIST:
            raise DataError(f"{path}: a list longer than {MAX_LIST >> 20} MiB; make it JSONL, one object a line")
        values = _parsed(content, str(path))
    for number, value in enumerate(values, start=1):
        yield Row(f"{path}, entry", number, _object(value, f"{path}, entry {number}"))


def _jsonl(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        yield from _lines(path, file)


def _lines(path: Path, file: BinaryIO) -> Iterator[Row]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        where = f"{path}, line {number}"
        if len(line) > MAX_LINE:
            raise DataError(f"{where}: longer than {MAX_LINE >> 20} MiB; is this JSONL, one object a line?")
        if line.strip():
            yield Row(f"{path}, line", number, _object(_parsed(line, where), where))


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{where}: expected an object like {{"prompt": ...}}, found {type(value).__name__}')
    return value


def _parsed(line: bytes, where: str) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    try:
        value = _JSON.decode(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            lone = error.object[error.start]
            raise DataError(f"{where}: contains a lone surrogate ({lone!r}), which is not text; remove it") from None
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _csv(path: Path) -> Iterator[Row]:
    """Yield rows of a comma-separated file with a header. A column in which all are a `_number` has numbers, others
    have texts."""
    import pyarrow
    import pyarrow.csv

    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    numbers: list[str] = []
    try:
        with _open(path) as file:
            table = pyarrow.csv.read_csv(file, parse_options=options)
        _distinct(table.column_names, path)
        if binary := [field.name for field in table.schema if pyarrow.types.is_binary(field.type)]:
            raise _not_utf8(path, "WINDOWS-1252", f"column '{binary[0]}' perhaps ")
        if typed := [field.name for field in table.schema if not pyarrow.types.is_string(field.type)]:
            # such types change texts: 007 becomes 7, True becomes true, and 5 in a column with 2.5 becomes 5.0
            as_texts = pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(typed, pyarrow.string()), include_columns=typed, strings_can_be_null=True
            )
            with _open(path) as file:
                texts = pyarrow.csv.read_csv(file, parse_options=options, convert_options=as_texts)
            for name in typed:
                table = table.set_column(table.column_names.index(name), name, texts[name])
                if all(text is None or _number(text) is not None for text in texts[name].unique().to_pylist()):
                    numbers.append(name)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None
    except UnicodeDecodeError:
        raise _not_utf8(path, "WINDOWS-1252", "its header perhaps ") from None
    for row in _batches(path, table.to_batches(BATCH)):
        for name in numbers:
            text = row.values[name]
            row.values[name] = None if text is None else _number(text)
        yield row


def _number(text: str) -> int | float | None:
    """Return the number that Python writes like this text; None for others, such as 007, 3.50, 1e3 and inf."""
    try:
        number = float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return None
    return number if str(number) == text.strip() else None


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _distinct(file.schema_arrow.names, path)
            yield from _batches(path, file.iter_batches(BATCH))
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from None


def _distinct(names: Sequence[str], path: Path) -> None:
    """Refuse repeated column names: a row has one value of each name, so others would be lost."""
    if twice := {name for name, times in Counter(names).items() if times > 1}:
        raise DataError(f"{path}: there are two columns '{min(twice)}'; keep one")


def _batches(path: Path, batches: Iterable[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:
            raise
        except (ArithmeticError, ValueError) as error:
            after = f"{path}, rows {number + 1} to {number + batch.num_rows}"
            raise DataError(f"{after}: a date or duration that Python cannot hold ({error}); leave it out") from None
        for row in rows:
            number += 1
            yield Row(f"{path}, row", number, row)


FORMATS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet, ".pq": _parquet}
SUFFIXES = (*FORMATS, ".jsonl.gz", ".json.gz", ".csv.gz")
