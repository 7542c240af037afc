"""Pydantic errors as lines with a remedy."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from .dotted import did_you_mean
from .foreign_values import answer_to, meant_by
from .migration_hints import key_hints


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return ` Did you mean 'x'?`, or the list of known names."""
    others = f" Known: {', '.join(sorted(known))}." if known else " This version has none."
    return did_you_mean(name, known) or others


def explain(error: ValidationError, known: Sequence[str], where: str) -> str:
    """Return pydantic's errors, one a line, with our name for an unknown key, or the nearest valid name."""
    lines = []
    errors = error.errors()
    sections = [e for e in errors if e["loc"][-1:] == ("dict[str,any]",)]
    methods = {e["loc"][:-1] for e in sections if not isinstance(e["input"], dict)}
    for e in errors:
        key = ".".join(str(part) for part in e["loc"])
        if e["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            for name, answer in key_hints(key, e["input"]):
                hint = f" Here {answer}." if answer else suggestion(name, known)
                lines.append(f"unknown key '{name}'.{hint}")
        elif e["type"] == "missing":
            lines.append(f"missing key '{key}'")
        elif e["type"] == "model_type":
            lines.append(_no_section(key, "a section, `{key: value}`", e["input"]))
        elif e["loc"][:-1] in methods and not isinstance(e["input"], list):
            if e["loc"][-1] == "str":  # this line stands for a method's other forms, too
                lines.append(_no_section(key.removesuffix(".str"), "a name, or a section `{name: NAME}`", e["input"]))
        elif not e["loc"]:
            lines.append(str(e["msg"]).removeprefix("Value error, "))
        else:
            answer = answer_to(str(e["loc"][0]), e["input"])
            lines.append(f"{key}: {e['msg']} (got {e['input']!r})" + (f". Here {answer}." if answer else ""))
    return "\n".join(f"{where}: {line}" for line in lines)


def _no_section(key: str, expected: str, given: object) -> str:
    answer = meant_by(key, given)
    return f"{key}: expected {expected}, not {given!r}" + (f". Here {answer}." if answer else "")
