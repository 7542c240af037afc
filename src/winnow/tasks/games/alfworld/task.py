"""ALFWorld: household tasks in text rooms, from its data directory or generated, played in worker processes.

Games are made once and stored under $WINNOW_CACHE (or ~/.cache/winnow). Shridhar et al., "ALFWorld: Aligning Text and
Embodied Environments for Interactive Learning", 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..library import Card
from ..react import system_prompt
from ..task import GameTask
from .library import FORMAT, AlfworldGames, games_of

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


@dataclass(frozen=True)
class AlfworldConfig(AlfworldGames):
    """ALFWorld games: made over its floor plans, or read from a directory with its data."""

    def build(self) -> Alfworld:
        return Alfworld(self)


class Alfworld(GameTask):
    """Task of ALFWorld games. Raises ValueError for too few games, or a file that is not one."""

    name = "alfworld"
    format = FORMAT

    def __init__(self, config: AlfworldConfig) -> None:
        super().__init__(config, *games_of(config))

    def _columns(self, card: Card) -> dict[str, Any]:
        return {"task_type": card["task_type"]}

    def _opening(self, card: Card) -> str:
        if self.config.style == "words":
            return f"{card['goal']} {card['look'].replace(_SIGHT, '')}"
        return f"{card['look']}\nYour task is to: {card['goal']}"

    def _rules(self, card: Card) -> str:
        return system_prompt(ROLE, *_commands(card["templates"]))


def _commands(templates: dict[str, list[str]]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Return the vocabulary of actions in the game's own spelling, and the example that uses it."""
    actions = sorted(template.format(**_SLOTS) for name, (template, _) in templates.items() if name != "help")
    seen, thought, _ = EXAMPLE[-1]
    return actions, [*EXAMPLE[:-1], (seen, thought, templates["putobject"][0].format(o="cloth 1", r="drawer 1"))]
