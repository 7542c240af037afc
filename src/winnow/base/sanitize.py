"""Texts and values of a run in a form that others may see: without secrets, and safe for a page."""

from __future__ import annotations

import math
import os
import pwd
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE", re.IGNORECASE)
_SHORTEST = 6
"""Shortest variable value to redact, in characters: a shorter one is part of harmless words."""
_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/?#@'\"<>]+@", re.IGNORECASE)
_QUERY = re.compile(r"([?&][\w.-]*(?:key|token|secret|passw|sig|auth|credential)[\w.-]*=)[^\s&#'\"<>)]+", re.IGNORECASE)
_BEARER = re.compile(r"\b(Bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)


def home() -> str:
    """Return the home directory without a final slash; empty if missing or `/`, as in some containers."""
    found = os.path.expanduser("~")
    return "" if found in ("~", "/") else found.rstrip("/")


def redact(text: str, names: Iterable[str] = ()) -> str:
    """Return `text` with `$NAME` for values of variables that are named like secrets (or in `names`). User, password
    and tokens in URLs become `***`, the home directory `~`."""
    if not text:
        return text
    own = {name for name in os.environ if _SECRET_NAME.search(name)} | set(names)
    values = {os.environ.get(name, ""): name for name in sorted(own)}
    for value in sorted(values, key=len, reverse=True):  # one may be part of another
        if len(value) >= _SHORTEST:
            text = text.replace(value, f"${values[value]}")
    text = _BEARER.sub(r"\1***", _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text)))
    for path in _homes():
        text = re.sub(rf"(?<![\w.-]){re.escape(path)}(?![\w.-])", "~", text)
    return text


def _homes() -> list[str]:
    """Return homes of this process and of its user; a worker without this environment knows only the latter."""
    try:
        users = pwd.getpwuid(os.getuid()).pw_dir.rstrip("/")
    except KeyError:
        users = ""
    return sorted({home(), users} - {""}, key=len, reverse=True)


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
