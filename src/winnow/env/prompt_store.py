"""Prompts of a data set on disk: a row of any length costs some tens of bytes of memory.

Rows are read once and appended to an unnamed file, which ends with its object. The file is in the cache directory,
because the directory for temporary files is in memory on many machines. Later changes of the source do not matter,
whatever its kind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import eq
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast, overload

import numpy as np

from ..base.files import cache_dir
from ..types import Message, Prompt
from .private import private
from .row_files import DataError, Row

_MADE_ID = re.compile(r"([0-9a-f]{16})(-[0-9]+)?")
"""Form of the ids given to rows without one."""
BUFFER = 1 << 20


def content_of(prompt: Prompt) -> str:
    """Return the identity of a prompt: its text, or its roles, words and tool calls with what the row gives to the
    template."""
    return _content(prompt.text, prompt.messages, prompt.template_values)


def _content(text: str | None, messages: Sequence[Message] | None, values: Mapping[str, Any]) -> str:
    if messages is None:
        return (text or "").strip()
    words: list[Any] = []
    for m in messages:
        words.append([m["role"], m.get("content"), *([m["tool_calls"]] if m.get("tool_calls") else [])])
    return json.dumps([words, values] if values else words, sort_keys=True, default=str)


class Record(NamedTuple):
    """One stored row."""

    place: str
    number: int
    """Line or row number within `place`."""
    id: str | None
    """The row's own id."""
    text: str | None
    messages: tuple[Message, ...] | None
    columns: dict[str, Any]
    template_values: Mapping[str, Any]


class Store:
    """Rows in insertion order. Raises DataError when the disk is full."""

    def __init__(self) -> None:
        self._file = _file_without_name()
        self._offsets = array("q", [0])
        self._kept: dict[int, Record] = {}
        """Python rows that cannot be serialized."""
        self.columns: dict[str, None] = {}
        """Names of all columns, in order of appearance."""
        self._digests = bytearray()
        self._id_keys = array("Q")
        self._characters = array("I")
        self.ids: dict[int, str] = {}
        """Ids that are neither the row's own nor just a hash of its content: those of repeated prompts."""

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # its buffer may not fit; the file may not exist
            self._file.close()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def add(
        self,
        row: Row,
        own_id: str | None,
        text: str | None,
        messages: tuple[Message, ...] | None,
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Add a row with its prompt, and the values that it gives to the chat template."""
        self.columns.update(dict.fromkeys(row.values))
        record = Record(row.place, row.number, own_id, text, messages, row.values, dict(values))
        try:
            data = pickle.dumps(tuple(record), pickle.HIGHEST_PROTOCOL)
        except Exception:  # any error of an object's own pickling
            self._kept[len(self)], data = record, b""
        try:
            self._file.write(data)
        except OSError as error:
            raise _no_room(error) from None
        digest = hashlib.sha256(_content(text, messages, values).encode()).digest()
        self._digests += digest[:16]
        self._id_keys.append(_id_key(own_id, digest))
        self._characters.append(min(_characters(text, messages), 2**32 - 1))
        self._offsets.append(self._offsets[-1] + len(data))

    def finish(self, *, may_repeat: bool = False) -> None:
        """Finish after the last row. Raises DataError if two rows have the same own id.

        `may_repeat`: such rows get numbers instead, as repeated prompts do.
        """
        try:
            self._file.flush()
        except OSError as error:
            raise _no_room(error) from None
        self._resolve_ids(may_repeat)
        self._id_keys = array("Q")

    def __getitem__(self, row: int) -> Record:
        start, stop = self._offsets[row], self._offsets[row + 1]
        if start == stop:
            kept = self._kept[row]
            return kept._replace(messages=private(kept.messages), columns=private(kept.columns))
        return Record._make(pickle.loads(os.pread(self._file.fileno(), stop - start, start)))

    def where(self, row: int) -> str:
        """Return a row's place for messages."""
        record = self[row]
        return f"{record.place} {record.number}"

    def digests(self) -> np.ndarray:
        """Return [N] of 16 bytes each: the beginning of the SHA-256 of each row's content."""
        return np.frombuffer(bytes(self._digests), "V16")

    def characters(self) -> np.ndarray:
        """Return uint32 [N], lengths of the prompts."""
        return np.frombuffer(self._characters, np.uint32).copy()

    def _resolve_ids(self, may_repeat: bool) -> None:
        """Number repeated prompts. Only rows whose keys are equal can have equal ids."""
        keys_N = np.frombuffer(self._id_keys, np.uint64)
        known, inverse_N, counts = np.unique(keys_N, return_inverse=True, return_counts=True)
        taken: dict[str, int] = {}
        last: dict[str, int] = {}
        for row in np.flatnonzero(counts[inverse_N] > 1).tolist():
            own = self[row].id
            name = own or f"{int(keys_N[row]):016x}"
            if own is not None and name in taken and not may_repeat:
                there = self.where(taken[name])
                raise DataError(f"{self.where(row)}: id '{name}' is taken already by {there}; ids must differ")
            base = name
            while name in taken or (name != base and _is_own(name, int(keys_N[row]), known)):
                last[base] = last.get(base, 1) + 1
                name = f"{base}-{last[base]}"
            taken[name] = row
            if name != base:
                self.ids[row] = name


def _file_without_name() -> BinaryIO:
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, tempfile.TemporaryFile("w+b", BUFFER, dir=folder))
    except OSError:  # the home is not writable
        try:
            return cast(BinaryIO, tempfile.TemporaryFile("w+b", BUFFER))
        except OSError as error:
            raise _no_room(error) from None


