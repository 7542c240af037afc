"""Rewards for answers to mathematical questions: equal in value to the reference, however written.

Comparing two answers means evaluating the model's output (`9^9^9^9`). math-verify therefore runs in a worker process
that is killed at its deadline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ...base.machine import install
from ..workers.worker import WorkerError, shared_pool
from .pooled import PooledReward, Row, gold_text

GOLD_COLUMNS = ("ground_truth", "answer", "solution")
"""Columns that may hold the reference answer, in this order; then `reward_model`."""

_LINE = re.compile(r"(?:^|\n)[ \t>*]*(?:final )?answer[ \t*]*:[ \t*]*([^\n]+)", re.IGNORECASE)
_BARE = re.compile(r"\\boxed\s+([^\s${}][^${}]*)\$")
r"""`$\boxed 2$`, as in two rows of MATH."""
_BOLD = re.compile(r"^\*\*\s*|(?<!\s)\s*\*\*(?=[.!]?$)")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def grade(text: str, gold: str) -> float:
    """Return 1.0 when the last answer in `text` equals `gold`, else 0.0. Meant for a worker. Raises ImportError."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ImportError(f"the package 'math-verify' is missing; {install('math')}") from None
    answer = final_answer(text)
    if answer is not None and _plain(answer) == _plain(gold):
        return 1.0
    # The deadline is the pool's; math-verify's own needs SIGALRM.
    reference = parse(_boxed(gold), parsing_timeout=None)
    candidate = parse(text if answer is None else _boxed(answer), parsing_timeout=None)
    return float(bool(reference and candidate and verify(reference, candidate, timeout_seconds=None)))


def final_answer(text: str) -> str | None:
    r"""Return the last `\boxed{}`, `Answer:` line, `####` line or `<answer>` tag of a text, or None."""
    answers = [(m.start(), m[1]) for pattern in (_LINE, _HASHES, _TAGS) for m in pattern.finditer(text)]
    boxed = last_boxed(text)
    if boxed is not None:
        answers.append((text.rindex("\\boxed{" + boxed), boxed))
    return _BOLD.sub("", max(answers)[1].strip()) if answers else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` with balanced braces, or None."""
    opened: list[int] = []
    last, end = -1, -1
    for brace in re.finditer("[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened and (start := opened.pop()) > last and text.endswith("\\boxed", 0, start):
            last, end = start, brace.start()
    return text[last + 1 : end] if last >= 0 else None


def boxed_in(solution: str) -> str | None:
    r"""Return the last boxed answer of a data set's solution: `\boxed{2}`, `\fbox{2}`, or `$\boxed 2$`, or None."""
    bare = _BARE.findall(solution)
    return last_boxed(solution.replace("\\fbox{", "\\boxed{")) or (bare[-1].strip() if bare else None)


def gold_answer(row: Row) -> str:
    """Return the reference answer of a row. Raises ValueError if the row has no answer."""
    reward_model = row.get("reward_model")
    nested = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    for value in (*(row.get(name) for name in GOLD_COLUMNS), nested):
        if value is not None and (reference := _reference(gold_text(value))):
            return reference
    raise ValueError(f"the math reward needs a column with the reference answer: {', '.join(GOLD_COLUMNS)}")


def _reference(text: str) -> str:
    """Return the answer in a reference, which may be a whole solution."""
    answer = final_answer(text)
    return (boxed_in(text) or text.strip()) if answer is None else answer


def _plain(answer: str) -> str:
    return _THOUSANDS.sub("", answer.strip().lstrip("$").rstrip("$.")).replace(" ", "")


def _boxed(answer: str) -> str:
    return "\\boxed{" + answer.strip().strip("$") + "}"


def same_answers(texts: Sequence[str]) -> list[str | None]:
    """Return the final answer of each text, for equal values the first one; None without an answer.

    Compared in worker processes, like rewards; answers that cannot be compared in time count as different.
    """
    answers: list[str | None] = []
    first: dict[str, str] = {}
    for text in texts:
        answer = final_answer(text)
        if answer is not None and (plain := _plain(answer)) not in first:
            calls = [
                shared_pool().call("winnow.env.rewards.math:grade", {"text": _boxed(plain), "gold": a}) for a in first
            ]
            first[plain] = next((a for a, call in zip(first, calls, strict=True) if _is_right(call)), plain)
        answers.append(None if answer is None else first[_plain(answer)])
    return answers


def _is_right(call: Future[Any]) -> bool:
    try:
        return bool(call.result())
    except WorkerError:
        return False


def _arguments(text: str, row: Row) -> dict[str, Any]:
    return {"text": text, "gold": gold_answer(row)}


math_reward = PooledReward("math_reward", "winnow.env.rewards.math:grade", _arguments)
"""1.0 for a right answer, else 0.0; an answer that cannot be checked in time fails and does not count as wrong."""
