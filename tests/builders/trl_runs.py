"""Build TRL's trainer with Winnow in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import GRPOConfig

from winnow.integrations.trl import WinnowGRPOTrainer
from winnow.record.ledger import Ledger

from .runs import metrics_of

G, PROMPTS = 4, 4


def parity(completions: list[str], row: list[int], **columns: Any) -> list[float]:
    """Every third prompt is solved whatever is said."""
    return [1.0 if i % 3 == 0 else float(len(c.split()) % 2) for c, i in zip(completions, row, strict=True)]


@pytest.fixture
def data(tiny_model: Path) -> Dataset:
    words = ["1", "2", "3", "4", "5", "6"]
    return Dataset.from_list([{"prompt": f"{words[i % 6]} {words[i // 6]} 2", "row": i} for i in range(24)])


@pytest.fixture
def arguments(tiny_model: Path, data: Dataset, tmp_path: Path) -> dict[str, Any]:
    return {"model": str(tiny_model), "reward_funcs": parity, "train_dataset": data, "args": settings(tmp_path / "out")}


def settings(out: Path, **more: Any) -> GRPOConfig:
    usual: dict[str, Any] = {
        "per_device_train_batch_size": G * PROMPTS,
        "num_generations": G,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(output_dir=str(out), **usual | more)


def metrics(out: Path) -> list[dict[str, float]]:
    return metrics_of(out / "winnow")


def proven(out: Path) -> dict[str, dict[str, float]]:
    with Ledger.open(out / "winnow" / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
        assert proof.ok, proof.problems
        assert ledger.get_meta("finished") == "true"
        return ledger.totals()


class Watched(WinnowGRPOTrainer):
    """Keeps the tensors that TRL trains on."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.seen = [*getattr(self, "seen", []), {k: v.clone() for k, v in output.items()}]
        return output
