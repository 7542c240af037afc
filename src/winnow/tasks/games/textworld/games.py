"""Makes TextWorld games and solves them, in worker processes: the only module that imports the package textworld.

Files of a game: `game.z8`, `game.json` next to it, and a card with the data for playing. Everything is written under
another name first, so that existing files are complete. Two writers write the same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ....base.dotted import nearest
from ....base.files import digest
from ....base.machine import install
from ....env.workers.file_cache import load_json, save_json
from ..react import NOTHING, worded, words
from .play import LOST, WON, TextWorldEnv, play, readable, understood

DEFAULT_LEVEL = 5
STROLL = 60
"""Commands tried on a game to discover its texts."""
ATTEMPTS = 20
"""Walks with random commands before one without, if those made the game unwinnable."""
CUSTOM = ("nb_rooms", "nb_objects", "nb_parallel_quests", "quest_length", "quest_breadth")
_CODE = re.compile(r"\{(\w+)\}")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a game's two files. Raises ValueError when the JSON file is missing."""
    facts = path.with_suffix(".json")
    if not facts.is_file():
        raise ValueError(f"textworld: {path} has no {facts.name} (of tw-make) in its directory; copy it there")
    return hashlib.sha256(path.read_bytes() + facts.read_bytes()).hexdigest()


def intact(card: Any) -> bool:
    """Return whether the files of a card's game are unchanged, or its seed is known to give no game."""
    try:
        return card["id"] is None or card["files"] == digest_of(Path(card["path"]))
    except (OSError, ValueError, TypeError, KeyError):
        return False


# ---------------------------------------------------------------- making


def generate(
    challenge: str, options: dict[str, Any], grammar: dict[str, Any], seed: int, folder: str, target: str
) -> None:
    """Make a game in `folder` and write its card, or a card without an id if this seed gives no game.

    It is compiled elsewhere: Inform 7 cannot use folders with non-ASCII names. Raises ValueError on options unknown to
    the challenge.
    """
    textworld = _textworld()
    from textworld.generator import QuestGenerationError, compile_game

    place = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="winnow-game-", dir=place if place.isascii() else "/tmp") as scratch:
        compiler = Path(scratch, "inform")
        compiler.symlink_to(Path(textworld.__file__).parent / "thirdparty" / "inform7-6M62")
        os.environ["INFORM_HOME"] = str(compiler)
        os.environ["HOME"] = scratch  # Inform 7 writes a folder there
        wanted = textworld.GameOptions()
        wanted.seeds = seed
        wanted.path = str(Path(scratch, "game.z8"))
        _set(wanted.grammar, grammar, wanted.grammar.__slots__, "grammar")
        try:
            compile_game(_game(challenge, options, seed, wanted), wanted)
        except QuestGenerationError:
            save_json(Path(target), {"id": None})
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in ("game.json", "game.z8"):
            partial = Path(folder, f"{name}.{os.getpid()}")
            shutil.copyfile(Path(scratch, name), partial)
            partial.replace(Path(folder, name))
    describe(str(Path(folder, "game.z8")), target)


def _game(challenge: str, options: Mapping[str, Any], seed: int, wanted: Any) -> Any:
    from textworld.challenges import CHALLENGES
    from textworld.generator import make_game

    if challenge == "custom":
        wanted.kb = _house()
        _set(wanted, options, CUSTOM, "options")
        return make_game(wanted)
    _, make, add_arguments = CHALLENGES[f"tw-{challenge}"]
    return make(_settings(challenge, options, seed, add_arguments), wanted)


@cache
def _house() -> Any:
    """Return TextWorld's own rules of a house; reading them takes a third of the time of making a game."""
    from textworld.generator import KnowledgeBase

    return KnowledgeBase.load()


def _set(target: Any, values: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"textworld: unknown key '{key}' in {where}.{nearest(key, list(known))}")
        setattr(target, key, value)


def _settings(challenge: str, options: Mapping[str, Any], seed: int, add_arguments: Any) -> dict[str, Any]:
    """Return the challenge's settings, checked and completed by tw-make's own command-line parser."""
    parser = _Parser(prog=f"textworld: options of {challenge}", add_help=False, allow_abbrev=False)
    add_arguments(parser)
    known = [action.dest for action in parser._actions]
    given = dict(options)
    if "level" in known:
        given.setdefault("level", DEFAULT_LEVEL)
    if "recipe_seed" in known:
        given.setdefault("recipe_seed", seed)
    arguments = []
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"textworld: challenge {challenge} has no option '{key}'.{nearest(key, known)}")
        flag = f"--{key.replace('_', '-')}"
        arguments += [flag] * value if isinstance(value, bool) else [flag, str(value)]
    return vars(parser.parse_args(arguments))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"{self.prog}: {message}")


