"""Countdown: the verifiers against brute force and hostile input, the generator, the demonstrations."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import islice, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.env.base import Demonstrator
from winnow.tasks.countdown import (
    CountdownConfig,
    count_solutions,
    countdown_reward,
    extract_answer,
    sample_solution,
    verify,
    verify_steps,
)


@pytest.mark.parametrize(
    ("expression", "numbers", "target"),
    [
        ("(3 + 5) * 2", [2, 3, 5], 16),
        ("3+5*2", [2, 3, 5], 13),
        ("2 - 3 - 5", [2, 3, 5], -6),
        ("2-(3-5)", (2, 3, 5), 4),
        ("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24),
        ("100/7/7*49", [7, 7, 49, 100], 100),
        ("(((7)))", [7], 7),
        ("3 × 4 ÷ 2 − 1", [1, 2, 3, 4], 5),
        ("\t6\n*7 ", [np.int64(6), 7], np.int32(42)),
    ],
)
def test_right_expressions(expression, numbers, target):
    assert verify(expression, numbers, target) is True


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        "16",
        "3 + 5 + 2",
        "(3 + 5) * 2 * 1",
        "3 + 5",
        "3 5 2",
        "35 + 2",
        "(3 + 5 * 2",
        "3 + 5) * 2",
        ")3 + 5( * 2",
        "(3 + 5)(2)",
        "(3 + 5) 2",
        "(3 + 5) * 2 = 16",
        "(3 + 5) ** 2",
        "(3 + 5) // 2",
        "(3 + 5) * +2",
        "-(3 + 5) * -2",
        "(3 + 5) * 02",
        "(3 + 5) * 2.0",
        "(3 + 5) * 2e0",
        "(3 + 5) * 0x2",
        "(3 + 5) * 2_",
        "(3 + 5) * ٢",
        "(3 + 5) * 2\0",
        "(3 + 5) * 2\ud800",
        "(3 + 5) * 2 # yes",
        "(x := 3 + 5) * 2",
        'f"{3 + 5}" * 2',
        "[3 + 5][0] * 2",
        "__import__('os').system('true')",
        "()",
        "+",
        "3 + + 5 * 2",
        "(3 + 5) * 2 /",
        "3 / (5 - 5) * 2",
    ],
)
def test_wrong_expressions(expression):
    assert verify(expression, [2, 3, 5], 16) is False


HOSTILE = [
    "(" * 1_000_000,
    "(" * 500 + "1" + ")" * 500,
    "9**9**9**9",
    "9" * 1_000_000,
    "1_000",
    "+".join(["1"] * 1_000_000),
    " " * 10_000_000,
    "1" + "/0" * 400,
]


@pytest.mark.parametrize("check", [verify, verify_steps])
@pytest.mark.parametrize("text", HOSTILE, ids=len)
def test_hostile_text_is_false(check, text):
    assert check(text, [1, 1], 2) is False
    assert verify(None, [1, 1], 2) is False


def _reference(expression: str) -> Fraction | None:
    """Value by Python's own parser, for expressions this test made."""
    names = "".join(f"Fraction({c})" if c.isdigit() else c for c in expression)
    try:
        return eval(names, {"Fraction": Fraction})
    except (ZeroDivisionError, SyntaxError, TypeError):
        return None


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="123+-*/()", min_size=1, max_size=9))
def test_agrees_with_python_on_random_strings(expression):
    digits = [int(c) for c in expression if c.isdigit()]
    adjacent = any(a.isdigit() and b.isdigit() for a, b in pairwise(expression))
    unary = any(c in "+-" and (i == 0 or expression[i - 1] in "+-*/(") for i, c in enumerate(expression))
    power = "**" in expression or "//" in expression
    value = None if adjacent or unary or power else _reference(expression)
    for target in range(-3, 10):
        assert verify(expression, digits, target) is (value == target)


@settings(max_examples=300, deadline=None)
@given(st.text(), st.lists(st.integers(), max_size=4), st.integers())
def test_never_raises(text, numbers, target):
    assert verify(text, numbers, target) in (True, False)
    assert verify_steps(text, numbers, target) in (True, False)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("3 + 5 = 8 , 8 * 2 = 16", True),
        ("3+5=8,8*2=16", True),
        ("5 + 3 = 8 , 2 * 8 = 16", True),
        ("3 + 5 = 8 , 8 + 8 = 16", False),  # 8 twice
        ("3 + 5 = 8", False),  # 2 unused
        ("3 + 5 = 9 , 9 * 2 = 16", False),
        ("3 + 5 = 8 , 8 * 2 = 17", False),
        ("3 - 5 = -2 , 2 * 8 = 16", False),
        ("3 + 5 = 08 , 8 * 2 = 16", False),
        ("3 + 5 = 8 , 8 * 2 = 16 , ", False),
        ("3 + 5 = 8 , 8 * 2 = 16 .", False),
        ("3 + 5 = 8 ; 8 * 2 = 16", False),
        ("8 * 2 = 16 , 3 + 5 = 8", False),  # 8 before it exists
        ("5 / 3 = 1 , 1 * 2 = 2", False),
        ("3 / 0 = 0 , 0 + 2 = 2", False),
        ("٣ + 5 = 8 , 8 * 2 = 16", False),
    ],
)
def test_steps(text, right):
    assert verify_steps(text, [2, 3, 5], 16) is right


