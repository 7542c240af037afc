"""ALFWorld games in a worker process: Fast Downward's state, TextWorld's grammar, and a memory of their answers.

TextWorld's own wrapper words every possible command after every step, which is most of its 30 ms in a small room. Here
a step derives only its own text, in 0.5 to 1 ms. An answer already given in a state is looked up (10 us). The words are
the same.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from ....base.machine import install
from ....env.base import StepResult, before_stop
from ....env.workers.file_cache import load_json
from ..react import NOTHING, Style, normal_form, parse_action, worded

try:
    import fast_downward
    from textworld import logic
    from textworld.envs.pddl import logic as pddl
    from textworld.envs.pddl import textgen
    from textworld.generator.game import EntityInfo
except ImportError:
    raise ImportError(f"the package is missing; {install('alfworld')}") from None

LOADED = 128
"""Games kept in memory by a process."""
REMEMBERED = 1_000
"""Answers kept in memory by a game before it clears them."""
UNTOLD = "checked("
"""Facts without effect on observations: states that differ in nothing else are one."""
DEEDS = frozenset({"take", "move", "put", "clean", "heat", "cool", "slice", "use", "toggle"})
"""Verbs that advance a task; the others only look and go."""
_NUMBER = re.compile(r" \d+\b")
GOAL = re.compile(r'"Your task is to: ((?:[^"\\]|\\.)*)"')

Path = tuple[int, ...]
"""Operators that lead to a state."""


@dataclass(frozen=True, slots=True)
class Answer:
    path: Path
    observation: str
    won: bool


def play(card: str, style: Style) -> AlfworldEnv:
    """Return the game described by a card."""
    return AlfworldEnv(game_of(card), style)


@lru_cache(maxsize=LOADED)
def game_of(card: str) -> Game:
    return Game(load_json(card))


class AlfworldEnv:
    """Implements `Env`. The first observation is part of the prompt, so `reset` returns None."""

    def __init__(self, game: Game, style: Style) -> None:
        self._game, self._style = game, style
        self._path: Path = ()
        self._won = False
        self._done: Counter[str] = Counter()

    def reset(self) -> str | None:
        self._path, self._won, self._done = (), False, Counter()
        return None

    def step(self, text: str) -> StepResult:
        text = before_stop(text)
        command = parse_action(text) if self._style == "react" else normal_form(text)
        answer = self._game.answer(self._path, command or "")
        self._path = answer.path
        self._won = self._won or answer.won
        if answer.observation != NOTHING:
            self._done += deeds([command or ""])
        wanted = self._game.deeds
        progress = 1.0 if self._won else (wanted & self._done).total() / max(wanted.total(), 1)
        shown = answer.observation if self._style == "react" else worded(answer.observation)
        return StepResult(shown, float(self._won), self._won, {"progress": progress}, command or "")


def deeds(commands: Iterable[str]) -> Counter[str]:
    """Return deeds of commands, without the numbers of things: `take mug`, `heat mug`, `move mug to shelf`."""
    plain = (_NUMBER.sub("", command) for command in commands)
    return Counter(re.split(" from | with ", command)[0] for command in plain if command.split(" ")[0] in DEEDS)


class Game:
    """A game and its answers so far, shared by all its players. `card` is the output of `games.describe`.

    A state is given by operators that lead to it, the first such path discovered.
    """

    def __init__(self, card: Mapping[str, Any]) -> None:
        self.card = card
        self.deeds = deeds(card.get("plan", ()))  # empty while the card is being made
        """Deeds on the planner's way to the goal; a rollout's progress is its share of them."""
        self.engine = engine()
        self._grammar = _grammar(GOAL.sub('""', card["grammar"]), json.dumps(card["types"]))
        self._forget()

    def _forget(self) -> None:
        self._answers: dict[tuple[Path, str], Answer] = {}
        self._commands: dict[Path, dict[str, str]] = {}
        self._ways: dict[frozenset[str], Path] = {self._told(self.card["facts"]): ()}

    def answer(self, path: Path, command: str) -> Answer:
        """Return the answer to a command in a state. An impossible command does nothing."""
        known = self._answers.get((path, command))
        if known is None:
            operator = self.commands(path).get(command)
            if operator is None:  # not stored: a model's commands are unlimited
                return Answer(path, NOTHING, won=False)
            if len(self._answers) >= REMEMBERED:
                self._forget()
            known = self._answers[path, command] = self._derived(path, operator)
        return known

    def commands(self, path: Path) -> dict[str, str]:
        """Return command -> operator for all possible commands in a state."""
        if path not in self._commands:
            self.engine.enter(self.card, path)
            found: dict[str, str] = {}
            for operator in self.engine.operators():
                found.setdefault(self._said(operator), operator)
            self._commands[path] = found
        return self._commands[path]

    def look(self) -> str:
        """Return the observation at the start."""
        return self._grammar.told(self.card, self.card["facts"], "#look.feedback#")

    def plan(self, path: Path) -> list[str]:
        """Return commands that lead from a state to the goal; empty if the planner finds no way."""
        return [self._said(operator) for operator in self.engine.plan(self.card, path)]

    def _derived(self, path: Path, operator: str) -> Answer:
        self.engine.enter(self.card, path)
        number = self.engine.apply(operator)
        facts = self.engine.facts
        after = self._ways.setdefault(self._told(facts), (*path, number))
        rule = self.card["templates"][operator.split()[0]][1]
        return Answer(after, self._grammar.told(self.card, facts, rule, operator), self.engine.won())

    def _said(self, operator: str) -> str:
        """Return an operator as a command."""
        name, *things = operator.split()
        named = dict(zip((p for p, _ in self.card["parameters"][name]), things, strict=True))
        template = self.card["templates"][name][0]
        return str(template.format(**{p: self.card["names"][thing] for p, thing in named.items()}))

    @staticmethod
    def _told(facts: Iterable[str]) -> frozenset[str]:
        return frozenset(fact for fact in facts if not fact.startswith(UNTOLD))


# ---------------------------------------------------------------- Fast Downward


class _Engine:
    """The planner's library, which holds one state at a time; loading a game takes 0.1 ms.

    Facts are written `holds(agent1, mug_bar_1)`, those undone by an operator also `not_holds(...)`, as in TextWorld.
    """

    def __init__(self) -> None:
        self._library = fast_downward.load_lib()
        self._at: tuple[str, Path] | None = None
        """The loaded game's planning task and the operators applied since."""
        self._operators: dict[str, int] = {}
        self._effects: dict[int, int] = {}
        self.facts: set[str] = set()

    def lend(self) -> Any:
        """Return the library for any use; its state counts as lost."""
        self._at = None
        return self._library

    def enter(self, card: Mapping[str, Any], path: Path) -> None:
        """Go to a state of a game."""
        if self._at == (card["sas"], path):
            return
        if self._at is None or self._at[0] != card["sas"] or self._at[1] != path[: len(self._at[1])]:
            self._library.load_sas(card["sas"].encode())
            self.facts = set(card["facts"])
            self._at = (card["sas"], ())
        for number in path[len(self._at[1]) :]:
            self.operators()
            self._go(number)

    def operators(self) -> list[str]:
        """Return the names of the operators possible now."""
        found = (fast_downward.Operator * self._library.get_applicable_operators_count())()
        self._library.get_applicable_operators(found)
        self._operators = {}
        for operator in found:
            self._operators.setdefault(operator.name, operator.id)
            self._effects[operator.id] = operator.nb_effect_atoms
        return list(self._operators)

    def apply(self, operator: str) -> int:
        """Apply an operator, which must be possible, and return its number."""
        self.operators()
        number = self._operators[operator]
        self._go(number)
        return number

    def won(self) -> bool:
        return bool(self._library.check_goal())

    def plan(self, card: Mapping[str, Any], path: Path) -> list[str]:
        """Return operators that lead from a state to the goal; empty if the planner finds no way."""
        self.lend().load_sas_replan(card["sas_replan"].encode())
        self.enter(card, path)
        if not self._library.replan(False):
            return []
        steps = (fast_downward.Operator * self._library.get_last_plan_length())()
        self._library.get_last_plan(steps)
        return [step.name for step in steps]

    def _go(self, number: int) -> None:
        effects = (fast_downward.Atom * self._effects[number])()
        self._library.apply_operator(number, effects)
        for effect in effects:
            kind, _, fact = effect.name.partition(" ")
            came, went = (f"not_{fact}", fact) if kind == "NegatedAtom" else (fact, f"not_{fact}")
            self.facts.discard(went)
            self.facts.add(came)
        if self._at:
            self._at = (self._at[0], (*self._at[1], number))