# ---------------------------------------------------------------- describing


def describe(path: str, target: str) -> None:
    """Write a game's card: data for playing it and for its prompts."""
    infos = _textworld().EnvInfos(
        max_score=True, verbs=True, command_templates=True, entities=True, feedback=True, extras=["walkthrough"]
    )
    env = _textworld().start(path, infos)
    try:
        state = env.reset()
        names = [name.lower() for name in state.entities]
        values = {
            "path": path,
            "files": digest_of(Path(path)),
            "first": readable(state.feedback),
            "max_score": state.max_score or 1,
            "verbs": sorted(state.verbs),
            "actions": sorted({_CODE.sub(_kind, template) for template in state.command_templates}),
            "spelled": sorted((n for n in names if words(n) != n), key=len, reverse=True),
        }
        told = [values["first"], sorted(names), values["actions"], state["extra.walkthrough"]]
        values["id"] = f"game-{digest(told)[:16]}"
        values["words"] = _stroll(values, sorted(state.command_templates), sorted(state.entities))
    finally:
        env.close()
    save_json(Path(target), values)


def _kind(match: re.Match[str]) -> str:
    kinds = {"o": "object", "t": "thing", "c": "container", "s": "supporter", "d": "door", "k": "key", "f": "food"}
    return f"<{kinds.get(match[1], match[1])}>"


def _stroll(card: Mapping[str, Any], templates: list[str], things: list[str]) -> list[str]:
    """Return words of the game's texts and commands, from random commands of its grammar, possible or not."""
    rng = random.Random(card["first"])
    env = TextWorldEnv(card, "react", "won")
    env.reset()
    heard = [worded(card["first"]), worded(NOTHING), *map(words, things)]
    heard += [words(_CODE.sub(" ", template)) for template in templates]
    for _ in range(STROLL):
        command = _CODE.sub(lambda _: rng.choice(things), rng.choice(templates)).lower()
        if not understood(card, command):
            continue
        raw, _ = env.send(command)
        heard += [words(command), worded(readable(raw))]
        if WON in raw or LOST in raw:
            env.reset()
    return sorted({word for text in heard for word in text.split()})


# ---------------------------------------------------------------- solving


def demonstrate(card: str, count: int, noise: float, max_turns: int, target: str) -> None:
    """Write `count` walks to the goal, `[command, observation, command, ...]`, with a share of random commands.

    After a random command TextWorld's policy continues from the new state. A walk is cut after `max_turns` commands.
    Raises ValueError when TextWorld knows no way to win.
    """
    values = load_json(card)
    rng = random.Random(f"{values['first']}/{count}/{noise}")
    save_json(Path(target), [_walk(values, card, noise, max_turns, rng) for _ in range(count)])


def _walk(card: Mapping[str, Any], file: str, noise: float, max_turns: int, rng: random.Random) -> list[str]:
    infos = _textworld().EnvInfos(admissible_commands=True, policy_commands=True, won=True, lost=True, feedback=True)
    guide = _textworld().start(card["path"], infos)
    try:
        for attempt in range(ATTEMPTS):
            walk = _try(guide, play(file, "react", "won"), noise if attempt < ATTEMPTS - 1 else 0.0, max_turns, rng)
            if walk:
                return walk
    finally:
        guide.close()
    raise ValueError(f"textworld: {card['path']} has no known way to win it, so it cannot be demonstrated")


def _try(guide: Any, env: TextWorldEnv, noise: float, max_turns: int, rng: random.Random) -> list[str] | None:
    """Return one walk, or None when the game can no longer be won."""
    state, walk = guide.reset(), []
    env.reset()
    for _ in range(max_turns):
        if not state.policy_commands:
            return None
        command = rng.choice(state.admissible_commands) if rng.random() < noise else state.policy_commands[0]
        raw, _ = env.send(command.lower())
        walk += [command.lower(), readable(raw)]
        if WON in raw or LOST in raw:
            return walk[:-1] if WON in raw else None
        state, _, _ = guide.step(command)
    return walk[:-1]


def _textworld() -> Any:
    try:
        import textworld
    except ImportError:
        raise ImportError(f"the package is missing; {install('textworld')}") from None
    return textworld
