"""One TextWorld game, played in a worker process on its bare Z-machine.

The interpreter is Jericho's, as in TextWorld itself, without TextWorld's own bookkeeping. All siblings of a group share
one loaded game. Each holds its machine's state (40 KB), restored before a step (10 us; a step takes 0.5 ms).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Literal

from ....env.base import StepResult, before_stop
from ....env.workers.file_cache import load_json
from ..react import NOTHING, Style, normal_form, parse_action, worded, words

Reward = Literal["won", "score"]

WON, LOST = "*** The End ***", "*** You lost! ***"
LONGEST_COMMAND = 100
LOADED = 128
"""Games that a process keeps loaded, at 2 MB each."""

_BANNER_END = "$$"
_EXTRA = re.compile(r"<(score|moves)>\s*(-?\d+)\s*</\1>")
_COMMAND = re.compile(r"[a-z0-9][a-z0-9' -]*")
_SHORTHANDS = frozenset({"x", "l", "i", "n", "e", "s", "w", "north", "east", "south", "west"})


def play(card: str, style: Style, reward: Reward, vocabulary: Collection[str] | None = None) -> TextWorldEnv:
    """Return the game described by a card; other words than those of the vocabulary are shown as unknown."""
    return TextWorldEnv(load_json(card), style, reward, None if vocabulary is None else frozenset(vocabulary))


class TextWorldEnv:
    """Implements `Env`. The first observation is part of the prompt, so `reset` returns None."""

    def __init__(
        self, card: Mapping[str, Any], style: Style, reward: Reward, vocabulary: Collection[str] | None = None
    ) -> None:
        self._card, self._style, self._reward = card, style, reward
        self._vocabulary = vocabulary
        self._state: Any = None
        self._earned, self._score = 0.0, 0

    def reset(self) -> str | None:
        self._state = _machine(self._card["path"])[1]
        self._earned, self._score = 0.0, 0
        return None

    def step(self, text: str) -> StepResult:
        text = before_stop(text)
        command = parse_action(text) if self._style == "react" else spelled_as_in(self._card, normal_form(text))
        if command is None or not understood(self._card, command):
            return StepResult(self._shown(NOTHING), self._earned, info=self._progress(), action=command or "")
        raw, score = self.send(command)
        won, lost = WON in raw, LOST in raw
        self._earned = score / self._card["max_score"] if self._reward == "score" else float(won)
        return StepResult(self._shown(readable(raw)), self._earned, won or lost, self._progress(), command)

    def _progress(self) -> dict[str, float]:
        most = self._card["max_score"]
        return {"progress": min(max(self._score / most, 0.0), 1.0)} if most > 1 else {}

    def send(self, command: str) -> tuple[str, int]:
        """Return the game's output for a command, and its score so far."""
        machine, _ = _machine(self._card["path"])
        machine.set_state(self._state)
        raw = str(machine.step(command)[0])
        self._state = machine.get_state()
        self._score = int(dict(_EXTRA.findall(raw)).get("score", self._score))
        return _EXTRA.sub("", raw), self._score

    def _shown(self, text: str) -> str:
        return text if self._style == "react" else worded(text, self._vocabulary)


def understood(card: Mapping[str, Any], command: str) -> bool:
    """Return whether it is one command with a verb of the game: no interpreter commands, no second command after it."""
    verb, *rest = command.split() or [""]
    known = verb in card["verbs"] or verb in _SHORTHANDS
    return known and "then" not in rest and len(command) <= LONGEST_COMMAND and bool(_COMMAND.fullmatch(command))


def spelled_as_in(card: Mapping[str, Any], command: str) -> str:
    """Return a command in single words with the game's own spelling of its things: `x - box` is `x-box` again."""
    for name in card["spelled"]:
        command = command.replace(words(name), name)
    return command


def readable(raw: str) -> str:
    """Return output of the game without banner, status line, blank lines and the questions after the end."""
    text = raw.rpartition(_BANNER_END)[2].partition("***")[0]
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(">"))


@lru_cache(maxsize=LOADED)
def _machine(path: str) -> tuple[Any, Any]:
    """Return a loaded game and its state at the start."""
    import jericho

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jericho.UnsupportedGameWarning)  # Jericho has no rewards for it
        machine = jericho.FrotzEnv(path, 1)
    machine.reset()
    machine.step("tw-extra-infos score")  # prints the score after every command
    return machine, machine.get_state()
