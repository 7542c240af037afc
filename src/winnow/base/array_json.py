"""Arrays inside the JSON state of a checkpoint: exact, compact, self-describing."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

MOST = 1 << 30
"""Bytes of an array, at most: a small text may be a thousand times as many."""
ALIGNED = 8
"""Bytes at a multiple of which each of many arrays begins."""


def pack(array: np.ndarray) -> dict[str, Any]:
    """`array` as plain JSON values."""
    data = zlib.compress(np.ascontiguousarray(array).tobytes(), level=1)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "zlib": base64.b64encode(data).decode("ascii")}


def unpack(state: Mapping[str, Any]) -> np.ndarray:
    """The array that `pack` was given. Raises ValueError where it is none of numbers."""
    dtype, shape = _numbers(state["dtype"]), tuple(state["shape"])
    if not 0 <= (size := math.prod(shape) * dtype.itemsize) <= MOST:
        raise ValueError(f"an array of {shape} {dtype} is none that a state has")
    data = zlib.decompressobj().decompress(base64.b64decode(state["zlib"]), size + 1)  # bombs stay packed
    if len(data) != size:
        raise ValueError(f"an array of {shape} {dtype} has {size} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def pack_all(arrays: Sequence[np.ndarray | None]) -> dict[str, Any]:
    """Many small arrays as one: to unpack each for itself takes several times as long."""
    like = [None if a is None else [a.dtype.str, list(a.shape)] for a in arrays]
    data = b"".join(_aligned(np.ascontiguousarray(a).tobytes()) for a in arrays if a is not None)
    return {"like": like, "bytes": pack(np.frombuffer(data, np.uint8))}


def unpack_all(state: Mapping[str, Any]) -> list[np.ndarray | None]:
    """What `pack_all` was given; the arrays share their memory."""
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
    """NumPy would take bytes for pointers where they are said to be objects, and follow them."""
    dtype = np.dtype(name)
    if dtype.kind not in "biuf" or dtype.itemsize > ALIGNED or not isinstance(name, str):
        raise ValueError(f"an array of {name!r:.50} has no numbers")
    return dtype


def _aligned(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // ALIGNED) * ALIGNED, b"\0")
