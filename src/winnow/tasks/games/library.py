"""Kept text games: made, described and walked through once, in worker processes, and found again.

$WINNOW_CACHE/<kind of game>/walks/<card and how it is walked>.json; each kind keeps its cards beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from ...env.workers.file_cache import kept, load_json, loaded, making
from ...env.workers.worker import WorkerPool
from .options import GameOptions

Card = dict[str, Any]
"""Card of a game: what playing it and talking about it needs; `id`, `words`, and `file`, where the card is kept."""
Drawn = TypeVar("Drawn")

MAKE_TIMEOUT_S = 300.0
MAX_REPEATS = 4
"""Games made for each one wanted before there are taken to be too few different ones."""
DEMONSTRATIONS = 8
"""Walks to the goal that are kept a game."""


def call_all(pool: WorkerPool, function: str, arguments: Iterable[Mapping[str, Any]]) -> None:
    """Call a function of `winnow.tasks.games` with each of these arguments, and wait for all."""
    calls = [pool.call(f"winnow.tasks.games.{function}", dict(given)) for given in arguments]
    for call in calls:
        call.result()


def walks_of(config: GameOptions, format: int, cards: Sequence[str]) -> list[list[list[str]]]:
    """Demonstrations of each card file's game, each `[command, observation, command, ...]`."""
    how = {"count": DEMONSTRATIONS, "noise": config.demo_noise, "max_turns": config.max_turns}
    files = [kept(config.name, "walks", [format, card, how]) for card in cards]
    missing = [
        {"card": card, "target": str(file), **how}
        for card, file in zip(cards, files, strict=True)
        if loaded(file) is None
    ]
    with making(config.name, config.workers, MAKE_TIMEOUT_S) as pool:
        call_all(pool, f"{config.name}.games:demonstrate", missing)
    return [load_json(file) for file in files]


def different(
    wanted: int,
    drawn: Iterator[Drawn],
    make: Callable[[list[Drawn]], list[Card]],
    told: Callable[[Card], Any],
    shown: Collection[Any],
) -> list[Card]:
    """`wanted` games with different ids, none of which begins (`told`) like one in `shown`.

    `make` makes games from draws, at most MAX_REPEATS for each one wanted; fewer cards come back when they run out.
    """
    tries = islice(drawn, wanted * MAX_REPEATS)
    cards: dict[str, Card] = {}
    while len(cards) < wanted and (batch := list(islice(tries, wanted - len(cards)))):
        cards |= {card["id"]: card for card in make(batch) if told(card) not in shown}
    return list(cards.values())


def too_few(name: str, part: str, wanted: int, found: int, remedy: str) -> ValueError:
    size = "train_size" if part == "train" else "test_size"
    return ValueError(
        f"{name}: {wanted} different {part} games wanted, but {wanted * MAX_REPEATS} attempts gave only {found}; "
        f"lower {size}, or {remedy}"
    )
