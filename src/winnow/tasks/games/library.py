"""Stored text games: made, described and walked through once, in worker processes, then reused.

$WINNOW_CACHE/<kind of game>/walks/<card and how it is walked>.json; each kind keeps its cards next to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from ...base.state import Probability
from ...config.options import CHECKED
from ...env.workers.file_cache import kept, load_json, loaded, making
from ...env.workers.worker import WorkerPool
from .react import Style

Card = dict[str, Any]
"""Card of a game: data for playing it and for its prompts; `id`, `words`, and `file`, the card's own path."""

MAKE_TIMEOUT_S = 300.0
MAX_REPEATS = 4
"""Games made for each one wanted before too few different ones are assumed."""
DEMONSTRATIONS = 8
"""Stored walks to the goal for each game."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class GameOptions:
    name: ClassVar[str]
    format: ClassVar[int]
    """Version of stored files."""
    seed: int = 0
    max_turns: PositiveInt = 30
    max_turn_length: PositiveInt | None = None
    """The most tokens sampled in a turn; None: only max_completion_length bounds it."""
    style: Style = "react"
    """`react`: messages, a thought and an action a turn. `words`: lower-case words, the completion is the command."""
    demo_noise: Probability = 0.25
    """Share of random commands in demonstrations."""
    demo_size: PositiveInt | None = None
    """Number of first training games that are demonstrated; None: all. The others are new to a warm-started model."""
    workers: PositiveInt = 2
    timeout_s: float = 30.0
    """Bounds one step of a game."""


def kept_values(
    pool: WorkerPool,
    function: str,
    asked: Sequence[Mapping[str, Any]],
    files: Sequence[Path],
    intact: Callable[[Any], bool] = lambda value: value is not None,
) -> list[Any]:
    """Return each file's content; a `function` of `winnow.tasks.games` writes missing and damaged ones as `asked`."""
    calls = []
    for arguments, file in zip(asked, files, strict=True):
        if not intact(loaded(file)):
            calls.append(pool.call(f"winnow.tasks.games.{function}", {**arguments, "target": str(file)}))
    for call in calls:
        call.result()
    return [load_json(file) for file in files]


def cards_of(
    config: GameOptions,
    pool: WorkerPool,
    function: str,
    asked: Sequence[Mapping[str, Any]],
    keys: Sequence[list[Any]],
    intact: Callable[[Any], bool],
) -> list[Card]:
    """Return the card stored under each key, equal ones once, without those of seeds that gave no game.

    A `function` of the game's `games` writes missing and damaged ones as `asked`.
    """
    files = [kept(config.name, "cards", [config.format, *key]) for key in keys]
    values = kept_values(pool, f"{config.name}.games:{function}", asked, files, intact)
    cards = [card | {"file": str(file)} for card, file in zip(values, files, strict=True)]
    return list({card["id"]: card for card in cards if card["id"] is not None}.values())


def walks_of(config: GameOptions, cards: Sequence[str]) -> list[list[list[str]]]:
    """Return demonstrations of each card file's game, each `[command, observation, command, ...]`."""
    how = {"count": DEMONSTRATIONS, "noise": config.demo_noise, "max_turns": config.max_turns}
    files = [kept(config.name, "walks", [config.format, card, how]) for card in cards]
    with making(config.name, config.workers, MAKE_TIMEOUT_S) as pool:
        return kept_values(pool, f"{config.name}.games:demonstrate", [{"card": card, **how} for card in cards], files)


def different(
    config: GameOptions,
    pool: WorkerPool,
    part: str,
    wanted: int,
    asked: Iterator[Mapping[str, Any]],
    intact: Callable[[Any], bool],
    accepts: Callable[[Card], bool],
    remedy: str,
) -> list[Card]:
    """Return `wanted` games with different ids, only those for which `accepts` returns True.

    Each is made from the next of the arguments `asked`, at most MAX_REPEATS for each one wanted. Raises ValueError if
    these give too few.
    """
    tries = islice(asked, wanted * MAX_REPEATS)
    cards: dict[str, Card] = {}
    while len(cards) < wanted and (batch := list(islice(tries, wanted - len(cards)))):
        made = cards_of(config, pool, "generate", batch, [[each] for each in batch], intact)
        cards |= {card["id"]: card for card in made if accepts(card)}
    if len(cards) < wanted:
        size = "train_size" if part == "train" else "test_size"
        raise ValueError(
            f"{config.name}: {wanted} different {part} games wanted, but {wanted * MAX_REPEATS} attempts gave only "
            f"{len(cards)}; lower {size}, or {remedy}"
        )
    return list(cards.values())
