"""What SQLite writes and syncs, recorded below it, and the files that a power cut may leave of it.

A virtual file system over SQLite's own logs every write, truncation, deletion and sync. After a cut each file holds
what its last sync left, and of the writes since then any, in sectors, in any order: that is all that a disk promises.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_int, c_int64, c_void_p, cast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECTOR = 512
FOLDER = "."
_WRITE, _TRUNCATE, _SYNC = 2, 3, 4
"""Places of these functions in `sqlite3_io_methods`, behind its version."""
_OPEN, _DELETE = 0, 1
"""Places in `sqlite3_vfs`, behind its fields."""


class _Methods(Structure):
    _fields_ = (("version", c_int), ("functions", c_void_p * 18))


class _File(Structure):
    _fields_ = (("methods", POINTER(_Methods)),)


class _Vfs(Structure):
    _fields_ = (
        *(("version", c_int), ("file_bytes", c_int), ("longest", c_int), ("next", c_void_p), ("name", c_char_p)),
        *(("data", c_void_p), ("functions", c_void_p * 16)),
    )


_Write = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_Truncate = CFUNCTYPE(c_int, c_void_p, c_int64)
_Sync = CFUNCTYPE(c_int, c_void_p, c_int)
_Open = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))
"""The name is a pointer: SQLite keeps it, and what follows it in memory."""
_Delete = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)


@dataclass(frozen=True)
class Write:
    file: str
    at: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    file: str
    size: int


@dataclass(frozen=True)
class Delete:
    file: str


@dataclass(frozen=True)
class Sync:
    file: str
    """`FOLDER`: of the names in it."""


@dataclass(frozen=True)
class Note:
    """What a test wants to remember of this moment."""

    value: Any


Operation = Write | Truncate | Delete | Sync | Note
Change = Write | Truncate | Delete


@dataclass
class Log:
    operations: list[Operation] = field(default_factory=list)

    def note(self, value: Any) -> None:
        self.operations.append(Note(value))


def library() -> ctypes.CDLL | None:
    """The SQLite that Python's `sqlite3` uses; None where it is built into it and not to be had."""
    loaded = ctypes.CDLL(_sqlite3.__file__)
    return loaded if hasattr(loaded, "sqlite3_vfs_register") else None


@contextmanager
def recorded(sqlite: ctypes.CDLL) -> Iterator[Log]:
    """Record what every connection opened within does to its files."""
    log, names, kept = Log(), dict[int, str](), list[Any]()
    sqlite.sqlite3_vfs_find.restype = POINTER(_Vfs)
    own = sqlite.sqlite3_vfs_find(None)
    open_own, delete_own = (cast(own.contents.functions[i], kind) for i, kind in ((_OPEN, _Open), (_DELETE, _Delete)))

    def open_(_: int, name: int | None, file: int, flags: int, flags_out: Any) -> int:
        result = open_own(cast(own, c_void_p), name, file, flags, flags_out)
        if not result and name:
            names[file] = Path(ctypes.string_at(name).decode()).name
            shadowed = _shadow(cast(file, POINTER(_File)), names, log, kept)
            kept.append(shadowed)
        return result

    def delete(_: int, name: bytes, sync: int) -> int:
        log.operations.append(Delete(Path(name.decode()).name))
        if sync:
            log.operations.append(Sync(FOLDER))
        return delete_own(cast(own, c_void_p), name, sync)

    shim = _Vfs.from_buffer_copy(own.contents)
    shim.name, shim.next = b"recorded", None
    functions = _Open(open_), _Delete(delete)
    shim.functions[_OPEN], shim.functions[_DELETE] = (cast(f, c_void_p).value or 0 for f in functions)
    kept += [shim, functions]
    sqlite.sqlite3_vfs_register(byref(shim), 1)
    try:
        yield log
    finally:
        sqlite.sqlite3_vfs_register(own, 1)
        sqlite.sqlite3_vfs_unregister(byref(shim))


def _shadow(file: Any, names: dict[int, str], log: Log, kept: list[Any]) -> _Methods:
    """A copy of a file's methods that logs; the file is given it."""
    methods = _Methods.from_buffer_copy(file.contents.methods.contents)
    write, truncate, sync = (
        cast(methods.functions[i], kind) for i, kind in ((_WRITE, _Write), (_TRUNCATE, _Truncate), (_SYNC, _Sync))
    )

    def write_(handle: int, data: int, size: int, at: int) -> int:
        log.operations.append(Write(names[handle], at, ctypes.string_at(data, size)))
        return write(handle, data, size, at)

    def truncate_(handle: int, size: int) -> int:
        log.operations.append(Truncate(names[handle], size))
        return truncate(handle, size)

    def sync_(handle: int, flags: int) -> int:
        result = sync(handle, flags)
        log.operations.append(Sync(names[handle]))
        return result

    functions = {_WRITE: _Write(write_), _TRUNCATE: _Truncate(truncate_), _SYNC: _Sync(sync_)}
    kept.append(functions)
    for place, function in functions.items():
        methods.functions[place] = cast(function, c_void_p).value or 0
    file.contents.methods = ctypes.pointer(methods)
    return methods


def cut(operations: list[Operation], rng: random.Random) -> dict[str, bytes]:
    """Contents of the files after a power cut behind these operations."""
    lost: dict[str, list[Change]] = {}
    durable: dict[str, bytearray] = {}
    for operation in operations:
        if isinstance(operation, Sync):
            gone = [name for name, pending in lost.items() if any(isinstance(each, Delete) for each in pending)]
            for name in gone if operation.file == FOLDER else [operation.file]:
                for earlier in lost.pop(name, []):
                    _apply(durable, earlier)
        elif not isinstance(operation, Note):
            lost.setdefault(operation.file, []).append(operation)
    for pending in lost.values():
        pieces = [piece for operation in pending for piece in _sectors(operation)]
        taken = [piece for piece in pieces if rng.random() < 0.5]
        rng.shuffle(taken)
        for piece in taken:
            _apply(durable, piece)
    return {name: bytes(data) for name, data in durable.items()}


def _sectors(operation: Change) -> Iterator[Change]:
    if not isinstance(operation, Write):
        yield operation
        return
    at, end = operation.at, operation.at + len(operation.data)
    while at < end:
        stop = min((at // SECTOR + 1) * SECTOR, end)
        yield Write(operation.file, at, operation.data[at - operation.at : stop - operation.at])
        at = stop


def _apply(files: dict[str, bytearray], operation: Change) -> None:
    if isinstance(operation, Write):
        data = files.setdefault(operation.file, bytearray())
        data.extend(b"\0" * (operation.at + len(operation.data) - len(data)))
        data[operation.at : operation.at + len(operation.data)] = operation.data
    elif isinstance(operation, Delete):
        files.pop(operation.file, None)
    else:
        del files.setdefault(operation.file, bytearray())[operation.size :]
