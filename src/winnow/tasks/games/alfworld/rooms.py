"""Writes ALFWorld problems: small rooms furnished at random from the floor plans shipped with the package alfworld.

A room takes some of a floor plan's receptacles, at their real places, and objects that ALFRED allows in them. This is
the only module that imports the package alfworld.
"""

from __future__ import annotations

import importlib
import importlib.resources
import json
import os
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from ....base.files import digest
from ....base.machine import install

TaskType = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
TASK_TYPES: tuple[TaskType, ...] = get_args(TaskType)

TREATED_IN = {
    "pick_clean_then_place_in_recep": ("SinkBasin", "Cleanable"),
    "pick_heat_then_place_in_recep": ("Microwave", "Heatable"),
    "pick_cool_then_place_in_recep": ("Fridge", "Coolable"),
}
"""Task type -> the place where an object is cleaned, heated or cooled, and ALFRED's list of suitable objects."""
LAMP = "DeskLamp"
LAMP_STANDS = frozenset({"Desk", "Dresser", "SideTable", "CoffeeTable", "DiningTable", "TVStand"})
NAMED_BY_DOMAIN = ("SinkBasinType", "MicrowaveType", "FridgeType"), ("KnifeType", "ButterKnifeType")
"""Types that every problem must declare because actions mention them."""
ATTEMPTS = 50
_PROPERTIES = {"cleanable": "Cleanable", "heatable": "Heatable", "coolable": "Coolable", "sliceable": "Sliceable"}


@dataclass
class _Room:
    """Receptacles and objects by name; `kinds` of both."""

    plan: int
    places: dict[str, str] = field(default_factory=dict)
    """Receptacle -> location."""
    kinds: dict[str, str] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    """Object -> receptacle."""


def game_of(
    task_type: TaskType, seed: str, plans: Sequence[int], receptacles: int, objects: int
) -> dict[str, Any] | None:
    """Return one game as in a file game.tw-pddl, plus `task_type` and `plan`; None if the draw gave no such room.

    Equal arguments give equal games. `plans` are floor plans to draw from.
    """
    rng = random.Random(f"alfworld/{task_type}/{seed}/{receptacles}/{objects}")
    for _ in range(ATTEMPTS):
        room = _empty_room(task_type, rng.choice(list(plans)), receptacles, rng)
        target = room and _furnish(room, task_type, objects, rng)
        if room and target:
            return _as_game(room, task_type, target, rng)
    return None


def plans_of(part: str, task_type: str) -> list[int]:
    """Return floor plans for training (`train`, `valid_seen`) or kept from it (`valid_unseen`) that allow the task."""
    constants = alfworld("gen.constants")
    numbers = constants.TEST_SCENE_NUMBERS if part == "valid_unseen" else constants.TRAIN_SCENE_NUMBERS
    scenes = [constants.SCENE_TYPE[name] for name in constants.GOALS_VALID[task_type]]
    return sorted(n for n in numbers if any(n in scene for scene in scenes))


def card_id(card: Mapping[str, Any]) -> str:
    """Return a hash of the whole card."""
    told = {key: value for key, value in card.items() if key != "id"}
    return f"game-{digest(told)[:16]}"


# ---------------------------------------------------------------- furnishing


def _empty_room(task_type: TaskType, plan: int, size: int, rng: random.Random) -> _Room | None:
    """Add receptacles: the one needed by the task, and others, at most three of one kind."""
    holds = alfworld("gen.constants").VAL_RECEPTACLE_OBJECTS
    layout = _layout(plan, "openable")
    found = [key for key in layout if _kind(key) in holds and holds[_kind(key)]]
    rng.shuffle(found)
    needed = TREATED_IN[task_type][0] if task_type in TREATED_IN else None
    chosen = [key for key in found if _kind(key) == needed][:1]
    if needed and not chosen:
        return None
    for key in found:
        if len(chosen) < size and key not in chosen and sum(_kind(k) == _kind(key) for k in chosen) < 3:
            chosen.append(key)
    if len({_kind(key) for key in chosen}) < 2:
        return None
    room = _Room(plan)
    for key in sorted(chosen):
        room.places[_mangled(key)] = "loc_bar_" + "_bar_".join(_mangled(str(v)) for v in layout[key])
        room.kinds[_mangled(key)] = _kind(key)
    return room


def _furnish(room: _Room, task_type: TaskType, count: int, rng: random.Random) -> tuple[str, str] | None:
    """Put objects into a room; return the goal's object and receptacle (or lamp) kinds, or None without a goal."""
    constants = alfworld("gen.constants")
    holds, acts = constants.VAL_RECEPTACLE_OBJECTS, constants.VAL_ACTION_OBJECTS
    present = set(_layout(room.plan, "objects")) - set(constants.RECEPTACLES) - {"FloorLamp", LAMP}
    kinds = sorted(set(room.kinds.values()))
    usable = sorted(o for o in present if any(o in holds[r] for r in kinds))
    needed, treatable = TREATED_IN.get(task_type, (None, None))
    if task_type == "look_at_obj_in_light":
        stands = [r for r in room.places if room.kinds[r] in LAMP_STANDS]
        if not stands or not usable:
            return None
        _put(room, LAMP, rng.choice(stands))
        goal = rng.choice(usable), LAMP
    else:
        goals = [(o, r) for o in usable for r in kinds if o in holds[r] and r != needed]
        goals = [g for g in goals if treatable is None or g[0] in acts[treatable]]
        if not goals:
            return None
        goal = rng.choice(goals)
    for _ in range(2 if task_type == "pick_two_obj_and_place" else 1):
        away = [r for r in room.places if room.kinds[r] != goal[1] and goal[0] in holds[room.kinds[r]]]
        if not away:
            return None
        _put(room, goal[0], rng.choice(away))
    others = [o for o in usable if o != goal[0]]
    while others and len(room.inside) < count:
        other = rng.choice(others)
        _put(room, other, rng.choice([r for r in room.places if other in holds[room.kinds[r]]]))
    return goal


