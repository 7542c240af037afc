"""Install commands for extras of this copy of the package, which is on no registry yet."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

NAME = "winnow-rl"


def install(extra: str) -> str:
    """Return the command that installs `extra` (empty for the package alone) from this copy's origin: its checkout,
    directory, wheel or address."""
    extras = f"[{extra}]" if extra else ""
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}{extras}'"
    try:
        text = distribution(NAME).read_text("direct_url.json")  # PEP 610; absent for a package of an index
    except PackageNotFoundError:
        text = None
    origin = json.loads(text) if text else {}
    vcs, url = origin.get("vcs_info", {}).get("vcs"), origin.get("url")
    source = f" @ {vcs}+{url}" if vcs else f" @ {url}"
    return f"pip install '{NAME}{extras}{source if url else ''}'"
