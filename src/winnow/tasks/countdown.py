"""Countdown: reach a target from a few numbers, each used exactly once, with + - * /.

Puzzles are generated, always solvable, and train and test are disjoint by content (sorted numbers and target). Checking
an answer executes nothing: `verify` checks expressions, `verify_steps` worked steps.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, combinations
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from ..base.files import digest
from ..config.options import CHECKED
from ..env.base import OneTurn, RewardFn
from ..types import Prompt

MAX_LENGTH = 1_024
"""Longest answer considered, in characters."""

_LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")
_EXPRESSION = re.compile(r"[-+*/() \t\r\n0-9]+")
_WHOLE = "(0|[1-9][0-9]{0,19})"
_STEP = re.compile(rf"\s*{_WHOLE}\s*([-+*/])\s*{_WHOLE}\s*=\s*{_WHOLE}\s*", re.ASCII)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ASCII = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


# ---------------------------------------------------------------- checking answers


def verify(expression: str | None, numbers: Sequence[int], target: int) -> bool:
    """Return whether `expression` uses each of `numbers` exactly once and equals `target`, in exact arithmetic.

    Allowed are the given integers, binary + - * / (also × ÷ −), parentheses and blanks. Anything else is False: unary
    signs, powers, leading zeros, None, more than `MAX_LENGTH` characters. Nothing is executed.
    """
    if expression is None or len(expression) > MAX_LENGTH:
        return False
    text = expression.translate(_ASCII)
    if _EXPRESSION.fullmatch(text) is None or _LEADING_ZERO.search(text):
        return False
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return Counter(used) == Counter(numbers) and _value(tree) == target


def verify_steps(text: str, numbers: Sequence[int], target: int) -> bool:
    """Return whether `text` reaches `target` in written steps, e.g. `3 + 5 = 8 , 8 * 2 = 16` for 2, 3, 5.

    Each step takes two of the remaining numbers and puts back their correct result, a non-negative integer; the last
    one leaves only the target.
    """
    steps = text.translate(_ASCII).split(",")
    if len(text) > MAX_LENGTH or len(steps) != len(numbers) - 1:
        return False
    remaining = list(numbers)
    for step in steps:
        match = _STEP.fullmatch(step)
        if match is None:
            return False
        left, op, right, shown = match.groups()
        a, b, result = int(left), int(right), int(shown)
        if not (b != 0 and a == b * result if op == "/" else _apply(op, a, b) == result):
            return False
        for number in (a, b):
            if number not in remaining:
                return False
            remaining.remove(number)
        remaining.append(result)
    return remaining == [target]


def extract_answer(text: str) -> str | None:
    """Return the content of the last complete `<answer>...</answer>`, or None."""
    answers = _ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def _apply(op: str, a: Any, b: Any) -> Any:
    """Return the result of one operation; None for a division by zero."""
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        return a * b
    return a / b if b else None


def _value(node: Any) -> Fraction | None:
    """Return a parsed expression's value; None on division by zero, or unless it is binary + - * / of numbers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return None
    a, b = _value(node.left), _value(node.right)
    return None if a is None or b is None else _apply(_OPERATORS[type(node.op)], a, b)


# ---------------------------------------------------------------- solving

Numbers = tuple[int, ...]
"""Sorted numbers."""
Derivation = tuple[Numbers, int, str, Numbers, int]
"""Last step of a solution: `a op b` with `a` made from the left numbers and `b` from the right ones."""


def _results(a: int, b: int, limit: int) -> list[tuple[str, int]]:
    """Return the steps `a op b` whose result is an integer in [0, limit]."""
    quotient = a // b if b and a % b == 0 else -1
    steps = (("+", a + b), ("-", a - b), ("*", a * b), ("/", quotient))
    return [(op, result) for op, result in steps if 0 <= result <= limit]


@lru_cache(maxsize=65_536)
def _splits(numbers: Numbers) -> tuple[tuple[Numbers, Numbers], ...]:
    """Return the ordered partitions of a multiset into two non-empty parts."""
    found = set()
    for size in range(1, len(numbers)):
        for chosen in combinations(range(len(numbers)), size):
            right = tuple(n for i, n in enumerate(numbers) if i not in chosen)
            found.add((tuple(numbers[i] for i in chosen), right))
    return tuple(sorted(found))


