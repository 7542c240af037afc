"""Options shared by all text games."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .react import Style


@dataclass(frozen=True, kw_only=True)
class GameOptions:
    name: ClassVar[str]
    least: ClassVar[dict[str, int]] = {}
    """Option -> its least value, for those of one kind of game."""
    seed: int = 0
    max_turns: int = 30
    max_turn_length: int | None = None
    """The most tokens sampled in a turn; None: only max_completion_length bounds it."""
    style: Style = "react"
    """`react`: messages, a thought and an action a turn. `words`: lower-case words, the completion is the command."""
    demo_noise: float = 0.25
    """Share of random commands in demonstrations."""
    demo_size: int | None = None
    """Number of first training games that are demonstrated; None: all. The others are new to a warm-started model."""
    workers: int = 2
    timeout_s: float = 30.0
    """Bounds one step of a game."""

    def __post_init__(self) -> None:
        least = {"train_size": 1, "test_size": 0, "max_turns": 1, "workers": 1, "demo_size": 1, "max_turn_length": 1}
        for option, value in (least | self.least).items():
            given = getattr(self, option)
            if given is not None and given < value:
                raise ValueError(f"{self.name}: {option} must be at least {value}, not {given}")
        if not 0 <= self.demo_noise <= 1:
            raise ValueError(f"{self.name}: demo_noise must lie between 0 and 1, not {self.demo_noise}")
