"""Arrays inside the JSON state of a checkpoint: exact, compact, self-describing."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def pack(array: np.ndarray) -> dict[str, Any]:
    """`array` as plain JSON values."""
    data = zlib.compress(np.ascontiguousarray(array).tobytes(), level=1)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "zlib": base64.b64encode(data).decode("ascii")}


def unpack(state: Mapping[str, Any]) -> np.ndarray:
    """The array that `pack` was given."""
    data = zlib.decompress(base64.b64decode(state["zlib"]))
    return np.frombuffer(data, np.dtype(state["dtype"])).reshape(state["shape"]).copy()