@lru_cache(maxsize=65_536)
def count_solutions(numbers: Numbers, limit: int) -> dict[int, int]:
    """Return value -> number of its solutions from all of `numbers`: trees of steps with results in [0, limit]."""
    if len(numbers) == 1:
        return {numbers[0]: 1}
    counts: Counter[int] = Counter()
    for left, right in _splits(numbers):
        for a, ways_a in count_solutions(left, limit).items():
            for b, ways_b in count_solutions(right, limit).items():
                for _, value in _results(a, b, limit):
                    counts[value] += ways_a * ways_b
    return dict(counts)


@lru_cache(maxsize=65_536)
def _derivations(numbers: Numbers, value: int, limit: int) -> tuple[list[Derivation], list[int]]:
    """Return the last steps that give `value`, and the running sum of their numbers of solutions."""
    steps: list[Derivation] = []
    weights: list[int] = []
    for left, right in _splits(numbers):
        for a, ways_a in count_solutions(left, limit).items():
            for b, ways_b in count_solutions(right, limit).items():
                for op, result in _results(a, b, limit):
                    if result == value:
                        steps.append((left, a, op, right, b))
                        weights.append(ways_a * ways_b)
    return steps, list(accumulate(weights))


def sample_solution(numbers: Numbers, target: int, limit: int, rng: random.Random) -> str:
    """Return a solution as steps, drawn uniformly from all of them. Raises IndexError without a solution."""
    steps: list[str] = []

    def derive(numbers: Numbers, value: int) -> None:
        if len(numbers) == 1:
            return
        choices, cumulative = _derivations(numbers, value, limit)
        left, a, op, right, b = rng.choices(choices, cum_weights=cumulative)[0]
        derive(left, a)
        derive(right, b)
        steps.append(f"{a} {op} {b} = {value}")

    derive(numbers, target)
    return " , ".join(steps)


# ---------------------------------------------------------------- the task


def countdown_reward(
    completions: Sequence[Any],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    style: Sequence[str],
    **columns: Any,
) -> list[float | None]:
    """Return 1.0 for a right answer, else 0.0. Columns: `numbers`, `target`, and `style` (`steps` or `expression`).

    Raises ValueError for a row without a puzzle.
    """
    rewards: list[float | None] = []
    for completion, numbers_, target_, style_ in zip(completions, numbers, target, style, strict=True):
        if numbers_ is None or target_ is None:
            raise ValueError("the countdown reward needs columns 'numbers' and 'target'; one is empty in this row")
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        if style_ == "steps":
            right = verify_steps(text, numbers_, target_)
        else:
            right = verify(extract_answer(text), numbers_, target_)
        rewards.append(float(right))
    return rewards