def _brute_force(numbers: tuple[int, ...], limit: int) -> set[int]:
    """Values reachable from all the numbers by repeatedly combining two."""
    if len(numbers) == 1:
        return {numbers[0]}
    found = set()
    for i, j in permutations(range(len(numbers)), 2):
        rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
        a, b = numbers[i], numbers[j]
        results = [a + b, a - b, a * b] + ([a // b] if b and a % b == 0 else [])
        for r in results:
            if 0 <= r <= limit:
                found |= _brute_force((*rest, r), limit)
    return found


@pytest.mark.parametrize("numbers", [(1, 1), (2, 3, 5), (4, 4, 12), (1, 5, 5, 7)])
def test_reachable_values_equal_brute_force(numbers):
    assert set(count_solutions(numbers, 150)) == _brute_force(numbers, 150)


def test_solutions_are_drawn_uniformly_from_all():
    numbers, target, limit = (2, 3, 5), 16, 150
    all_steps = set()
    for a, b, c in permutations(numbers):
        for f, g in product("+-*/", repeat=2):
            for left in (True, False):
                ab = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[f]
                text = f"{a} {f} {b} = {ab} , " + (f"{ab} {g} {c} = 16" if left else f"{c} {g} {ab} = 16")
                if verify_steps(text, list(numbers), target):
                    all_steps.add(text)
    assert count_solutions(numbers, limit)[target] == len(all_steps)
    rng = random.Random(0)
    n = 500 * len(all_steps)
    drawn = [sample_solution(numbers, target, limit, rng) for _ in range(n)]
    assert set(drawn) == all_steps
    assert min(drawn.count(s) for s in all_steps) > 350


def test_task_is_deterministic_disjoint_and_solvable():
    config = CountdownConfig(train_size=300, test_size=100, seed=3)
    task, again, other = config.build(), config.build(), CountdownConfig(train_size=300, test_size=100).build()
    assert task.train == again.train
    assert task.fingerprint() == again.fingerprint() != other.fingerprint()
    assert len(task.train) == 300
    assert len(task.test) == 100
    contents = [(tuple(p.columns["numbers"]), p.columns["target"]) for p in (*task.train, *task.test)]
    assert len(set(contents)) == len({p.id for p in (*task.train, *task.test)}) == 400
    assert all(target in count_solutions(numbers, 150) for numbers, target in contents)
    assert [p.ordinal for p in task.train] == list(range(300))


def test_demonstrations_are_right_diverse_in_vocabulary_and_never_of_a_test_puzzle():
    task = CountdownConfig(train_size=100, test_size=1000).build()
    assert isinstance(task, Demonstrator)
    held_out = {p.text for p in task.test}
    words = set(task.vocabulary())
    pairs = list(islice(task.demonstrations(0), 3000))
    for prompt, completion in pairs:
        parts = prompt.split()
        assert verify_steps(completion, [int(n) for n in parts[1:4]], int(parts[5]))
        assert prompt not in held_out
        assert words >= set((prompt + " " + completion).split())
    assert pairs[:50] == list(islice(task.demonstrations(0), 50))
    assert pairs[:50] != list(islice(task.demonstrations(1), 50))
    by_prompt: dict[str, set[str]] = {}
    for prompt, completion in pairs:
        by_prompt.setdefault(prompt, set()).add(completion)
    assert max(map(len, by_prompt.values())) > 1


def test_expression_style_asks_in_chat_and_reads_the_last_answer_tag():
    task = CountdownConfig(train_size=5, test_size=2, style="expression").build()
    prompt = task.train[0]
    assert prompt.text is None
    assert str(prompt.columns["target"]) in prompt.messages[0]["content"]
    assert extract_answer("<answer>1</answer> no, <answer> 2 </answer> done") == "2"
    assert extract_answer("<answer>1") is None
    assert extract_answer("<answer>x <answer>3</answer>") == "3"
    columns = {"numbers": [[2, 3, 5]] * 3, "target": [16] * 3, "style": ["expression"] * 3}
    texts = ["so <answer>(3+5)*2</answer>", "(3+5)*2", "<answer>3+5</answer>"]
    completions = [[{"role": "assistant", "content": t}] for t in texts]
    assert countdown_reward(completions=completions, **columns) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="style: steps"):
        next(task.demonstrations(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 1}, "count"),
        ({"low": 5, "high": 4}, "low"),
        ({"limit": 50}, "limit=50"),
        ({"max_target": 0}, "max_target"),
        ({"train_size": 0}, "train_size"),
        ({"style": "prose"}, "prose"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CountdownConfig(**options)


def test_too_few_puzzles_is_an_error_not_a_hang():
    with pytest.raises(ValueError, match="only about"):
        CountdownConfig(count=2, high=3, max_target=9, train_size=1000).build()
