"""Read files of W&B's."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path


def frames(file: Path) -> Iterator[bytes]:
    """Records of a file of W&B's: a LevelDB log of blocks of 32 KiB, behind a header of 7 bytes."""
    data, at, parts = file.read_bytes(), 7, []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []
