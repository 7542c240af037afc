"""What a run says at its start of data that are more, or fewer, than it uses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer

from ..parity import parity_reward


def said(**arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = Trainer(reward_funcs=parity_reward, **arguments)
        trainer.step()
        trainer.close()
    return [text for text in (str(w.message) for w in seen) if text.startswith(("eval_prompts", "prompts_per_step"))]


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(
    ("held_out", "keys", "expected"),
    [
        (300, {}, ["eval_prompts: 128 of 300 held-out prompts are evaluated, the first ones; set eval_prompts=300"]),
        (128, {}, []),
        (300, {"eval_prompts": 16}, []),
        (300, {"eval_steps": None}, []),
    ],
)
def test_held_out_prompts_that_are_left_out(
    tiny_config: dict[str, Any], held_out: int, keys: dict[str, Any], expected: list[str]
) -> None:
    usual = {k: v for k, v in tiny_config.items() if k != "eval_prompts"}
    env = {"name": "countdown", "train_size": 24, "test_size": held_out}
    found = said(config=usual | {"env": env, "eval_generations": 1, "eval_greedy": False} | keys)
    assert [text.partition(" to evaluate")[0] for text in found] == expected


def test_fewer_prompts_than_a_step_takes(tiny_config: dict[str, Any]) -> None:
    rows = [{"prompt": f"1 {i}"} for i in range(2, 5)]
    keys = tiny_config | {"env": "dataset", "eval_steps": None}
    (line,) = said(config=keys, train_dataset=rows)
    assert line.startswith("prompts_per_step: 4, but there are 3 training prompts, so a step rolls out the same prompt")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Trainer.resume(Path(keys["output_dir"]), train_dataset=rows, reward_funcs=parity_reward)
    assert not any("prompts_per_step" in str(w.message) for w in seen)
    assert said(config=keys | {"prompts_per_step": 3, "output_dir": keys["output_dir"] + "b"}, train_dataset=rows) == []
