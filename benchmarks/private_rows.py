"""What private copies of rows cost: microseconds of the processor a rollout, by column, and in a million rows.

    python benchmarks/bench.py private_rows --out benchmarks/results/private_rows.json

A group is its prompt, read from disk, an environment for each of 8 siblings and two reward functions in this process.
Nothing is generated, so ratios are upper bounds. Sides are rows that are shared, private ones, and deep copies. With
`unread` the functions take every column and look at none; with `read` they read all of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from harness import in_turn, machine, spread, write_json

from winnow.env.dataset import DatasetConfig
from winnow.env.private import private, private_prompt
from winnow.env.rewards import rewarder as rewards
from winnow.env.rewards.rewarder import Rewarder
from winnow.types import Group, Prompt, Rollout, Visit

SIBLINGS = 8
REPEATS = 5
MILLION = 1_000_000
COLUMNS: dict[str, Callable[[int], Any]] = {
    "short": lambda i: str(i),
    "text of 1 MB": lambda i: "x" * (1 << 20),
    "20 documents, 1 MB": lambda i: [{"title": str(d), "text": "x" * 50_000} for d in range(20)],
    "500 messages, 1 MB": lambda i: [{"role": "user", "content": "x" * 2_000} for _ in range(500)],
    "130,000 numbers": lambda i: [float(n) for n in range(130_000)],
    "10,000 objects": lambda i: [{"a": n, "b": [n, i]} for n in range(10_000)],
    "array of 1 MB": lambda i: np.full(1 << 17, float(i)),
}
Copy = Callable[[Any], Any]


def shared(value: Any) -> Any:
    return value


SIDES: dict[str, Copy] = {"shared": shared, "private": private, "deep": copy.deepcopy}


def unread(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def read(completions: list[str], **columns: Any) -> list[float]:
    for values in columns["column"]:
        if isinstance(values, list):
            for _ in values:
                pass
    return [0.0] * len(completions)


def given(prompt: Prompt, copied: Copy) -> Prompt:
    """The prompt as environments get it."""
    if copied is private:
        return private_prompt(prompt)
    return replace(prompt, columns={name: copied(value) for name, value in prompt.columns.items()})


def rollout(sibling: int) -> Rollout:
    tokens = np.zeros(200, np.int64)
    return Rollout(sibling, (1,), tokens, tokens > 0, np.zeros(200), tokens, text="a completion " * 60)


def groups_s(prompts: Callable[[], Iterator[Prompt]], function: Callable[..., Any], copied: Copy) -> float:
    """Processor seconds of all groups."""
    usual, rewards.private = rewards.private, copied  # type: ignore[assignment]
    rewarder = Rewarder([function, function])
    started = time.process_time()
    try:
        for number, prompt in enumerate(prompts()):
            environments = [given(prompt, copied) for _ in range(SIBLINGS)]
            for each in environments:
                function(completions=[""], **{name: [value] for name, value in each.columns.items()})
            group = Group(Visit(number, 0, prompt), [rollout(i) for i in range(SIBLINGS)])
            rewarder.start(group)
            rewarder.done(wait=True)
        return time.process_time() - started
    finally:
        rewarder.close()
        rewards.private = usual


def compared(
    prompts: Callable[[], Iterator[Prompt]], n: int, function: Callable[..., Any], *names: str
) -> dict[str, Any]:
    sides = {name: partial(groups_s, prompts, function, SIDES[name]) for name in names}
    rounds = in_turn(sides, REPEATS, warm=True)
    found: dict[str, Any] = {"groups": n, "use": function.__name__}
    for name in names:
        found[f"{name}_us_per_rollout"] = spread(1e6 * one[name] / n / SIBLINGS for one in rounds)
    for name in names[1:]:
        found[f"{name}_to_shared"] = spread(one[name] / one["shared"] for one in rounds)
    return found


def of_column(name: str) -> list[dict[str, Any]]:
    """Compare on a row with this column."""
    rows = [{"prompt": "a row", "column": COLUMNS[name](0)}]
    train = DatasetConfig("rows").with_rows(rows).train
    groups = 400 if name == "short" else 1
    return [
        {"column": name} | compared(lambda: (train[0] for _ in range(groups)), groups, function, *SIDES)
        for function in (unread, read)
    ]


def of_many_rows(n: int, groups: int) -> list[dict[str, Any]]:
    """Compare on prompts at random places of many rows with short columns, a list of messages among them."""
    history = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    rows = ({"prompt": f"row {i}", "answer": i, "column": history, "level": {"a": [i]}} for i in range(n))
    train = DatasetConfig("rows").with_rows(rows).train
    places = random.Random(0).choices(range(n), k=groups)
    return [
        {"rows": n} | compared(lambda: (train[i] for i in places), groups, f, "shared", "private")
        for f in (unread, read)
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=MILLION)
    parser.add_argument("--groups", type=int, default=500)


def run(options: argparse.Namespace) -> None:
    table: dict[str, Any] = {"machine": machine("cpu"), "siblings": SIBLINGS, "columns": [], "many_rows": []}
    for name in COLUMNS:
        table["columns"] += of_column(name)
        print(json.dumps(table["columns"][-2:]), flush=True)
    table["many_rows"] = of_many_rows(options.rows, options.groups)
    print(json.dumps(table["many_rows"]))
    write_json(options.out, table)
