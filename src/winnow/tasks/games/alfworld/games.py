"""Makes, describes and solves ALFWorld games, in worker processes."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....env.workers.file_cache import load_json, save_json
from ..react import NOTHING, words
from .play import GOAL, EntityInfo, Game, engine, pddl
from .play import Path as Way
from .rooms import TaskType, alfworld, card_id, game_of, plans_of

COMMANDS = {"gotolocation": "go to {r}"}
"""Templates that replace the grammar's own where those depend on the state; TextWorld's planner has the same."""
UNWISE = frozenset({"help"})
"""Commands never taken at random in a demonstration: their answers are as long as a game."""
_TEXTS = re.compile(r'"rhs": "((?:[^"\\]|\\.)*)"')
_TITLE = re.compile(r"-=.*=-")
_SLOT = re.compile(r"\[[^\]]*\]|\{[^}]*\}|#[^#]*#")


def generate(part: str, task_type: TaskType, seed: str, size: tuple[int, int], target: str) -> None:
    """Make a game and write its card, or a card without an id if this seed gives no game.

    `size` is the number of receptacles and of objects.
    """
    game = game_of(task_type, f"{part}/{seed}", plans_of(part, task_type), *size)
    save_json(Path(target), {"id": None} if game is None else _card(game, task_type, f"the game of seed {seed}"))


def describe(path: str, task_type: TaskType, target: str) -> None:
    """Write the card of a game in a file.

    Raises ValueError if the file is not a game, or the planner cannot win it.
    """
    game = load_json(path)
    missing = {"pddl_domain", "grammar", "pddl_problem"} - set(game)
    if missing:
        raise ValueError(f"alfworld: {path} is no ALFWorld game: it has no '{min(missing)}'")
    save_json(Path(target), _card(game, task_type, path))


def _card(game: Mapping[str, Any], task_type: TaskType, source: str) -> dict[str, Any]:
    """Return the card of a game: all data for playing it and for its prompts."""
    hopeless = ValueError(f"alfworld: the planner finds no way to win {source}; remove the game")
    try:
        values = _compiled(game) | {"task_type": task_type, "id": source}
    except KeyError:  # Fast Downward writes another problem for one whose goal is out of reach
        raise hopeless from None
    play = Game(values)
    values["goal"] = _goal(values["grammar"])
    values["look"] = play.look()
    values["words"] = _words(values)
    values["plan"] = play.plan(())
    if not values["plan"]:
        raise hopeless
    return values | {"id": card_id(values)}


def _goal(grammar: str) -> str:
    found = GOAL.search(grammar)
    return "" if found is None else str(json.loads(f'"{found[1]}"'))


def _words(card: Mapping[str, Any]) -> list[str]:
    """Return all words of the game's texts and commands."""
    said = [card["goal"], card["look"], NOTHING]
    said += [name for thing, name in card["names"].items() if card["kinds"][thing] in ("object", "receptacle")]
    said += [template for template, _ in card["templates"].values()]
    said += [json.loads(f'"{text}"') for text in _TEXTS.findall(card["grammar"])]
    texts = [part for text in said for part in _SLOT.split(text)]
    return sorted({word for text in texts for word in words(_TITLE.sub(" ", text)).split()})


def _compiled(game: Mapping[str, Any]) -> dict[str, Any]:
    """Return the problem in the form of Fast Downward and the grammar, see `play.Game`."""
    logic = pddl.GameLogic(game["pddl_domain"], game["grammar"])
    with contextlib.redirect_stdout(io.StringIO()):
        state = pddl.PddlState(engine().lend(), game["pddl_problem"], logic)
    kinds = dict(sorted(state.name2type.items()))
    demangler = alfworld("agents.utils.misc").Demangler(
        game_infos={name: EntityInfo(name, kind) for name, kind in kinds.items()}
    )
    return {
        "grammar": game["grammar"],
        "sas": state.sas,
        "sas_replan": state.sas_replan,
        "types": [[t.name, list(t.parents)] for t in logic.types],
        "kinds": kinds,
        "names": {name: demangler.demangle_alfred_name(name).strip() for name in sorted(demangler.obj_names)},
        "facts": sorted(f"{f.name}({', '.join(v.name for v in f.arguments)})" for f in state.facts),
        "parameters": {
            a.name: [[p.name.strip("?"), p.type_name] for p in a.parameters[: a.num_external_parameters]]
            for a in state.task.actions
        },
        "templates": {
            name: [COMMANDS.get(name, a.template), a.feedback_rule]
            for name, a in logic.actions.items()
            if name in {action.name for action in state.task.actions}
        },
    }


def demonstrate(card: str, count: int, noise: float, max_turns: int, target: str) -> None:
    """Write `count` walks to the goal, `[command, observation, command, ...]`, with a share of random commands.

    After a random command the planner plans again. A walk is cut after `max_turns` commands.
    """
    game = Game(load_json(card))
    rng = random.Random(f"{game.card['id']}/{count}/{noise}")
    save_json(Path(target), [_walk(game, noise, max_turns, rng) for _ in range(count)])


def _walk(game: Game, noise: float, max_turns: int, rng: random.Random) -> list[str]:
    walk: list[str] = []
    way: Way = ()
    plan = list(game.card["plan"])
    for _ in range(max_turns):
        strays = rng.random() < noise
        command = rng.choice(sorted(set(game.commands(way)) - UNWISE)) if strays else plan.pop(0)
        answer = game.answer(way, command)
        walk += [command, answer.observation]
        if answer.won:
            break
        if answer.path != way and strays:
            plan = game.plan(answer.path)
        if not plan:
            break
        way = answer.path
    return walk[:-1]
