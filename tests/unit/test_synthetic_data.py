"""Data that are made on the spot: the same every time, right, without an overlap, and readable by the task."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from winnow.config import RunConfig, load_config
from winnow.config.settings_yaml import read_yaml
from winnow.env.dataset import DatasetConfig
from winnow.env.rewards.math import gold_answer
from winnow.env.rewards.simple import exact_answer
from winnow.env.row_files import DataError
from winnow.env.synthetic_data import EXAMPLE, MADE, PREFIX, SIZES, made_rows

ROOT = Path(__file__).resolve().parents[2]
LEVELS = [name for name in MADE if name.startswith("gsm")]


@pytest.mark.parametrize("name", MADE)
def test_rows_are_many_distinct_and_the_same_every_time(name: str) -> None:
    for split, size in SIZES.items():
        rows = made_rows(name, split)
        assert rows == made_rows(name, split)
        assert len({str(row) for row in rows}) == len(rows) == size
        assert {row["kind"] for row in rows} == {kind.name for kind in MADE[name]}


def operands(text: str) -> tuple[str, tuple[int, ...]]:
    """Kind of an equation by its sign, and what it computes with, in order."""
    a, sign, b = text.partition(" = ")[0].split()
    return sign, tuple(sorted((int(a), int(b))))


def test_operands_of_the_test_are_never_trained_in_either_order() -> None:
    train, test = ({operands(r["ground_truth"]) for r in made_rows("arithmetic", s)} for s in ("train", "test"))
    assert not train & test
    assert operands(EXAMPLE[-1]["content"]) not in test


def test_equations_are_right() -> None:
    for row in made_rows("arithmetic", "train"):
        left, _, right = row["ground_truth"].partition(" = ")
        assert row["prompt"][-1]["content"] == f"What is {left}?"
        assert eval(left) == int(right) >= 0
    assert exact_answer([[{"role": "assistant", "content": " 7 * 8 = 56\n"}], "56"], ["7 * 8 = 56"] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("name", LEVELS)
def test_word_problems_have_as_many_steps_as_their_level_and_a_right_answer(name: str) -> None:
    for row in made_rows(name, "train"):
        *steps, last = row["answer"].splitlines()
        assert len(steps) == int(name[-1])
        for step in steps:
            term, shown, value = re.fullmatch(r"(.+) = <<(.+)>>(\d+)", step).groups()  # type: ignore[union-attr]
            assert eval(term.replace("/", "//")) == int(value)
            assert shown == f"{term.replace(' ', '')}={value}"
        assert last == f"#### {value}"
        known = set(re.findall(r"\d+", row["question"]))
        for step in steps:
            *used, value = re.findall(r"\d+", step.replace(step[step.index(" = ") : step.index(">>") + 2], " = "))
            assert set(used) <= known
            known.add(value)


def test_the_task_reads_both_splits_and_names_what_there_is() -> None:
    task = DatasetConfig(path=f"{PREFIX}gsm-2", test=f"{PREFIX}gsm-2", preset="gsm8k").build()
    assert (len(task.train), len(task.test)) == (SIZES["train"], SIZES["test"])
    first = task.train[0]
    assert first.messages is not None
    assert "\\boxed{}" in first.messages[0]["content"]
    assert gold_answer(first.columns) == first.columns["answer"].rpartition("#### ")[2]
    with pytest.raises(DataError, match="made:gsm-1"):
        DatasetConfig(path="made:gsm-9").build()


def test_the_demo_is_the_recipe() -> None:
    recipe = read_yaml(ROOT / "recipes" / "arithmetic-smollm2.yaml")
    demo = read_yaml(ROOT / "src" / "winnow" / "study" / "assets" / "demo-llm.yaml")
    assert recipe.pop("output_dir")
    assert demo == recipe


def test_word_problems_and_gsm8k_differ_in_model_and_data_only() -> None:
    ours, theirs = (load_config(ROOT / "recipes" / f"{name}.yaml") for name in ("gsm-smollm2", "gsm8k-qwen3"))
    different = {key for key in RunConfig.model_fields if getattr(ours, key) != getattr(theirs, key)}
    skips = {"selector", "rollout_batch", "max_lag"}  # what a GPU's recipe saves besides
    assert different == {"model", "env", "output_dir"} | skips
