"""Arrays inside the JSON state of a checkpoint: exact, compact, self-describing."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

MAX_BYTES = 1 << 30
"""Largest array in bytes: a small text can expand a thousandfold."""
ALIGNED = 8
"""Alignment in bytes of each array in `pack_all`."""


def pack(array: np.ndarray) -> dict[str, Any]:
    """Return `array` as plain JSON values."""
    data = zlib.compress(np.ascontiguousarray(array).tobytes(), level=1)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "zlib": base64.b64encode(data).decode("ascii")}


def unpack(state: Mapping[str, Any]) -> np.ndarray:
    """Return the array that `pack` was given. Raises ValueError unless it is numeric."""
    dtype, shape = _numbers(state["dtype"]), tuple(state["shape"])
    if not 0 <= (size := math.prod(shape) * dtype.itemsize) <= MAX_BYTES:
        raise ValueError(f"an array of {shape} {dtype} is not between 0 and {MAX_BYTES:,} bytes")
    data = zlib.decompressobj().decompress(base64.b64decode(state["zlib"]), size + 1)  # stops zip bombs
    if len(data) != size:
        raise ValueError(f"an array of {shape} {dtype} has {size} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()


class Packed:
    """Annotation of an array in a state or a rule: `Annotated[np.ndarray, Packed("f4", "rows", 2)]`.

    An axis is a length, a name, or None for any length. Axes with one name have equal length within a state. `index`:
    the axis (or its length) that the numbers index. Floats are finite unless `nan`.
    """

    def __init__(self, dtype: str, *axes: str | int | None, index: str | int = "", nan: bool = False) -> None:
        self.dtype, self.axes, self.index, self.nan = np.dtype(dtype), axes, index, nan

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self.read, serialization=_PACKING)

    def read(self, value: Any, info: ValidationInfo) -> np.ndarray:
        """Return the array packed in `value`. Raises ValueError if it does not match this annotation."""
        try:
            array = value if isinstance(value, np.ndarray) else unpack(value)
        except (LookupError, TypeError, OverflowError, zlib.error) as error:
            raise ValueError(f"is not a packed array ({type(error).__name__}: {error})") from None
        lengths: dict[str, int] = {} if info.context is None else info.context
        wanted = []
        for axis, n in zip(self.axes, array.shape, strict=False):
            length = lengths.setdefault(axis, n) if isinstance(axis, str) else axis
            wanted.append(n if length is None else length)
        if array.dtype != self.dtype or array.ndim != len(self.axes) or list(array.shape) != wanted:
            raise ValueError(f"is an array of {list(array.shape)} {array.dtype}, not of {wanted} {self.dtype}")
        if array.dtype.kind == "f" and not self.nan and not np.isfinite(array).all():
            raise ValueError("has numbers that are not finite")
        bound = lengths.get(self.index) if isinstance(self.index, str) else self.index
        if bound is not None and not ((array >= 0) & (array < bound)).all():
            raise ValueError(f"has numbers from {array.min()} to {array.max()}, not from 0 to {bound - 1}")
        return array


def pack_all(arrays: Sequence[np.ndarray | None]) -> dict[str, Any]:
    """Pack many small arrays as one; unpacking them one by one takes several times as long."""
    like = [None if a is None else [a.dtype.str, list(a.shape)] for a in arrays]
    data = b"".join(_aligned(np.ascontiguousarray(a).tobytes()) for a in arrays if a is not None)
    return {"like": like, "bytes": pack(np.frombuffer(data, np.uint8))}


def unpack_all(state: Mapping[str, Any]) -> list[np.ndarray | None]:
    """Return the arrays given to `pack_all`; they share memory."""
    data, at = unpack(state["bytes"]), 0
    found: list[np.ndarray | None] = []
    for like in state["like"]:
        if like is None:
            found.append(None)
            continue
        array: np.ndarray = np.ndarray(like[1], _numbers(like[0]), data, at)
        found.append(array)
        at += -(-array.nbytes // ALIGNED) * ALIGNED
    return found


@lru_cache(maxsize=64)
def _numbers(name: Any) -> np.dtype[Any]:
    """Return a numeric dtype by name. NumPy would follow the bytes of an object dtype as pointers."""
    dtype = np.dtype(name)
    if dtype.kind not in "biuf" or dtype.itemsize > ALIGNED or not isinstance(name, str):
        raise ValueError(f"an array of {name!r:.50} has no numbers")
    return dtype


def _aligned(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // ALIGNED) * ALIGNED, b"\0")


_PACKING = core_schema.plain_serializer_function_ser_schema(pack)
