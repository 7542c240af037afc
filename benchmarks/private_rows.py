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
from collections.abc import Callable, Iterable, Iterator
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


def on_rows(rows: Iterable[dict[str, Any]], places: list[int], *names: str) -> list[dict[str, Any]]:
    """Compare these sides on the prompts at these places."""
    train = DatasetConfig("rows").with_rows(rows).train
    return [compared(lambda: (train[i] for i in places), len(places), f, *names) for f in (unread, read)]


def many_rows(n: int) -> Iterator[dict[str, Any]]:
    """Rows with short columns, a list of messages among them."""
    history = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    return ({"prompt": f"row {i}", "answer": i, "column": history, "level": {"a": [i]}} for i in range(n))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=MILLION)
    parser.add_argument("--groups", type=int, default=500)


def run(options: argparse.Namespace) -> None:
    table: dict[str, Any] = {"machine": machine("cpu"), "siblings": SIBLINGS, "columns": [], "many_rows": []}
    for name, value in COLUMNS.items():
        groups = on_rows([{"prompt": "a row", "column": value(0)}], [0] * (400 if name == "short" else 1), *SIDES)
        table["columns"] += [{"column": name} | found for found in groups]
        print(json.dumps(table["columns"][-2:]), flush=True)
    places = random.Random(0).choices(range(options.rows), k=options.groups)
    groups = on_rows(many_rows(options.rows), places, "shared", "private")
    table["many_rows"] = [{"rows": options.rows} | found for found in groups]
    print(json.dumps(table["many_rows"]))
    write_json(options.out, table)
