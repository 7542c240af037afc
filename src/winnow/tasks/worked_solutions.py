"""Worked solutions of generated tasks, word by word, which teach a small model to think before it answers.

A worked solution ends with `answer` and the answer, a digit a word.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable, Sequence

ANSWER = "answer"
WORKED = "chain_sum"
"""The task of reasoning-gym with worked solutions."""
VOCABULARY = (*"0123456789", *string.ascii_lowercase, "+", "-", "=", ":", ",", ";", "|", "borrow", ANSWER)
_TERM = re.compile(r"([+-])\s*(-?)\s*(\d+)")


def answer_of(text: str) -> str | None:
    """Return the text after the last `answer`, without blanks, or None."""
    words = text.split()
    if ANSWER not in words:
        return None
    return "".join(words[len(words) - words[::-1].index(ANSWER) :]) or None


def _terms(question: str) -> list[int]:
    expression = question.partition(":")[2].rpartition("=")[0]
    found = _TERM.findall(f"+ {expression.strip()}")
    return [int(digits) * (-1 if (sign == "-") != (minus == "-") else 1) for sign, minus, digits in found]


def _spell(number: int) -> str:
    return " ".join(str(number))


def chain_sum_prompt(question: str) -> str:
    """Return the question with a letter before every digit, as an anchor for a small model: `a 2 b 8 + c 7 =`."""
    return " ".join([*_named(_terms(question)), "="])


def _named(terms: Sequence[int]) -> list[str]:
    """Return terms with their signs, the first only if it is negative, and letters before their digits."""
    letters = itertools.cycle(string.ascii_lowercase)
    signs = ["-" if term < 0 else "+" if number else "" for number, term in enumerate(terms)]
    digits = [" ".join(f"{next(letters)} {digit}" for digit in str(abs(term))) for term in terms]
    return [f"{sign} {spelled}".strip() for sign, spelled in zip(signs, digits, strict=True)]


def chain_sum(question: str, slip: Callable[[], bool] = lambda: False) -> str:
    """Work term by term, column by column from the right: `+ c 7 : 2 8 + 7 : 8 + 7 = 1 5 , 2 + 0 + 1 = 3 ; 3 5 |`."""
    total, *rest = terms = _terms(question)
    steps = []
    for name, term in zip(_named(terms)[1:], rest, strict=True):
        step, total = _step(total, term, slip)
        steps.append(f"{name} : {step}")
    return " ".join([*steps, ANSWER, _spell(total)])


def _step(total: int, term: int, slip: Callable[[], bool]) -> tuple[str, int]:
    """Write one sum as on paper: magnitudes are added, or the smaller one is subtracted from the larger."""
    same = (total < 0) == (term < 0) or not total or not term
    large, small = sorted((abs(total), abs(term)), reverse=True)
    columns, carry, magnitude = [], 0, 0
    places = max(len(str(large)), len(str(small)))
    for place in range(places):
        a, b = (number // 10**place % 10 for number in (large, small))
        carry = carry and not slip()
        over = f" {'+' if same else '-'} 1" if carry else ""
        result = a + b + carry if same else a - b - carry
        carry = int(result > 9 if same else result < 0)
        digits = _spell(result) if same else str(result % 10) + (" borrow" if carry else "")
        columns.append(f"{a} {'+' if same else '-'} {b}{over} = {digits}")
        magnitude += (result if same and place == places - 1 else result % 10) * 10**place
    head = f"{_spell(large)} {'+' if same else '-'} {_spell(small)}"
    negative = (total if abs(total) > abs(term) else term) < 0
    found = -magnitude if negative else magnitude
    return f"{head} : {' , '.join(columns)} ; {_spell(found)} |", found
