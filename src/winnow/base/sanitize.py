"""Strings and values of a run in a form that a page can hold and show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_CONTROL = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
_DIRECTION = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF]
_INVISIBLE = {code: f"\\x{code:02x}" for code in _CONTROL} | {code: f"\\u{code:04x}" for code in _DIRECTION}


def visible(text: str) -> str:
    """Return `text` with control and direction-changing characters made visible and lone surrogates replaced."""
    return text.encode("utf-8", "replace").decode().translate(_INVISIBLE)


def plain(value: Any, text: Callable[[str], str] = visible) -> Any:
    """Return `value` in a form that JSON can hold and a page can show; `text` makes strings in it so."""
    if isinstance(value, Mapping):
        return {visible(str(k)): plain(v, text) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, text) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float) else text(str(value))