@dataclass(frozen=True, config=CHECKED)
class CountdownConfig:
    """Generated puzzles: reach a target from a few numbers with + - * /, each number used exactly once."""

    count: Annotated[int, Field(ge=2, le=6)] = 3
    """Numbers in a puzzle."""
    low: PositiveInt = 1
    high: int = 12
    max_target: PositiveInt = 99
    limit: int = 150
    """Every puzzle has a solution with no intermediate result over this; it bounds the vocabulary."""
    train_size: PositiveInt = 4096
    test_size: NonNegativeInt = 256
    seed: int = 0
    style: Literal["steps", "expression"] = "steps"
    """`steps`: a terse text prompt, answered as `3 + 5 = 8 , 8 * 2 = 16`. `expression`: chat messages, answered in
    `<answer>` tags."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"countdown: need low <= high, got low={self.low}, high={self.high}")
        if self.limit < max(self.high, self.max_target):
            raise ValueError(f"countdown: limit={self.limit} is below high={self.high} or max_target={self.max_target}")

    def build(self) -> Countdown:
        return Countdown(self)


class Countdown(OneTurn):
    """Task of puzzles and, for `style: steps`, demonstrations. Raises ValueError if too few puzzles exist."""

    name = "countdown"

    def __init__(self, config: CountdownConfig) -> None:
        self.config = config
        self.reward_funcs: list[RewardFn] = [countdown_reward]
        rng = random.Random(f"countdown/{config.seed}")
        wanted = config.train_size + config.test_size
        puzzles: dict[tuple[Numbers, int], None] = {}
        misses = 0
        while len(puzzles) < wanted:
            puzzle = self._draw(rng)
            misses = misses + 1 if puzzle in puzzles or puzzle is None else 0
            if misses > 10_000:
                raise ValueError(
                    f"countdown: {wanted} different puzzles wanted, but only about {len(puzzles)} exist with "
                    f"count={config.count}, low={config.low}, high={config.high}, max_target={config.max_target}; "
                    "lower train_size or test_size, or raise high or count"
                )
            if puzzle is not None:
                puzzles[puzzle] = None
        drawn = list(puzzles)
        self._held_out = frozenset(drawn[: config.test_size])
        self.test = [self._prompt(i, puzzle) for i, puzzle in enumerate(drawn[: config.test_size])]
        self.train = [self._prompt(i, puzzle) for i, puzzle in enumerate(drawn[config.test_size :])]

    def answers(self, prompt: Prompt, texts: Sequence[str]) -> list[str | None]:
        """Return the way to the target, ignoring blanks and the order of summands and factors."""
        if self.config.style == "steps":
            return [",".join(map(_plain_step, text.split(","))) or None for text in texts]
        return ["".join(answer.split()) if answer else None for answer in map(extract_answer, texts)]

    def fingerprint(self) -> str:
        ids = [[p.id for p in part] for part in (self.train, self.test)]
        return digest({"task": self.name, "prompts": ids, **asdict(self.config)})

    def demonstrations(self, seed: int) -> Iterator[tuple[str, str]]:
        """Yield (prompt, solution) pairs of fresh puzzles without end, never of a test puzzle."""
        if self.config.style != "steps":
            raise ValueError("countdown: only style: steps has demonstrations; use a pretrained model for expression")
        rng = random.Random(f"countdown/demonstrations/{seed}")
        while True:
            puzzle = self._draw(rng)
            if puzzle is not None and puzzle not in self._held_out:
                yield _steps_prompt(*puzzle), sample_solution(*puzzle, self.config.limit, rng)

    def vocabulary(self) -> Sequence[str]:
        return ["numbers", "target", ":", ",", "=", "+", "-", "*", "/", *map(str, range(self.config.limit + 1))]

    def _draw(self, rng: random.Random) -> tuple[Numbers, int] | None:
        """Return random numbers and the value of a random solution, or None: targets with many solutions are common."""
        c = self.config
        numbers = tuple(sorted(rng.randint(c.low, c.high) for _ in range(c.count)))
        solutions = {v: n for v, n in sorted(count_solutions(numbers, c.limit).items()) if 1 <= v <= c.max_target}
        return (numbers, rng.choices(list(solutions), list(solutions.values()))[0]) if solutions else None

    def _prompt(self, ordinal: int, puzzle: tuple[Numbers, int]) -> Prompt:
        numbers, target = puzzle
        columns = {"numbers": list(numbers), "target": target, "style": self.config.style}
        prompt_id = f"countdown-{'-'.join(map(str, numbers))}-to-{target}"
        if self.config.style == "steps":
            return Prompt(prompt_id, ordinal, text=_steps_prompt(numbers, target), columns=columns)
        return Prompt(prompt_id, ordinal, messages=_chat_prompt(numbers, target), columns=columns)


def _plain_step(text: str) -> str:
    match = _STEP.fullmatch(text)
    if match is None:
        return "".join(text.split())
    a, op, b, result = match.groups()
    return op.join(sorted((a, b)) if op in "+*" else (a, b)) + "=" + result


def _steps_prompt(numbers: Numbers, target: int) -> str:
    return f"numbers {' '.join(map(str, numbers))} target {target} :"


def _chat_prompt(numbers: Numbers, target: int) -> tuple[dict[str, Any], ...]:
    text = (
        f"Using the numbers {', '.join(map(str, numbers))}, make an expression that equals {target}. Use every number "
        "exactly once, with + - * / and parentheses only. Think first, then give only the expression inside "
        "<answer> and </answer> tags, for example <answer>(1 + 2) / 3</answer>."
    )
    return ({"role": "user", "content": text},)
