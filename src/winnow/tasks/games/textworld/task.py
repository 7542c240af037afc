"""TextWorld: generated text games, or those of a directory, played in worker processes.

Games are made or described once and reused under the same options. Train and test games never show the same first
observation. Côté et al., "TextWorld: A Learning Environment for Text-based Games", 2018.

$WINNOW_CACHE/textworld/made/<options>/<seed>/game.z8, game.json
                        cards/<game>.json    data for playing the game, see `games.describe`
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection
from dataclasses import field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from ....config.options import CHECKED
from ....env.workers.file_cache import kept, making
from ....env.workers.worker import WorkerPool
from ..library import Card, GameOptions, cards_of, different
from ..react import UNKNOWN, system_prompt
from ..task import GameTask
from .games import digest_of, intact
from .play import Reward

Challenge = Literal["coin_collector", "treasure_hunter", "simple", "cooking", "custom"]

TRAIN_SIZE, TEST_SIZE = 64, 16
TEST_SHARE = 0.2
GENERATE_TIMEOUT_S = 120.0
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


@dataclass(frozen=True, config=CHECKED)
class TextWorldConfig(GameOptions):
    """TextWorld games, generated as by tw-make or read from a directory."""

    name: ClassVar[str] = "textworld"
    format: ClassVar[int] = 1
    challenge: Challenge = "treasure_hunter"
    options: dict[str, Any] = field(default_factory=dict)
    """tw-make's options of that challenge, e.g. `{level: 5}`; of `custom`: nb_rooms, nb_objects, quest_length, ..."""
    grammar: dict[str, Any] = field(default_factory=dict)
    """TextWorld's wording options; `{theme: basic, only_last_action: true}` is terse and does not reveal the way."""
    games: str | None = None
    """A directory of .z8 games with their .json; its folders `train` and `test` are the split where they exist."""
    train_size: PositiveInt | None = None
    """None: 64 generated games, or all of `games`."""
    test_size: NonNegativeInt | None = None
    """None: 16 generated games; of `games` the folder `test`, or one in five."""
    reward: Reward = "won"
    """`won`: 1 for a won game, else 0. `score`: the share of the game's points."""

    def __post_init__(self) -> None:
        if self.games is not None and (self.options or self.grammar):
            raise ValueError("textworld: options and grammar are for generated games; remove them, or games")

    def build(self) -> TextWorld:
        return TextWorld(self)


class TextWorld(GameTask):
    """Task of TextWorld games. Raises ValueError on options unknown to TextWorld, and for too few games.

    Its vocabulary is the words met on a stroll through every game; any other word of a game is shown as `<unk>`.
    """

    def __init__(self, config: TextWorldConfig) -> None:
        self._kind = config.challenge if config.games is None else "textworld"
        super().__init__(config, *games_of(config))
        self._words.add(UNKNOWN)
        self.known = self._words
        self.env_options["reward"] = config.reward
        if config.style == "words":
            self.env_options["vocabulary"] = sorted(self._words)

    def _shown(self, card: Card) -> tuple[str, str, dict[str, Any]]:
        rules = system_prompt(ROLE, card["actions"], EXAMPLE)
        return rules, str(card["first"]), {"task_type": self._kind, "max_score": card["max_score"]}


def games_of(config: TextWorldConfig) -> tuple[list[Card], list[Card]]:
    """Return cards of the train and the test games. Raises ValueError for too few games or unknown options."""
    with making("textworld", config.workers, GENERATE_TIMEOUT_S) as pool:
        if config.games is not None:
            return _split(pool, config, Path(config.games).expanduser().resolve())
        test = _generated(pool, config, "test", TEST_SIZE if config.test_size is None else config.test_size, ())
        shown = {card["first"] for card in test}
        return _generated(pool, config, "train", config.train_size or TRAIN_SIZE, shown), test


def _generated(pool: WorkerPool, config: TextWorldConfig, part: str, wanted: int, shown: Collection[str]) -> list[Card]:
    """Return `wanted` different games, excluding first observations in `shown`."""
    options = {"challenge": config.challenge, "options": config.options, "grammar": config.grammar}
    folder = kept("textworld", "made", [config.format, options]).with_suffix("")
    numbers = (hashlib.sha256(f"{part}/{config.seed}/{i}".encode()).digest() for i in count())
    seeds = (int.from_bytes(number[:4]) >> 1 for number in numbers)
    asked = ({**options, "seed": seed, "folder": str(folder / str(seed))} for seed in seeds)
    remedy = f"set options that make {config.challenge} larger"
    return different(config, pool, part, wanted, asked, intact, lambda card: card["first"] not in shown, remedy)


def _split(pool: WorkerPool, config: TextWorldConfig, root: Path) -> tuple[list[Card], list[Card]]:
    """Split a user's games by their folders `train` and `test`, or at random."""
    if (root / "train").is_dir():
        train, test = (_described(pool, config, root / part) for part in ("train", "test"))
        both = {card["id"] for card in train} & {card["id"] for card in test}
        if both:
            path = next(card["path"] for card in test if card["id"] in both)
            raise ValueError(f"textworld: {path} is a training game too; remove it from one of the two folders")
        train, test = train[: config.train_size], test[: config.test_size]
    else:
        games = _described(pool, config, root)
        random.Random(f"textworld/{config.seed}").shuffle(games)
        held_out = round(TEST_SHARE * len(games)) if config.test_size is None else config.test_size
        test, shown = games[:held_out], {card["first"] for card in games[:held_out]}
        train = [card for card in games[held_out:] if card["first"] not in shown][: config.train_size]
    if not train:
        raise ValueError(f"textworld: no training games in {root}; give .z8 games with their .json, or lower test_size")
    return train, test


def _described(pool: WorkerPool, config: TextWorldConfig, folder: Path) -> list[Card]:
    """Return cards of the games in a folder."""
    games = sorted(folder.rglob("*.z8"))
    old = sorted(folder.rglob("*.ulx"))
    if old and not games:
        raise ValueError(f"textworld: {old[0]} is a Glulx game, which TextWorld no longer plays; make it as .z8")
    asked = [{"path": str(game)} for game in games]
    keys = [[str(game), digest_of(game)] for game in games]
    return cards_of(config, pool, "describe", asked, keys, intact)
