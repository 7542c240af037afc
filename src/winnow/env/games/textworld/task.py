"""TextWorld: text games that are made to order, or those of a directory, played in worker processes.

Games are made once and kept under $WINNOW_CACHE (or ~/.cache/winnow). Train and test games never show the same first
observation. Côté et al., "TextWorld: A Learning Environment for Text-based Games", 2018.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ....types import Prompt
from ...base import OverlappingEnv, RewardFn
from ...workers.remote import EnvPool
from ..react import system_prompt, words
from .library import FORMAT, Challenge, games_of, kept_words, walks_of
from .play import UNKNOWN, Reward, Style, worded

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
class TextWorldConfig:
    """TextWorld games, generated as by tw-make or read from a directory."""

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
    seed: int = 0
    max_turns: int = 30
    max_turn_length: int | None = None
    """The most tokens sampled in a turn; None: only max_completion_length bounds it."""
    style: Style = "react"
    """`react`: messages, a thought and an action a turn. `words`: lower-case words, the completion is the command."""
    reward: Reward = "won"
    """`won`: 1 for a game that is won, else 0. `score`: the share of the game's points."""
    demo_noise: float = 0.25
    """Share of random commands in demonstrations."""
    demo_size: int | None = None
    """Training games that are demonstrated, the first ones; None: all. The others are new to a warm-started model."""
    workers: int = 2
    timeout_s: float = 30.0
    """Bounds one step of a game."""

    def __post_init__(self) -> None:
        least = {"train_size": 1, "test_size": 0, "max_turns": 1, "workers": 1}
        least |= {"demo_size": 1, "max_turn_length": 1}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise ValueError(f"textworld: {name} must be at least {value}, not {given}")
        if not 0 <= self.demo_noise <= 1:
            raise ValueError(f"textworld: demo_noise must lie between 0 and 1, not {self.demo_noise}")
        if self.games is not None and (self.options or self.grammar):
            raise ValueError("textworld: options and grammar are for generated games; remove them, or games")

    def build(self) -> TextWorld:
        return TextWorld(self)


class TextWorld:
    """The task. Raises ValueError on options that TextWorld does not know, and when there are too few games."""

    name = "textworld"
    stop: tuple[str, ...] = ()

    def __init__(self, config: TextWorldConfig) -> None:
        self.config = config
        self.max_turns, self.max_turn_length = config.max_turns, config.max_turn_length
        self.reward_funcs: list[RewardFn] = []
        self._pool = EnvPool(config.workers, config.timeout_s)
        train, test = games_of(config)
        self._cards = {card["id"]: card for card in (*train, *test)}
        self._words = frozenset({UNKNOWN, ">"}.union(*(card["words"] for card in self._cards.values())))
        self._words_file = str(kept_words(sorted(self._words)))
        self.test = [self._prompt(i, card) for i, card in enumerate(test)]
        self.train = [self._prompt(i, card) for i, card in enumerate(train)]

    def make_env(self, prompt: Prompt) -> OverlappingEnv:
        kwargs = {"card": self._cards[prompt.id]["file"], "style": self.config.style, "reward": self.config.reward}
        if self.config.style == "words":
            kwargs["vocabulary"] = self._words_file
        return self._pool.make("winnow.env.games.textworld.play:play", kwargs)

    def fingerprint(self) -> str:
        free = {"games", "workers", "timeout_s", "demo_noise", "demo_size"}
        options = {k: v for k, v in asdict(self.config).items() if k not in free}
        ids = [[p.id for p in part] for part in (self.train, self.test)]
        content = json.dumps({"format": FORMAT, "games": ids, **options}, sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    def demonstrations(self, seed: int) -> Iterator[tuple[str, list[str]]]:
        """Walks through training games, with a share of random commands. Style `words` only."""
        if self.config.style != "words":
            raise ValueError("textworld: only style: words has demonstrations; use a pretrained model for react")
        prompts = self.train[: self.config.demo_size]
        walks = walks_of([self._cards[p.id] for p in prompts], self.config)
        shown = list(zip(prompts, walks, strict=True))
        rng = random.Random(f"textworld/demonstrations/{seed}")
        while True:
            prompt, choices = rng.choice(shown)
            walk = rng.choice(choices)
            yield str(prompt.text), [worded(t, self._words) if i % 2 else words(t) for i, t in enumerate(walk)]

    def vocabulary(self) -> Sequence[str]:
        """What a stroll through every game has come upon; any other word of a game is shown as `<unk>`."""
        return sorted(self._words)

    def _prompt(self, ordinal: int, card: dict[str, Any]) -> Prompt:
        columns = {"game": card["id"], "task_type": card["kind"], "max_score": card["max_score"]}
        if self.config.style == "words":
            return Prompt(card["id"], ordinal, text=worded(card["first"]).strip(), columns=columns)
        rules = system_prompt(ROLE, card["actions"], EXAMPLE)
        messages = ({"role": "system", "content": rules}, {"role": "user", "content": card["first"]})
        return Prompt(card["id"], ordinal, messages=messages, columns=columns)
