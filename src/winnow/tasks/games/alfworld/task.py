"""ALFWorld: household tasks in text rooms, from its data directory or generated, played in worker processes.

Games are made and described once and reused under the same options: $WINNOW_CACHE/alfworld/cards/<game>.json holds the
data for playing one, see `games`. Shridhar et al., "ALFWorld: Aligning Text and Embodied Environments for Interactive
Learning", 2021.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from ....base.files import sha256
from ....config.options import CHECKED
from ....env.workers.file_cache import load_json, making
from ....env.workers.worker import WorkerPool
from ..library import MAKE_TIMEOUT_S, Card, GameOptions, cards_of, different
from ..react import system_prompt
from ..task import GameTask
from .rooms import TASK_TYPES, TaskType, card_id

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
"""Ends with the command for putting something down, which older games spell otherwise."""
_SIGHT = "You are in the middle of a room. Looking quickly around you, "


@dataclass(frozen=True, config=CHECKED)
class AlfworldConfig(GameOptions):
    """ALFWorld games: made over its floor plans, or read from a directory with its data."""

    name: ClassVar[str] = "alfworld"
    format: ClassVar[int] = 2
    data: str | None = None
    """Directory filled by alfworld-download, with the splits train, valid_seen and valid_unseen."""
    split: Literal["valid_seen", "valid_unseen"] = "valid_seen"
    """Test games: in floor plans of the training games, or in others."""
    task_types: tuple[TaskType, ...] = TASK_TYPES
    train_size: PositiveInt | None = 64
    """Number of training games; of `data` chosen at random, None: all."""
    test_size: NonNegativeInt | None = 16
    receptacles: Annotated[int, Field(ge=2)] = 5
    """Places in a generated room; fewer are easier."""
    objects: Annotated[int, Field(ge=2)] = 6
    """Things in a generated room."""

    def __post_init__(self) -> None:
        for name in ("train_size", "test_size"):
            if getattr(self, name) is None and self.data is None:
                raise ValueError(f"alfworld: {name} must be a number for games that are made")
        if not self.task_types:
            raise ValueError(f"alfworld: task_types is empty; give some of {', '.join(TASK_TYPES)}")

    def build(self) -> Alfworld:
        return Alfworld(self)


class Alfworld(GameTask):
    """Task of ALFWorld games. Raises ValueError for too few games, or a file that is not one."""

    def __init__(self, config: AlfworldConfig) -> None:
        super().__init__(config, *games_of(config))

    def _shown(self, card: Card) -> tuple[str, str, dict[str, Any]]:
        rules = system_prompt(ROLE, *_commands(card["templates"]))
        opening = f"{card['look']}\nYour task is to: {card['goal']}"
        if self.config.style == "words":
            opening = f"{card['goal']} {card['look'].replace(_SIGHT, '')}"
        return rules, opening, {"task_type": card["task_type"]}


def _commands(templates: dict[str, list[str]]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Return the vocabulary of actions in the game's own spelling, and the example that uses it."""
    actions = sorted(template.format(**_SLOTS) for name, (template, _) in templates.items() if name != "help")
    seen, thought, _ = EXAMPLE[-1]
    return actions, [*EXAMPLE[:-1], (seen, thought, templates["putobject"][0].format(o="cloth 1", r="drawer 1"))]


def games_of(config: AlfworldConfig) -> tuple[list[Card], list[Card]]:
    """Return cards of the train and the test games. Raises ValueError for too few games."""
    with making("alfworld", config.workers, MAKE_TIMEOUT_S) as pool:
        if config.data is not None:
            root = _root(Path(config.data).expanduser().resolve())
            test = _read(pool, config, root, config.split, config.test_size)
            return _read(pool, config, root, "train", config.train_size), test
        test = _made(pool, config, config.split, config.test_size or 0, ())
        return _made(pool, config, "train", config.train_size or 0, {_told(card) for card in test}), test


def _made(
    pool: WorkerPool, config: AlfworldConfig, part: str, wanted: int, shown: Collection[tuple[str, str]]
) -> list[Card]:
    """Return `wanted` different games, of all task types in turn, excluding beginnings in `shown`."""
    size = (config.receptacles, config.objects)
    kinds = [kind for kind in TASK_TYPES if kind in config.task_types]
    asked = (
        {"part": part, "task_type": kind, "seed": f"{config.seed}/{i}", "size": size}
        for i, kind in enumerate(cycle(kinds))
    )
    remedy = "raise receptacles or objects"
    return different(config, pool, part, wanted, asked, _intact, lambda card: _told(card) not in shown, remedy)


def _told(card: Card) -> tuple[str, str]:
    return card["goal"], card["look"]


# ---------------------------------------------------------------- a user's data


def _root(data: Path) -> Path:
    """Return the folder with the splits. Raises ValueError without a folder `train`."""
    for root in (data, data / "json_2.1.1"):
        if (root / "train").is_dir():
            return root
    raise ValueError(
        f"alfworld: {data} has no folder 'train'; give the directory that alfworld-download fills, or its json_2.1.1"
    )


def _read(pool: WorkerPool, config: AlfworldConfig, root: Path, part: str, wanted: int | None) -> list[Card]:
    """Return games of a split that ALFWorld itself would play, at random if only some are wanted."""
    found = sorted((root / part).rglob("game.tw-pddl"))
    random.Random(f"alfworld/{part}/{config.seed}").shuffle(found)
    files = list(islice((f for f in found if _task_type(f) in config.task_types and _solvable(f)), wanted))
    if not files and wanted != 0:
        raise ValueError(f"alfworld: no game.tw-pddl of these task_types in {root / part}; see alfworld-generate")
    asked = [{"path": str(file), "task_type": _task_type(file)} for file in files]
    keys = [[sha256(file), given["task_type"]] for file, given in zip(files, asked, strict=True)]
    return cards_of(config, pool, "describe", asked, keys, _intact)


def _task_type(file: Path) -> str | None:
    """Return the task type of a game; None for games that ALFWorld leaves out."""
    if "movable" in str(file) or "Sliced" in str(file):
        return None
    facts = file.with_name("traj_data.json")
    if not facts.is_file():
        raise ValueError(f"alfworld: {file} has no traj_data.json (its task_type) in its directory; copy it there")
    return str(load_json(facts).get("task_type"))


def _solvable(file: Path) -> bool:
    try:
        return load_json(file).get("solvable") is not False
    except (ValueError, AttributeError) as error:
        raise ValueError(f"alfworld: {file} is no ALFWorld game: {error}") from None


def _intact(card: Any) -> bool:
    return isinstance(card, dict) and card.get("id", "") in (None, card_id(card))
