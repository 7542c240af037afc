"""TextWorld: text games that are made to order, or those of a directory, played in worker processes.

Games are made once and kept under $WINNOW_CACHE (or ~/.cache/winnow). Train and test games never show the same first
observation. Côté et al., "TextWorld: A Learning Environment for Text-based Games", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ....env.workers.file_cache import kept, loaded, save_json
from ..library import Card
from ..react import UNKNOWN, system_prompt
from ..task import GameOptions, GameTask
from .library import FORMAT, Challenge, games_of
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
class TextWorldConfig(GameOptions):
    """TextWorld games, generated as by tw-make or read from a directory."""

    name: ClassVar[str] = "textworld"
    challenge: Challenge = "treasure_hunter"
    options: dict[str, Any] = field(default_factory=dict)
    """tw-make's options of that challenge, e.g. `{level: 5}`; of `custom`: nb_rooms, nb_objects, quest_length, ..."""
    grammar: dict[str, Any] = field(default_factory=dict)
    """TextWorld's options of wording; `{theme: basic, only_last_action: true}` is terse and does not tell the way."""
    games: str | None = None
    """A directory of .z8 games with their .json; its folders `train` and `test` are the split where they exist."""
    train_size: int | None = None
    """None: 64 generated games, or all there are in `games`."""
    test_size: int | None = None
    """None: 16 generated games; of `games` the folder `test`, or one in five."""
    reward: Reward = "won"
    """`won`: 1 for a game that is won, else 0. `score`: the share of the game's points."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.games is not None and (self.options or self.grammar):
            raise ValueError("textworld: options and grammar are for generated games; remove them, or games")

    def build(self) -> TextWorld:
        return TextWorld(self)


class TextWorld(GameTask):
    """The task. Raises ValueError on options that TextWorld does not know, and when there are too few games.

    Its vocabulary is what a stroll through every game has come upon; any other word of a game is shown as `<unk>`.
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
