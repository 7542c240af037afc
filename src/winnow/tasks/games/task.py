"""Base of text games: the task that prompts, plays and demonstrates them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ...base.files import digest
from ...env.base import OverlappingEnv, RewardFn
from ...env.workers.remote import EnvPool
from ...types import Prompt
from .library import Card, GameOptions, walks_of
from .react import worded, words

ELSEWHERE = frozenset({"games", "data", "workers", "timeout_s", "demo_noise", "demo_size"})
"""Options without effect on a game and its texts."""


class GameTask(ABC):
    """A task from the cards of its games (`library`); `known` are the words that style `words` can show, None: all.

    A kind of game defines the content of a prompt (`_shown`).
    """

    stop: tuple[str, ...] = ()
    rewards_itself = True

    def __init__(self, config: GameOptions, train: Sequence[Card], test: Sequence[Card]) -> None:
        self.config, self.name = config, config.name
        self.max_turns, self.max_turn_length = config.max_turns, config.max_turn_length
        self.reward_funcs: list[RewardFn] = []
        self.known: Collection[str] | None = None
        self.env_options: dict[str, Any] = {"style": config.style}
        self._pool = EnvPool(config.workers, config.timeout_s, independent=True)
        cards = (*train, *test)
        self._files = {card["id"]: card["file"] for card in cards}
        self._words = {">"}.union(*(card["words"] for card in cards))
        self.test = [self._prompt(i, card) for i, card in enumerate(test)]
        self.train = [self._prompt(i, card) for i, card in enumerate(train)]

    @abstractmethod
    def _shown(self, card: Card) -> tuple[str, str, dict[str, Any]]:
        """Return the system prompt of style `react`, the first observation with the goal, and columns of the prompt."""

    def make_env(self, prompt: Prompt) -> OverlappingEnv:
        kwargs = {"card": self._files[prompt.id], **self.env_options}
        return self._pool.make(f"winnow.tasks.games.{self.name}.play:play", kwargs)

    def fingerprint(self) -> str:
        options = {k: v for k, v in asdict(self.config).items() if k not in ELSEWHERE}
        ids = [[p.id for p in part] for part in (self.train, self.test)]
        return digest({"format": self.config.format, "games": ids, **options})

    def demonstrations(self, seed: int) -> Iterator[tuple[str, list[str]]]:
        """Yield ways to win training games, with a share of random commands. Style `words` only."""
        if self.config.style != "words":
            raise ValueError(f"{self.name}: only style: words has demonstrations; use a pretrained model for react")
        prompts = self.train[: self.config.demo_size]
        walks = walks_of(self.config, [self._files[p.id] for p in prompts])
        shown = list(zip(prompts, walks, strict=True))
        rng = random.Random(f"{self.name}/demonstrations/{seed}")
        while True:
            prompt, choices = rng.choice(shown)
            walk = rng.choice(choices)
            yield str(prompt.text), [worded(t, self.known) if i % 2 else words(t) for i, t in enumerate(walk)]

    def vocabulary(self) -> Sequence[str]:
        """Return every known word of these games' texts and commands."""
        return sorted(self._words)

    def _prompt(self, ordinal: int, card: Card) -> Prompt:
        rules, opening, own = self._shown(card)
        columns = {"game": card["id"], **own}
        if self.config.style == "words":
            return Prompt(card["id"], ordinal, text=worded(opening).strip(), columns=columns)
        messages = ({"role": "system", "content": rules}, {"role": "user", "content": opening})
        return Prompt(card["id"], ordinal, messages=messages, columns=columns)
