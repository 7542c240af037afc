"""Install commands for extras of this copy of the package, which is on no registry yet."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "winnow-rl"


def install(extra: str) -> str:
    """Return the command that installs `extra` (empty for the package alone) from this copy's origin: its checkout,
    directory, wheel or address."""
    return f"pip install {_requirement(f'[{extra}]' if extra else '')}"


def _requirement(extras: str) -> str:
    origin = _origin()
    url, directory = origin.get("url", ""), "dir_info" in origin
    path = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    if path and directory:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"{editable}'{path}{extras}'"
    if url:
        vcs = origin.get("vcs_info", {}).get("vcs")
        url = f"{vcs}+{url}" if vcs else url
        return f"'{NAME}{extras} @ {url}'"
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file():
        return f"-e '{checkout}{extras}'"
    return f"'{NAME}{extras}'"


def _origin() -> dict[str, Any]:
    """Return the PEP 610 origin; empty for a package of an index."""
    try:
        text = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    found: dict[str, Any] = json.loads(text) if text else {}
    return found
