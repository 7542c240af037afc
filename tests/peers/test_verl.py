"""verl's parquet and its own `compute_score` in whole runs; `make test-peers` installs verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("verl")

from winnow import Trainer

from ..builders.rewards import group, scored
from ..builders.runs import assert_clean, metrics_of
from ..builders.tokenizers import chat_model

__all__ = ["chat_model"]  # a fixture

OURS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "openai/gsm8k" and extra_info["question"]
    return {"score": float(len(solution_str) % 2), "acc": 0.0, "pred": solution_str[:3]}
"""


def row(n: int) -> dict[str, Any]:
    """As verl's own preprocessing of GSM8K writes it."""
    question = f'What is {n} + {n}? Let\'s think step by step and output the final answer after "####".'
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        "extra_info": {"split": "train", "index": n, "answer": f"#### {2 * n}", "question": question},
    }


@pytest.fixture
def config(chat_model: Path, tmp_path: Path) -> dict[str, Any]:
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(12)]), tmp_path / "train.parquet")
    (tmp_path / "custom.py").write_text(OURS)
    return {
        "model": str(chat_model),
        "env": {"name": "dataset", "path": str(tmp_path / "train.parquet"), "preset": "verl", "test_size": 2},
        "output_dir": str(tmp_path / "run"),
        "threads": 1,
        "max_steps": 2,
        "prompts_per_step": 3,
        "num_generations": 4,
        "max_prompt_length": 200,
        "max_completion_length": 16,
        "eval_steps": None,
        "reward_timeout_s": 120,
    }


def test_a_custom_reward_function(config: dict[str, Any], tmp_path: Path) -> None:
    Trainer(config=config | {"reward_funcs": [f"{tmp_path}/custom.py:compute_score"]}).train()
    run = Path(config["output_dir"])
    assert_clean(run)
    rows = metrics_of(run)
    assert all(0 < line["rewards/compute_score/mean"] < 1 for line in rows)
    assert all(line["rollouts/failed_share"] == 0 for line in rows)


def test_its_default_compute_score(config: dict[str, Any]) -> None:
    """On texts that it scores, and in a run of a model that knows nothing."""
    target = "verl.utils.reward_score:default_compute_score"
    from verl.utils.reward_score import default_compute_score

    columns = {key: value for key, value in row(4).items() if key != "prompt"}
    texts = ["So #### 8", "#### 9", "8", "well, #### 8 it is"]
    judged = group(*texts, chat=True, **columns)
    scored(target, judged, timeout_s=120.0)
    found = [rollout.reward for rollout in judged.rollouts]
    assert found == [default_compute_score("openai/gsm8k", text, "8") for text in texts]
    assert set(found) == {0.0, 1.0}
    Trainer(config=config | {"reward_funcs": [target], "filter": "keep_all", "max_skipped_steps": 5}).train()
    assert_clean(Path(config["output_dir"]))