@lru_cache(maxsize=1)
def engine() -> _Engine:
    return _Engine()


# ---------------------------------------------------------------- TextWorld's grammar


class _Grammar:
    """A game's grammar, which describes the result of an operator. `text` may omit the goal."""

    def __init__(self, text: str, types: Sequence[tuple[str, Sequence[str]]]) -> None:
        _mend_grammar()
        self._grammar = pddl.GameLogic("", text).grammar
        self._world = logic.GameLogic()
        for name, parents in types:
            self._world.types.add(logic.Type(name, parents))

    def told(self, card: Mapping[str, Any], facts: Iterable[str], rule: str, operator: str = "") -> str:
        """Return the text of a rule such as `#look.feedback#`, after an operator that led to these facts."""
        names, kinds = card["names"], card["kinds"]
        entities = {thing: EntityInfo(thing, kind) for thing, kind in kinds.items()}
        for thing, entity in entities.items():
            entity.name, entity.definite, entity.indefinite = names[thing], "the", "a"
        state = logic.State(self._world)
        for fact in facts:
            predicate, _, things = fact.partition("(")
            state.add_fact(
                logic.Proposition(predicate, [logic.Variable(t, kinds[t]) for t in things[:-1].split(", ") if t])
            )
        name, *given = operator.split() or [""]
        mapping = {
            logic.Placeholder(p, kind): logic.Variable(thing, kind)
            for (p, kind), thing in zip(card["parameters"].get(name, ()), given, strict=True)
        }
        context = {
            "state": state,
            "facts": (),
            "variables": _Shared({p.name: entities[variable.name] for p, variable in mapping.items()}),
            "mapping": _Shared(mapping),
            "entity_infos": entities,
        }
        return str(self._grammar.derive(rule, context))


