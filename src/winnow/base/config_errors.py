"""Pydantic errors as lines with a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pydantic import ValidationError

from .foreign_values import answer_to
from .migration_hints import key_hints


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return ` Did you mean 'x'?`, or the list of known names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(sorted(known))}." if known else " This version has none."


def explain(error: ValidationError, known: Sequence[str], where: str) -> str:
    """Return pydantic's errors, one a line, with our name for an unknown key, or the nearest valid name."""
    lines = []
    for e in error.errors():
        key = ".".join(str(part) for part in e["loc"])
        if e["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            for name, answer in key_hints(key, e["input"]):
                hint = f" Here {answer}." if answer else suggestion(name, known)
                lines.append(f"unknown key '{name}'.{hint}")
        elif e["type"] == "missing":
            lines.append(f"missing key '{key}'")
        elif e["loc"][1:] == ("dict[str,any]",):
            continue  # a method's other form: a name
        elif not e["loc"]:
            lines.append(str(e["msg"]).removeprefix("Value error, "))
        else:
            answer = answer_to(str(e["loc"][0]), e["input"])
            problem = f"{key}: {e['msg']} (got {e['input']!r})"
            if e["type"] == "model_type":
                problem = f"{key}: expected a section, `{{key: value}}`, not {e['input']!r}"
            elif e["type"] == "string_type" and e["loc"][1:] == ("str",):
                problem = f"{e['loc'][0]}: expected a name, or a section `{{name: NAME}}`, not {e['input']!r}"
            lines.append(problem + (f". Here {answer}." if answer else ""))
    return "\n".join(f"{where}: {line}" for line in lines)
