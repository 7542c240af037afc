"""Presets on rows made up in the published formats, read from real files, scored by the real reward."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from winnow.env.dataset import DatasetConfig
from winnow.env.presets import OF_MATH
from winnow.env.rewards.rewarder import Rewarder
from winnow.env.rewards.simple import exact_answer
from winnow.env.rewards.workers import RewardWorkers
from winnow.env.row_files import DataError
from winnow.types import Group, Prompt, Rollout, Visit

from ..builders.rewards import score_all

GSM8K = {
    "question": "Ann has 1,200 apples and buys 34. How many has she?",
    "answer": "She has 1200 + 34 = <<1200+34=1234>>1234 apples.\n#### 1,234",
}
MATH = {
    "problem": "What is $\\frac{1}{2} + \\frac14$?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "We get $\\frac{2}{4}+\\frac{1}{4} = \\boxed{\\frac{3}{4}}$.",
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [
        {
            "content": "Solve the following math problem step by step. The last line of your response should be of "
            "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
            "What is 6 times 7?\n\n"
            'Remember to put your answer on its own line after "Answer:".',
            "role": "user",
        }
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": 'What is 6 times 7? Let\'s think step by step and output after "####".'}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 0, "answer": "#### 42", "question": "What is 6 times 7?"},
}
VERIFIERS = {"question": "What is 6 times 7?", "answer": "42", "info": json.dumps({"level": 1}), "task": "math"}

RIGHT_AND_WRONG = {
    "gsm8k": (GSM8K, "so \\boxed{1234}", "so \\boxed{1233}"),
    "math": (MATH, "thus \\boxed{0.75}", "thus \\boxed{\\frac{4}{3}}"),
    "dapo_math": (DAPO, "6 * 7 = 42\nAnswer: 42", "Answer: 42\nno, wait\nAnswer: 43"),
    "verl": (VERL, "it is\n#### 42", "it is\n#### 41"),
    "verifiers": (VERIFIERS, "It is \\boxed{42}.", "I do not know."),
}


def as_file(tmp_path, row: dict) -> str:
    if "reward_model" in row:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
        return str(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return str(tmp_path / "rows.jsonl")


def test_every_preset_is_tried():
    assert set(RIGHT_AND_WRONG) == OF_MATH


@pytest.fixture(scope="module")
def scorers():
    """One rewarder for all presets: they share the math reward."""
    rewarder = Rewarder("math", timeout_s=20, workers=RewardWorkers(1))
    yield rewarder
    rewarder.close()


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize("preset", RIGHT_AND_WRONG)
def test_prompt_columns_and_reward(tmp_path, preset, scorers):
    row, right, wrong = RIGHT_AND_WRONG[preset]
    task = DatasetConfig(path=as_file(tmp_path, row), preset=preset).build()
    prompt = task.train[0]
    question = row.get("question") or row.get("problem") or row["prompt"][0]["content"]
    assert prompt.messages[-1]["role"] == "user"
    assert question in prompt.messages[-1]["content"]
    for name in row:
        assert name == "prompt" or name in prompt.columns
    rollouts = [
        Rollout(i, (1,), np.array([5]), np.ones(1, bool), np.zeros(1, np.float32), np.zeros(1, np.int32), text=text)
        for i, text in enumerate((right, wrong))
    ]
    group = Group(Visit(0, 0, prompt), rollouts)
    assert [f.__name__ for f in task.reward_funcs] == ["math_reward"]
    score_all(scorers, [group])
    assert group.rewards().tolist() == [1.0, 0.0], [r.reason for r in rollouts]


@pytest.mark.parametrize("value", [{"target": 16, "numbers": [3, 5]}, ["Lyon", "Nice"], 4, 4.5, True])
@pytest.mark.parametrize("preset", ["verl", "dapo_math", "verifiers"])
def test_ground_truths_keep_their_type(tmp_path, preset, value):
    row = {"verl": VERL | {"reward_model": {"style": "rule", "ground_truth": value}}}
    row |= {"dapo_math": row["verl"], "verifiers": VERIFIERS | {"answer": value}}
    task = DatasetConfig(path=as_file(tmp_path, row[preset]), preset=preset).build()
    found = task.train[0].columns["ground_truth"]
    assert (type(found), found) == (type(value), value)
    assert len(task.fingerprint()) == 64


def test_numbers_and_lists_are_judged_as_they_are_written(scorers):
    gold = {"4": 4, "0.5": 0.5, "[1, 2]": [1, 2], "0": 0}
    for text, value in gold.items():
        prompt = Prompt("p", 0, text="?", columns={"ground_truth": value})
        said = [f"\\boxed{{{text}}}", "\\boxed{7}"]
        rollouts = [
            Rollout(i, (1,), np.array([5]), np.ones(1, bool), np.zeros(1, np.float32), np.zeros(1, np.int32), text=t)
            for i, t in enumerate(said)
        ]
        group = Group(Visit(0, 0, prompt), rollouts)
        score_all(scorers, [group])
        assert group.rewards().tolist() == [1.0, 0.0], (value, [r.reason for r in rollouts])
        assert exact_answer([text, "no"], [value, value]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="this row has none"):
        exact_answer(["nan"], [math.nan])


def test_text_format_for_models_without_chat_template(tmp_path):
    task = DatasetConfig(path=as_file(tmp_path, GSM8K), preset="gsm8k", prompt_format="text").build()
    assert task.train[0].text.startswith("Ann has")


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("gsm8k", {"answer": "1234"}, "has no '#### <number>'"),
        ("gsm8k", {"question": None}, "column 'question' must be text"),
        ("math", {"solution": "3/4"}, "no \\\\boxed"),
        ("math", {"problem": 3}, "column 'problem' must be text that is not empty, found 3"),
        ("dapo_math", {"reward_model": {"style": "rule", "ground_truth": None}}, "'reward_model' must be"),
        ("verl", {"reward_model": None}, "'reward_model' must be"),
        ("verl", {"reward_model": {"style": "model", "ground_truth": "x"}}, "reward_funcs of your own"),
        ("verl", {"prompt": None}, "'prompt' must be text or a list of messages"),
        ("verifiers", {"answer": ""}, "column 'answer'"),
        ("verifiers", {"info": "{"}, "'info' is text but not JSON"),
    ],
)
def test_rows_of_another_format_are_named(tmp_path, preset, change, message):
    path = as_file(tmp_path, RIGHT_AND_WRONG[preset][0] | change)
    with pytest.raises(DataError, match=message) as error:
        DatasetConfig(path=path, preset=preset).build()
    assert path in str(error.value)


def test_missing_column_lists_what_there_is(tmp_path):
    path = as_file(tmp_path, {"q": "a", "answer": "#### 1"})
    with pytest.raises(DataError, match=r"column 'question' is missing \(columns: answer, q\)"):
        DatasetConfig(path=path, preset="gsm8k").build()
