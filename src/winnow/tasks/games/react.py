"""Prompts for a model that plays a text game: one thought and one action a turn (ReAct), or bare commands in words.

ReAct: Yao et al., "ReAct: Synergizing Reasoning and Acting in Language Models", 2022. Turns are messages here. The
style in words is for small word-level models, whose completion is the command itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Literal

Style = Literal["react", "words"]

NOTHING = "Nothing happens."
"""Answer to a command that is not understood or not possible."""
UNKNOWN = "<unk>"
"""Replaces a word missing from the vocabulary."""
_ACTION = re.compile(r"\baction[ \t]*(?:(?:\*\*|__)[ \t]*)?:", re.IGNORECASE)
_EDGES = " \t\r\"'`*_<>[](){}“”‘’"
_TITLE = re.compile(r"-=.*=-")
_PUNCTUATION = re.compile(r"([^\w\s])")


def parse_action(text: str) -> str | None:
    """Return the command after the last "Action:" in normal form, or None.

    Only its first line counts. Quotes, brackets, backticks and a final full stop are removed; the rest is lower case
    with single blanks.
    """
    marks = list(_ACTION.finditer(text))
    if not marks:
        return None
    lines = text[marks[-1].end() :].strip(_EDGES + "\n").splitlines()
    return normal_form(lines[0]) or None if lines else None


def normal_form(command: str) -> str:
    """Return a command in lower case, with single blanks, without surrounding punctuation."""
    bare = command.strip(_EDGES).rstrip(".").strip(_EDGES)
    return " ".join(bare.lower().split())


def system_prompt(role: str, actions: Sequence[str], example: Sequence[tuple[str, str, str]]) -> str:
    """Return rules, the vocabulary of actions, and one example of (observation, thought, action) turns.

    `role` describes the model and its goal in a sentence or two.
    """
    shown = "\n\n".join(
        f"Observation: {observation}\nThought: {thought}\nAction: {action}" for observation, thought, action in example
    )
    return (
        f"{role}\n\n"
        "Each turn you are told what you see. Answer with one thought and one action, in exactly this form:\n"
        "Thought: <what you think>\n"
        "Action: <the action>\n\n"
        "Rules:\n"
        "- Give one action a turn, on one line, and nothing after it.\n"
        "- An action that does not exist, or is not possible now, does nothing and costs a turn.\n\n"
        "Actions:\n" + "\n".join(f"- {action}" for action in actions) + f"\n\nAn example:\n\n{shown}"
    )


def words(text: str) -> str:
    """Return text for a word-level tokenizer: lower case, separate punctuation, single blanks instead of line ends."""
    return " ".join(_PUNCTUATION.sub(r" \1 ", text.lower()).split())


def worded(text: str, vocabulary: Collection[str] | None = None) -> str:
    """Return an observation in words, without titles of rooms, followed by the mark that precedes the next command."""
    shown = words(_TITLE.sub(" ", text)).split()
    if vocabulary is not None:
        shown = [word if word in vocabulary else UNKNOWN for word in shown]
    return f" {' '.join(shown)} > "