class _Shared(dict[Any, Any]):
    """A dictionary whose deep copies share its values: TextWorld copies it at every symbol and changes no value."""

    def __deepcopy__(self, memo: Any) -> _Shared:
        return _Shared(self)


@lru_cache(maxsize=1)
def _mend_grammar() -> None:
    """Cache the few rules and queries that TextWorld's grammar otherwise parses at every use.

    Its expressions find their variables in its module: writing them to `locals()` fails from Python 3.13 on.
    """

    class Rule(textgen.Rule):
        parse_conjunctive_query = staticmethod(lru_cache(maxsize=4_096)(textgen.Rule.parse_conjunctive_query))

    evaluated = textgen.EvalSymbol.derive

    def derive(self: Any, context: dict[str, Any] | None = None) -> list[Any]:
        names, given = vars(textgen), (context or self.context)["variables"]
        shadowed = {name: names[name] for name in given if name in names}
        names.update(given)
        try:
            return cast(list[Any], evaluated(self, context))
        finally:
            for name in given:
                del names[name]
            names.update(shadowed)

    textgen.EvalSymbol.derive = derive
    textgen.Rule = Rule
    textgen._parse_and_convert = lru_cache(maxsize=4_096)(textgen._parse_and_convert)


@lru_cache(maxsize=8)
def _grammar(text: str, types: str) -> _Grammar:
    return _Grammar(text, json.loads(types))
