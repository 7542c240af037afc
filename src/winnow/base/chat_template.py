"""The key `chat_template`: a template's text, or a file with it."""

from __future__ import annotations

from pathlib import Path

MAX_CHARACTERS = 1_000_000


def template_text(given: str) -> str:
    """Return the text of a template given as text or file; keep the name of one of the tokenizer's own templates.

    Raises ValueError for a file that is missing, empty or not text.
    """
    if "{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    if path.is_dir():
        raise ValueError(f"{given} is a directory; name the file in it, e.g. {path / 'chat_template.jinja'}")
    if not path.is_file():
        if not given.strip() or "/" in given or path.suffix:
            raise ValueError(f"no such file ({given!r}); give a file, or the text of a template")
        return given
    try:
        text = path.read_text(encoding="utf-8") if path.stat().st_size <= MAX_CHARACTERS else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{given} cannot be read: {error}") from None
    if "{" not in text:
        raise ValueError(f"{given} is no chat template: it has no {{{{ ... }}}} or {{% ... %}}")
    return text
