"""TextWorld: generated text games, or those of a directory, played in worker processes.

Games are made once and stored under $WINNOW_CACHE (or ~/.cache/winnow). Train and test games never show the same first
observation. Côté et al., "TextWorld: A Learning Environment for Text-based Games", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....env.workers.file_cache import kept, loaded, save_json
from ..library import Card
from ..react import UNKNOWN, system_prompt
from ..task import GameTask
from .library import FORMAT, TextWorldGames, games_of
from .play import Reward

ROLE = (
    "You play a text game. Each game sets a task at its start; reach its goal in as few turns as you can. "
    "You only see the room that you are in."
)
EXAMPLE = (
    (
        "Take the lamp from the shelf in the attic.\n-= Hall =-\nYou are in the hall. There is an exit to the north.",
        "The lamp is in the attic, which may lie behind the only exit.",
        "go north",
    ),
    (
        "-= Attic =-\nYou are in the attic. There is a shelf here. The shelf holds a lamp and a coin.",
        "There is the lamp.",
        "take lamp from shelf",
    ),
)


@dataclass(frozen=True)
class TextWorldConfig(TextWorldGames):
    """TextWorld games, generated as by tw-make or read from a directory."""

    reward: Reward = "won"
    """`won`: 1 for a won game, else 0. `score`: the share of the game's points."""

    def build(self) -> TextWorld:
        return TextWorld(self)


class TextWorld(GameTask):
    """Task of TextWorld games. Raises ValueError on options unknown to TextWorld, and for too few games.

    Its vocabulary is the words met on a stroll through every game; any other word of a game is shown as `<unk>`.
    """

    name = "textworld"
    format = FORMAT

    def __init__(self, config: TextWorldConfig) -> None:
        super().__init__(config, *games_of(config))
        self._words.add(UNKNOWN)
        self.known = self._words
        self.env_options["reward"] = config.reward
        if config.style == "words":
            words = sorted(self._words)
            file = kept("textworld", "words", words)
            if loaded(file) != words:
                save_json(file, words)
            self.env_options["vocabulary"] = str(file)

    def _columns(self, card: Card) -> dict[str, Any]:
        return {"task_type": card["kind"], "max_score": card["max_score"]}

    def _opening(self, card: Card) -> str:
        return str(card["first"])

    def _rules(self, card: Card) -> str:
        return system_prompt(ROLE, card["actions"], EXAMPLE)
