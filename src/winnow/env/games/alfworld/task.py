"""ALFWorld: household tasks in text rooms, from its data directory or made to order, played in worker processes.

Games are made once and kept under $WINNOW_CACHE (or ~/.cache/winnow). Shridhar et al., "ALFWorld: Aligning Text and
Embodied Environments for Interactive Learning", 2021.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ....types import Prompt
from ...base import OverlappingEnv, RewardFn
from ...workers.remote import EnvPool
from ..react import system_prompt, words
from ..textworld.play import Style, worded
from .library import FORMAT, games_of, walks_of
from .rooms import TASK_TYPES, TaskType

ROLE = (
    "You act in a household. Your task is given at the start, together with all the places that you can go to. "
    "You find things by going to places and opening what is closed; you can carry one thing at a time."
)
_SLOTS = {"o": "<object>", "co": "<object>", "ko": "<knife>", "r": "<place>"}
EXAMPLE = (
    (
        "You are in the middle of a room. Looking quickly around you, you see a drawer 2, a drawer 1, a sinkbasin 1, "
        "and a towelholder 1.\nYour task is to: put a clean cloth in drawer.",
        "A cloth may lie in a drawer. I look there first.",
        "go to drawer 1",
    ),
    ("You arrive at drawer 1. The drawer 1 is closed.", "I have to open it.", "open drawer 1"),
    (
        "You open the drawer 1. The drawer 1 is open. In it, you see a cloth 1.",
        "There is the cloth. I take it and then clean it.",
        "take cloth 1 from drawer 1",
    ),
    ("You pick up the cloth 1 from the drawer 1.", "The sink cleans it.", "go to sinkbasin 1"),
    (
        "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.",
        "Now clean it.",
        "clean cloth 1 with sinkbasin 1",
    ),
    ("You clean the cloth 1 using the sinkbasin 1.", "It is clean. The drawer 1 is still open.", "go to drawer 1"),
    (
        "You arrive at drawer 1. The drawer 1 is open. In it, you see nothing.",
        "I put it here.",
        "",
    ),
)
"""Ends with the command of putting something down, which older games spell otherwise."""
_SIGHT = "You are in the middle of a room. Looking quickly around you, "


@dataclass(frozen=True)
class AlfworldConfig:
    """ALFWorld games: made over its floor plans, or read from a directory with its data."""

    data: str | None = None
    """The directory that alfworld-download fills, with the splits train, valid_seen and valid_unseen."""
    split: Literal["valid_seen", "valid_unseen"] = "valid_seen"
    """The test games: in floor plans of the training games, or in others."""
    task_types: tuple[TaskType, ...] = TASK_TYPES
    train_size: int | None = 64
    """Of `data` so many at random; None: all there are."""
    test_size: int | None = 16
    receptacles: int = 5
    """Places in a room that is made; fewer are easier."""
    objects: int = 6
    """Things in a room that is made."""
    seed: int = 0
    max_turns: int = 30
    max_turn_length: int | None = None
    """The most tokens sampled in a turn; None: only max_completion_length bounds it."""
    style: Style = "react"
    """`react`: messages, a thought and an action a turn. `words`: lower-case words, the completion is the command."""
    demo_noise: float = 0.25
    """Share of random commands in demonstrations."""
    demo_size: int | None = None
    """Training games that are demonstrated, the first ones; None: all. The others are new to a warm-started model."""
    workers: int = 2
    timeout_s: float = 30.0
    """Bounds one step of a game."""

    def __post_init__(self) -> None:
        least = {"train_size": 1, "test_size": 0, "receptacles": 2, "objects": 2, "max_turns": 1, "workers": 1}
        least |= {"demo_size": 1, "max_turn_length": 1}
        for name, value in least.items():
            given = getattr(self, name)
            if given is None and self.data is None and name in ("train_size", "test_size"):
                raise ValueError(f"alfworld: {name} must be a number for games that are made")
            if given is not None and given < value:
                raise ValueError(f"alfworld: {name} must be at least {value}, not {given}")
        if not 0 <= self.demo_noise <= 1:
            raise ValueError(f"alfworld: demo_noise must lie between 0 and 1, not {self.demo_noise}")
        if not self.task_types:
            raise ValueError(f"alfworld: task_types is empty; give some of {', '.join(TASK_TYPES)}")

    def build(self) -> Alfworld:
        return Alfworld(self)


class Alfworld:
    """The task. Raises ValueError when there are too few games, or a file is not one."""

    name = "alfworld"
    stop: tuple[str, ...] = ()

    def __init__(self, config: AlfworldConfig) -> None:
        self.config = config
        self.max_turns, self.max_turn_length = config.max_turns, config.max_turn_length
        self.reward_funcs: list[RewardFn] = []
        self._pool = EnvPool(config.workers, config.timeout_s)
        train, test = games_of(config)
        cards = (*train, *test)
        self._files = {card["id"]: card["file"] for card in cards}
        self._words = sorted({">"}.union(*(card["words"] for card in cards)))
        self.test = [self._prompt(i, card) for i, card in enumerate(test)]
        self.train = [self._prompt(i, card) for i, card in enumerate(train)]

    def make_env(self, prompt: Prompt) -> OverlappingEnv:
        kwargs = {"card": self._files[prompt.id], "style": self.config.style}
        return self._pool.make("winnow.env.games.alfworld.play:play", kwargs)

    def fingerprint(self) -> str:
        free = {"data", "workers", "timeout_s", "demo_noise", "demo_size"}
        options = {k: v for k, v in asdict(self.config).items() if k not in free}
        ids = [[p.id for p in part] for part in (self.train, self.test)]
        content = json.dumps({"format": FORMAT, "games": ids, **options}, sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    def demonstrations(self, seed: int) -> Iterator[tuple[str, list[str]]]:
        """The planner's ways through training games, with a share of random commands. Style `words` only."""
        if self.config.style != "words":
            raise ValueError("alfworld: only style: words has demonstrations; use a pretrained model for react")
        prompts = self.train[: self.config.demo_size]
        cards = [{"id": p.id, "file": self._files[p.id]} for p in prompts]
        shown = list(zip(prompts, walks_of(cards, self.config), strict=True))
        rng = random.Random(f"alfworld/demonstrations/{seed}")
        while True:
            prompt, choices = rng.choice(shown)
            walk = rng.choice(choices)
            yield str(prompt.text), [worded(t) if i % 2 else words(t) for i, t in enumerate(walk)]

    def vocabulary(self) -> Sequence[str]:
        """Every word that these games can say or understand."""
        return self._words

    def _prompt(self, ordinal: int, card: dict[str, Any]) -> Prompt:
        columns = {"game": card["id"], "task_type": card["task_type"]}
        if self.config.style == "words":
            text = f"{card['goal']} {card['look'].replace(_SIGHT, '')}"
            return Prompt(card["id"], ordinal, text=worded(text).strip(), columns=columns)
        rules = system_prompt(ROLE, *_commands(card["templates"]))
        seen = f"{card['look']}\nYour task is to: {card['goal']}"
        messages = ({"role": "system", "content": rules}, {"role": "user", "content": seen})
        return Prompt(card["id"], ordinal, messages=messages, columns=columns)


def _commands(templates: dict[str, list[str]]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """The vocabulary of actions as the game's own grammar spells it, and the example that uses it."""
    actions = sorted(template.format(**_SLOTS) for name, (template, _) in templates.items() if name != "help")
    seen, thought, _ = EXAMPLE[-1]
    return actions, [*EXAMPLE[:-1], (seen, thought, templates["putobject"][0].format(o="cloth 1", r="drawer 1"))]