def _put(room: _Room, kind: str, receptacle: str) -> None:
    name = f"{kind}_bar_{sum(k == kind for k in room.kinds.values()) + 1}"
    room.kinds[name] = kind
    room.inside[name] = receptacle


# ---------------------------------------------------------------- writing


def _as_game(room: _Room, task_type: TaskType, target: tuple[str, str], rng: random.Random) -> dict[str, Any]:
    goals = alfworld("gen.goal_library").gdict[task_type]
    named = {"obj": target[0], "recep": target[1], "toggle": target[1]}
    sentence = rng.choice(goals["templates"]).format(**{key: value.lower() for key, value in named.items()})
    goal = goals["pddl"].format(**named).replace("#", "-").strip()
    return {
        "pddl_domain": _data("alfred.pddl"),
        "grammar": _data("alfred.twl2").replace("UNKNOWN GOAL", sentence),
        "pddl_problem": f"{_problem(room)}\n{goal}\n",  # the goal's last bracket closes the problem
        "solvable": True,
        "task_type": task_type,
        "plan": room.plan,
    }


def _problem(room: _Room) -> str:
    """Return the PDDL problem down to its goal."""
    constants = alfworld("gen.constants")
    held = {room.kinds[r] for r in room.places}
    things = {room.kinds[o] for o in room.inside}
    names = {
        "agent": ["agent1"],
        "location": sorted({"loc_bar_start", *room.places.values()}),
        "receptacle": list(room.places),
        "object": list(room.inside),
        "rtype": sorted({f"{kind}Type" for kind in held}.union(NAMED_BY_DOMAIN[0])),
        "otype": sorted({f"{kind}Type" for kind in things}.union(NAMED_BY_DOMAIN[1])),
    }
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_bar_start)"]
    for receptacle, place in room.places.items():
        kind = room.kinds[receptacle]
        facts += [f"(receptacleAtLocation {receptacle} {place})", f"(receptacleType {receptacle} {kind}Type)"]
        if kind in constants.OPENABLE_CLASS_SET:
            facts.append(f"(openable {receptacle})")
    for thing, receptacle in room.inside.items():
        kind = room.kinds[thing]
        facts += [f"(objectType {thing} {kind}Type)", f"(inReceptacle {thing} {receptacle})"]
        facts.append(f"(objectAtLocation {thing} {room.places[receptacle]})")
        facts.append(f"({'toggleable' if kind == LAMP else 'pickupable'} {thing})")
        facts += [f"({p} {thing})" for p, known in _PROPERTIES.items() if kind in constants.VAL_ACTION_OBJECTS[known]]
    facts += [
        f"(canContain {r}Type {o}Type)"
        for r in sorted(held)
        for o in sorted(things)
        if o in constants.VAL_RECEPTACLE_OBJECTS[r]
    ]
    declared = "\n  ".join(f"{' '.join(members)} - {kind}" for kind, members in names.items())
    return f"(define (problem room) (:domain alfred)\n(:objects\n  {declared})\n(:init\n  {chr(10).join(facts)})"


def _kind(key: str) -> str:
    """Return the kind: `Cabinet|+00.68|...` is a Cabinet, `Sink|...|SinkBasin` a SinkBasin."""
    first, *rest = key.split("|")
    return rest[-1] if rest[-1].isalpha() else first


def _mangled(key: str) -> str:
    """Return a valid PDDL name in ALFWorld's spelling."""
    for sign, word in {"|": "_bar_", "+": "_plus_", "-": "_minus_", ".": "_dot_"}.items():
        key = key.replace(sign, word)
    return re.sub(r"\W", "_", key)


# ---------------------------------------------------------------- package data


@cache
def _layout(plan: int, part: str) -> Any:
    """Return a part of a floor plan: `openable`, its receptacles and their places, or `objects`, their names."""
    file = importlib.resources.files(alfworld("gen")) / "layouts" / f"FloorPlan{plan}-{part}.json"
    return json.loads(file.read_text(encoding="utf-8"))


@cache
def _data(name: str) -> str:
    return (importlib.resources.files(alfworld()) / "data" / name).read_text(encoding="utf-8")


def alfworld(module: str = "") -> Any:
    """Import a module of the package, which makes the folder $ALFWORLD_DATA on import."""
    os.environ.setdefault("ALFWORLD_DATA", tempfile.gettempdir())
    try:
        return importlib.import_module(f"alfworld.{module}" if module else "alfworld")
    except ImportError:
        raise ImportError(f"the package is missing; {install('alfworld')}") from None
