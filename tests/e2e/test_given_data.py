"""Rows of data given to `Trainer` in Python: the same run as from a file, and resumed when given again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from winnow import ConfigError, Trainer

from ..builders.runs import metrics_of
from ..parity import parity_reward

ROWS = [{"prompt": f"{a} {b} 2", "answer": a} for a in range(1, 5) for b in range(1, 4)]


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in tiny_config.items() if k != "env"} | {"max_steps": 2, "save_steps": 1, "eval_steps": None}


def losses(run: Path) -> list[tuple[float, float]]:
    lines = metrics_of(run)
    return [(m["reward"], m["loss"]) for m in lines if "loss" in m]


def test_rows_train_as_a_file_does(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS))
    runs = []
    for name, given in {
        "file": {"env": {"name": "dataset", "path": str(file)}},
        "rows": {"train_dataset": iter(ROWS)},
        "env": {"env": ROWS},
    }.items():
        runs.append(tmp_path / name)
        Trainer(config=config | {"output_dir": str(runs[-1])}, reward_funcs=parity_reward, **given).train()
    assert len(losses(runs[0])) == 2
    assert losses(runs[0]) == losses(runs[1]) == losses(runs[2])


def test_rows_are_given_again_to_a_resume(config: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    env = {"name": "dataset", "prompt_column": "question"}
    data = [{"question": row["prompt"]} for row in ROWS]
    config |= {"output_dir": str(run), "env": env}
    Trainer(config=config, reward_funcs=parity_reward, train_dataset=data).train()
    Trainer.resume(run, {"max_steps": 3}, reward_funcs=parity_reward, train_dataset=data).train()
    assert len(losses(run)) == 3
    with pytest.raises(ConfigError, match="the task is not the one this run was saved with"):
        Trainer.resume(run, {"max_steps": 4}, reward_funcs=parity_reward, train_dataset=data[:-1]).train()
    with pytest.raises(ConfigError, match=r"dataset: no path; give one, or in Python train_dataset"):
        Trainer.resume(run, {"max_steps": 4}, reward_funcs=parity_reward)


def test_held_out_rows(config: dict[str, Any], tmp_path: Path) -> None:
    config |= {"output_dir": str(tmp_path / "run"), "eval_steps": 2}
    given = {"train_dataset": ROWS[:8], "eval_dataset": ROWS[8:]}
    last = Trainer(config=config, reward_funcs=parity_reward, **given).train()
    assert "eval/pass@1" in last
    config |= {"output_dir": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match="prompts are also in the training data"):
        Trainer(config=config, reward_funcs=parity_reward, train_dataset=ROWS, eval_dataset=ROWS[8:])


class Nothing:
    pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"train_dataset": ROWS, "reward_funcs": 7},
            "reward_funcs: expected a function, a reward model or their names",
        ),
        ({"env": 3}, "env: a int is neither rows of data nor a task"),
        ({"env": Nothing()}, r"neither rows of data nor a task \(missing train, test, make_env, fingerprint\)"),
        ({"env": ROWS, "train_dataset": ROWS}, "give one of them"),
        ({"train_dataset": {"train": ROWS, "test": ROWS}}, r"has splits or columns 'train', 'test'; give one split"),
        ({"train_dataset": ["1 + 1"]}, "train_dataset, row 1: expected a mapping"),
        ({"train_dataset": []}, "train_dataset: no rows"),
        ({"train_dataset": [{"question": "a"}]}, "train_dataset, row 1: no column 'prompt'"),
        ({"train_dataset": ROWS, "env": "countdown"}, "env cannot have name: countdown; leave it out"),
        ({"train_dataset": ROWS, "env": {"name": "dataset", "path": "a.jsonl"}}, "env cannot have `path`"),
        ({"env": "countdown", "eval_dataset": ROWS}, "eval_dataset: needs train_dataset"),
        (
            {"train_dataset": ROWS, "config": {"sync": "processes"}},
            "train_dataset cannot be an object",
        ),
    ],
)
def test_refusals(tiny_model: Path, tmp_path: Path, given: dict[str, Any], message: str) -> None:
    config = {"output_dir": str(tmp_path / "run")} | given.pop("config", {})
    with pytest.raises(ConfigError, match=message):
        Trainer(model=str(tiny_model), config=config, **given)
    assert not (tmp_path / "run").exists()