def _no_room(error: OSError) -> DataError:
    return DataError(
        f"{cache_dir()}: rows cannot be kept there: {error.strerror}; set WINNOW_CACHE to a directory with more room"
    )


def _id_key(own_id: str | None, digest: bytes) -> int:
    """Return a key equal for ids that are equal, or that numbers might make equal."""
    if own_id is None:
        return int.from_bytes(digest[:8], "big")
    made = _MADE_ID.fullmatch(own_id)
    return int(made[1], 16) if made else int.from_bytes(hashlib.sha256(own_id.encode()).digest()[:8], "big")


def _is_own(name: str, key: int, keys: np.ndarray) -> bool:
    """Return whether another row may have the numbered id `name`. `key`: of the id without number; `keys`: sorted."""
    own = np.uint64(_id_key(name, b""))
    place = int(np.searchsorted(keys, own))
    return int(own) != key and place < len(keys) and bool(keys[place] == own)


def _characters(text: str | None, messages: Sequence[Message] | None) -> int:
    return len(text or "") + sum(len(str(message.get("content"))) for message in messages or ())


class StoredPrompts(Sequence[Prompt]):
    """Prompts of some rows of a store, made on access.

    `rows_N`: the rows; all by default. `change` is applied to each prompt.
    """

    def __init__(
        self,
        store: Store,
        prompt_column: str,
        rows_N: np.ndarray | None = None,
        change: Callable[[Prompt], Prompt] | None = None,
    ) -> None:
        self._store, self._prompt_column, self._change = store, prompt_column, change
        self._rows_N = np.arange(len(store), dtype=np.uint32) if rows_N is None else rows_N.astype(np.uint32)
        self._columns = [name for name in store.columns if name != prompt_column]

    def __len__(self) -> int:
        return len(self._rows_N)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._prompt(i) for i in range(*index.indices(len(self)))]
        return self._prompt(range(len(self))[index])

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._prompt, range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether these are the same prompts; reads them all."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def map(self, change: Callable[[Prompt], Prompt]) -> StoredPrompts:
        """Return the same prompts with `change` applied to each."""
        return StoredPrompts(self._store, self._prompt_column, self._rows_N, change)

    def part(self, chosen_N: np.ndarray) -> StoredPrompts:
        """Return prompts of the rows where `chosen_N`, bool [N] over all rows of the store, is true."""
        return StoredPrompts(self._store, self._prompt_column, np.flatnonzero(chosen_N), self._change)

    def longest(self, n: int) -> list[Prompt]:
        """Return the `n` prompts with the most characters."""
        characters_N = self._store.characters()[self._rows_N].astype(np.int64)
        return [self._prompt(i) for i in np.argsort(-characters_N, kind="stable")[:n].tolist()]

    def digests(self) -> np.ndarray:
        """See `Store.digests`."""
        digests_N: np.ndarray = self._store.digests()[self._rows_N]
        return digests_N

    def _prompt(self, ordinal: int) -> Prompt:
        row = int(self._rows_N[ordinal])
        record = self._store[row]
        name = self._store.ids.get(row) or record.id
        if name is None:
            content = _content(record.text, record.messages, record.template_values)
            name = hashlib.sha256(content.encode()).hexdigest()[:16]
        values = record.columns
        columns = {column: values.get(column) for column in self._columns}
        prompt = Prompt(name, ordinal, record.text, record.messages, columns, (), record.template_values)
        return prompt if self._change is None else self._change(prompt)


def changed(prompts: Sequence[Prompt], change: Callable[[Prompt], Prompt]) -> Sequence[Prompt]:
    """Apply `change` to each prompt: now, or on access for stored ones."""
    return prompts.map(change) if isinstance(prompts, StoredPrompts) else [change(p) for p in prompts]
