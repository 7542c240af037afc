"""Generated data sets: `path: made:arithmetic`. No training row has the operands of a test row.

`arithmetic` is sums, differences and times tables. The answer, as in the example before each question, is the whole
equation and nothing else. `gsm-1`, `gsm-2` and `gsm-3` are word problems of one, two and three steps in GSM8K's own
format (`question`, and an `answer` ending in `#### 42`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .row_files import DataError

PREFIX = "made:"
SIZES = {"train": 1024, "test": 256}
HELD_OUT = 0.2
"""Share of operand sets reserved for the test."""

SHOWN = (3, 8)
"""Operands of the example in every question of `arithmetic`."""

Made = dict[str, Any]
"""A row, by column."""
Operands = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """One kind of question: its operands and their use."""

    name: str
    draw: Callable[[random.Random], Operands]
    row: Callable[[Operands], Made]

    def held_out(self, operands: Operands) -> bool:
        """Return whether these operands, in any order, belong to the test."""
        digest = hashlib.sha256(f"{self.name}/{sorted(operands)}".encode()).digest()
        return tuple(sorted(operands)) != SHOWN and digest[0] < HELD_OUT * 256


def made_rows(name: str, split: str) -> list[Made]:
    """Return distinct rows, alternating kinds while each has new ones. Raises DataError for unknown names."""
    if name not in MADE or split not in SIZES:
        known = ", ".join(PREFIX + n for n in MADE)
        raise DataError(f"{PREFIX}{name}: there is {known}, in the splits train and test")
    streams = {kind.name: (kind, random.Random(f"{name}/{split}/{kind.name}")) for kind in MADE[name]}
    rows: list[Made] = []
    seen: set[tuple[str, Operands]] = set()
    while len(rows) < SIZES[split] and streams:
        for kind, draws in list(streams.values()):
            operands = next((o for o in _candidates(kind, draws, split) if (kind.name, o) not in seen), None)
            if operands is None:
                del streams[kind.name]
                continue
            seen.add((kind.name, operands))
            rows.append({"kind": kind.name, **kind.row(operands)})
    return rows[: SIZES[split]]


TRIES = 200
"""Draws without a new question after which a kind counts as exhausted."""


def _candidates(kind: Kind, draws: random.Random, split: str) -> Iterator[Operands]:
    drawn = (kind.draw(draws) for _ in range(TRIES))
    return (operands for operands in drawn if kind.held_out(operands) == (split == "test"))


# ---------------------------------------------------------------- arithmetic

EXAMPLE = ({"role": "user", "content": "What is 3 + 8?"}, {"role": "assistant", "content": "3 + 8 = 11"})
"""Turns before every question that show the form of the answer."""


def _sum_like(name: str, sign: str, draw: Callable[[random.Random], Operands]) -> Kind:
    def row(operands: Operands) -> Made:
        a, b = operands
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        prompt = [*EXAMPLE, {"role": "user", "content": f"What is {a} {sign} {b}?"}]
        return {"prompt": prompt, "ground_truth": f"{a} {sign} {b} = {value}"}

    return Kind(name, draw, row)


def _difference(draws: random.Random) -> Operands:
    a, b = draws.randint(1, 30), draws.randint(1, 30)
    return max(a, b), min(a, b)


ARITHMETIC = (
    _sum_like("times", "*", lambda draws: (draws.randint(2, 12), draws.randint(2, 12))),
    _sum_like("plus", "+", lambda draws: (draws.randint(1, 30), draws.randint(1, 30))),
    _sum_like("minus", "-", _difference),
)


# ---------------------------------------------------------------- word problems

NAMES = ("Anna", "Ben", "Carla", "David", "Ella", "Frank", "Grace", "Hugo", "Irene", "Jack", "Kate", "Leo")
THINGS = ("apples", "pencils", "marbles", "stamps", "cookies", "books", "shells", "coins", "stickers", "cards")


def _story(name: str, draw: Callable[[random.Random], Operands], question: str, steps: Sequence[str]) -> Kind:
    """Return a word problem: its question, and the result of each step from a, b, c, d and earlier results s1, s2."""

    def row(operands: Operands) -> Made:
        words = random.Random(f"{name}/{operands}")
        told = {"who": words.choice(NAMES), "things": words.choice(THINGS)}
        values: dict[str, int] = dict(zip("abcde", operands, strict=False))
        lines = []
        for number, step in enumerate(steps, start=1):
            shown = step.format(**values)
            values[f"s{number}"] = found = _value(shown)
            lines.append(f"{shown} = <<{shown.replace(' ', '')}={found}>>{found}")
        return {"question": question.format(**told, **values), "answer": "\n".join([*lines, f"#### {found}"])}

    return Kind(name, draw, row)


def _value(term: str) -> int:
    """Return the value of `a + b`, `a - b`, `a * b` or `a / b`, the last without a remainder."""
    left, sign, right = term.split()
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]


def _numbers(*ranges: tuple[int, int]) -> Callable[[random.Random], Operands]:
    return lambda draws: tuple(draws.randint(low, high) for low, high in ranges)


def _shared(draws: random.Random) -> Operands:
    """Draw an amount that can be shared evenly, and the number of shares."""
    friends = draws.randint(2, 9)
    return friends * draws.randint(2, 9), friends


SMALL, TEENS, LARGE = (2, 9), (10, 20), (30, 60)

GSM_1 = (
    _story(
        "buys",
        _numbers((2, 40), (2, 40)),
        "{who} has {a} {things} and buys {b} more. How many {things} does {who} have now?",
        ["{a} + {b}"],
    ),
    _story(
        "gives",
        _numbers((22, 60), (2, 21)),
        "{who} has {a} {things} and gives {b} of them to a friend. How many {things} are left?",
        ["{a} - {b}"],
    ),
    _story(
        "boxes",
        _numbers(SMALL, SMALL),
        "{who} has {a} boxes with {b} {things} each. How many {things} does {who} have?",
        ["{a} * {b}"],
    ),
    _story(
        "shares",
        _shared,
        "{who} shares {a} {things} evenly among {b} friends. How many {things} does each friend get?",
        ["{a} / {b}"],
    ),
)
GSM_2 = (
    _story(
        "buys and gives",
        _numbers(TEENS, TEENS, (2, 9)),
        "{who} has {a} {things} and buys {b} more. Then {who} gives {c} to a friend. How many {things} are left?",
        ["{a} + {b}", "{s1} - {c}"],
    ),
    _story(
        "boxes and more",
        _numbers(SMALL, SMALL, TEENS),
        "{who} has {a} boxes with {b} {things} each, and {c} more on a table. How many {things} are there in all?",
        ["{a} * {b}", "{s1} + {c}"],
    ),
    _story(
        "change",
        _numbers((2, 6), (2, 5), LARGE),
        "{who} buys {a} {things} for {b} dollars each and pays with {c} dollars. How many dollars does {who} get back?",
        ["{a} * {b}", "{c} - {s1}"],
    ),
)
GSM_3 = (
    _story(
        "two kinds of boxes",
        _numbers(SMALL, SMALL, SMALL, SMALL),
        "{who} packs {a} large boxes with {b} {things} each and {c} small boxes with {d} {things} each. "
        "How many {things} does {who} pack?",
        ["{a} * {b}", "{c} * {d}", "{s1} + {s2}"],
    ),
    _story(
        "a week of work",
        _numbers((2, 9), (2, 6), (2, 5), (3, 7)),
        "{who} earns {a} dollars an hour and works {b} hours a day for {c} days. After that, {who} spends {d} dollars "
        "on {things}. How many dollars are left?",
        ["{a} * {b}", "{s1} * {c}", "{s2} - {d}"],
    ),
    _story(
        "trays",
        _numbers((3, 9), (4, 9), (2, 5), (3, 9)),
        "{who} fills {a} trays with {b} {things} each, finds that {c} {things} are broken, and then adds {d} new ones. "
        "How many whole {things} are there?",
        ["{a} * {b}", "{s1} - {c}", "{s2} + {d}"],
    ),
)

MADE: dict[str, tuple[Kind, ...]] = {"arithmetic": ARITHMETIC, "gsm-1": GSM_1, "gsm-2": GSM_2, "gsm-3": GSM_3}
