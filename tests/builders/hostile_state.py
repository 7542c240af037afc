"""Build damaged checkpoints."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from winnow.base.array_json import pack, unpack

VALUES = [None, -1, 1e999, "x", [], {}, [None], 2**70, True]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a state but the configuration, which is checked as any other; of lists the first two."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in inside:
        if key != "config":
            yield from places(inner, (*path, key))


def seal(directory: Path, *but: str) -> None:
    """A manifest that is right about what is there."""
    if "manifest.json" in but:
        return
    manifest = json.loads((directory / "manifest.json").read_text())
    for name in [*manifest["files"]]:
        if (directory / name).exists():
            data = (directory / name).read_bytes()
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        else:
            del manifest["files"][name]
    (directory / "manifest.json").write_text(json.dumps(manifest))


def odd(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """The arrays of a whole group are one of bytes: there, the change is to any of them."""
    kind = array.dtype
    values = [-1, 3, 2**40, 2**63 - 1] if kind.kind in "iu" else [-1, 1e300, np.nan, np.inf]
    flat = array.ravel().copy()
    with np.errstate(over="ignore"):
        flat[rng.randrange(flat.size)] = np.array(rng.choice(values)).astype(kind)
    return flat.reshape(array.shape)


def changed(state: Any, rng: random.Random) -> Any:
    """One place is another value, or gone; of an array, one of its numbers is another."""
    state, path = copy.deepcopy(state), rng.choice([*places(state)])
    inside = state
    for key in path[:-1]:
        inside = inside[key]
    if path[-1] == "zlib" and rng.random() < 0.7 and (array := unpack(inside)).size:
        inside |= pack(odd(array, rng))
    elif (value := rng.choice([*VALUES, "removed"])) == "removed":
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return state
