r"""Well-known formats of data: their columns, the prompt, and the place of the answer.

Each preset turns a published row into one with `prompt` and `ground_truth`; the other columns stay. For those of
mathematics, `winnow.env.rewards.math` compares answers by value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from .prompt_columns import is_empty
from .rewards.math import boxed_in
from .row_files import DataError, Row

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."

Values = dict[str, Any]


def _gsm8k(row: Row) -> Values:
    question, answer = _text(row, "question"), _text(row, "answer")
    _, mark, gold = answer.rpartition("####")
    if not mark or not gold.strip():
        raise DataError(f"{row.where}: 'answer' has no '#### <number>' at its end; is this GSM8K?")
    return row.values | {"prompt": _ask(question + BOXED), "ground_truth": gold.strip().replace(",", "")}


def _math(row: Row) -> Values:
    gold = boxed_in(_text(row, "solution"))
    if not gold:
        raise DataError(f"{row.where}: 'solution' has no \\boxed{{...}} answer; is this MATH?")
    return row.values | {"prompt": _ask(_text(row, "problem") + BOXED), "ground_truth": gold}


def _verl(row: Row) -> Values:
    """Convert verl's parquet, including DAPO-Math-17k: the prompt carries its own instruction."""
    reward_model = row.values.get("reward_model")
    if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
        raise DataError(f"{row.where}: 'reward_model' must be an object with 'style' and 'ground_truth'")
    if reward_model.get("style") == "model":
        raise DataError(f"{row.where}: reward_model style 'model' needs a reward model; give reward_funcs of your own")
    return row.values | {"ground_truth": reward_model["ground_truth"]}


def _verifiers(row: Row) -> Values:
    prompt = row.values.get("prompt")
    if prompt is None:
        prompt = _ask(_text(row, "question"))
    info = row.values.get("info")
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except ValueError:
            raise DataError(f"{row.where}: 'info' is text but not JSON") from None
    answer = row.values.get("answer")
    gold = _text(row, "answer") if isinstance(answer, str | None) else answer
    return row.values | {"prompt": prompt, "info": info or {}, "ground_truth": gold}


def _alpaca(row: Row) -> Values:
    """Convert Alpaca's columns; `input` follows the instruction, `system` and `history` (pairs of turns) precede it."""
    words = [_text(row, "instruction"), *([] if is_empty(row.values.get("input")) else [_text(row, "input")])]
    messages = _system(row)
    for pair in row.values.get("history") or ():
        if not isinstance(pair, list | tuple) or [type(each) for each in pair] != [str, str]:
            raise DataError(f"{row.where}: 'history' must be a list of [question, answer], found {pair!r:.60}")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    prompt = [*messages, *_ask("\n".join(words))]
    return row.values | {"prompt": prompt, "ground_truth": row.values.get("output")}


SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def _sharegpt(row: Row) -> Values:
    """Convert ShareGPT's turns of `from` and `value`; the last answer is the ground truth, not part of the prompt."""
    turns = row.values.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(t, Mapping) and {"from", "value"} <= t.keys() for t in turns):
        raise DataError(f'{row.where}: \'conversations\' must be a list of {{"from": ..., "value": ...}}')
    messages = _system(row)
    for turn in turns:
        if turn["from"] not in SPEAKERS:
            known = ", ".join(SPEAKERS)
            raise DataError(
                f"{row.where}: a turn is from {turn['from']!r}, not one of {known}; give messages as 'prompt'"
            )
        messages.append({"role": SPEAKERS[turn["from"]], "content": turn["value"]})
    gold = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
    return row.values | {"prompt": messages, "ground_truth": gold}


def _system(row: Row) -> list[dict[str, str]]:
    given = not is_empty(row.values.get("system"))
    return [{"role": "system", "content": _text(row, "system")}] if given else []


def _text(row: Row, column: str) -> str:
    value = row.values.get(column)
    if not isinstance(value, str) or not value.strip():
        has = ", ".join(sorted(row.values))
        fault = "is missing" if column not in row.values else f"must be text that is not empty, found {value!r:.60}"
        raise DataError(f"{row.where}: column '{column}' {fault} (columns: {has})")
    return value


def _ask(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


PRESETS: dict[str, Callable[[Row], Values]] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "dapo_math": _verl,
    "verl": _verl,
    "verifiers": _verifiers,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
}
"""Name -> function from a published row to one with `prompt`. Raises DataError naming the row."""
OF_MATH = frozenset(PRESETS) - {"alpaca", "sharegpt"}
READ = {"alpaca": ("system", "history", "input"), "sharegpt": ("system",)}
"""Columns that a preset makes part of the prompt: see `prompt_columns.INSTRUCTION_COLUMNS`."""
