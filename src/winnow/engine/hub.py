"""Files of a model, from a directory or a hub."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from urllib.parse import quote

from .pretrained import HUB_TIMEOUT_S, located


@cache
def hub_answers(source: str) -> bool:
    """Return whether the hub responds about a model within `HUB_TIMEOUT_S`, even with "not found"."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(f"{constants.ENDPOINT}/{quote(source)}", timeout=HUB_TIMEOUT_S)
    except Exception:  # the client and the user's proxy may raise anything
        return False
    return True


def file_of(source: str | Path, name: str) -> Path | None:
    """Return a file of a model, fetched if it is on a hub; None if it does not exist or cannot be reached."""
    place = located(str(source))
    if Path(place).is_dir():
        file = Path(place) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(
            place,
            name,
            local_files_only=not hub_answers(place),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except Exception:  # no such model: loading it reports that
        return None
    return Path(found) if found else None
