"""Talking to a model that plays a text game: one thought and one action a turn (ReAct), or bare commands in words.

ReAct: Yao et al., "ReAct: Synergizing Reasoning and Acting in Language Models", 2022. Turns are messages here.
The style in words is for small word-level models, whose completion is the command itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Literal

Style = Literal["react", "words"]

NOTHING = "Nothing happens."
"""Answer to a command that it does not understand or that is not possible."""
UNKNOWN = "<unk>"
"""Stands for a word that the vocabulary lacks."""
_ACTION = re.compile(r"\baction[ \t]*(?:(?:\*\*|__)[ \t]*)?:", re.IGNORECASE)
_EDGES = " \t\r\"'`*_<>[](){}“”‘’"
_TITLE = re.compile(r"-=.*=-")
_PUNCTUATION = re.compile(r"([^\w\s])")


def parse_action(text: str) -> str | None:
    """The command behind the last "Action:", in normal form; None when there is none.

    Only its first line counts. Quotes, brackets, backticks and a final full stop are taken off; the rest is lower case
    with single blanks.
    """
    marks = list(_ACTION.finditer(text))
    if not marks:
        return None
    lines = text[marks[-1].end() :].strip(_EDGES + "\n").splitlines()
    return normal_form(lines[0]) or None if lines else None


def normal_form(command: str) -> str:
    """A command in lower case, with single blanks, without what may stand around it."""
    bare = command.strip(_EDGES).rstrip(".").strip(_EDGES)
    return " ".join(bare.lower().split())


def system_prompt(role: str, actions: Sequence[str], example: Sequence[tuple[str, str, str]]) -> str:
    """Rules, the vocabulary of actions, and one example of (observation, thought, action) turns.

    `role` says in a sentence or two what the model is and what it is to achieve.
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
    """Text for a word-level tokenizer: lower case, punctuation on its own, single blanks instead of line ends."""
    return " ".join(_PUNCTUATION.sub(r" \1 ", text.lower()).split())


def worded(text: str, vocabulary: Collection[str] | None = None) -> str:
    """An observation in words, without titles of rooms, before the mark behind which the next command stands."""
    shown = words(_TITLE.sub(" ", text)).split()
    if vocabulary is not None:
        shown = [word if word in vocabulary else UNKNOWN for word in shown]
    return f" {' '.join(shown)} > "
