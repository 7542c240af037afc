"""What users of TRL bring: data, environments, callbacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("trl")

from transformers import TrainerCallback

from winnow.integrations.trl import WinnowGRPOTrainer

from .trl_runs import G, settings

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def length(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(str(c)) % 3) for c in completions]


def run(model: str, out: Path, *, methods: dict[str, Any] | None = None, **given: Any) -> WinnowGRPOTrainer:
    """A trained trainer; `given` are arguments of the trainer, and `conf` those of its GRPOConfig."""
    conf = {"per_device_train_batch_size": 2 * G, "max_steps": 3} | given.pop("conf", {})
    trainer = WinnowGRPOTrainer(**{"model": model, "args": settings(out, **conf)} | given | (methods or {}))
    trainer.train()
    return trainer


class Guess:
    """An environment of TRL's that owns its data and its reward."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def reset(self, **row: Any) -> str | None:
        Guess.seen.append(row)
        self.guesses = 0
        return f"guess {len(Guess.seen)}"

    def guess(self, number: int) -> str:
        """Guess a number.

        Args:
            number: the guess.
        """
        self.guesses += 1
        return "too low"

    def get_reward(self) -> float:
        return float(len(Guess.seen) % 2)


class Quiet(Guess):
    """Adds nothing to the prompt."""

    def reset(self, **row: Any) -> None:
        super().reset(**row)


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "an empty system message": lambda i: {"prompt": [{"role": "system", "content": ""}, *user(f"{i}")]},
    "ids that repeat": lambda i: {"prompt": user(f"{i}"), "id": i // 2},
    "ids that are no ids": lambda i: {"prompt": user(f"{i}"), "id": i / 2},
    "columns of TRL's own names": lambda i: {"prompt": f"{i}", "completion_ids": 1, "log_metric": 2, "environments": 3},
    "control characters": lambda i: {"prompt": f"{i}\0\x1b"},
    "values of any type": lambda i: {"prompt": f"{i}", "answer": {"a": [i, None]}, "none": None},
}


class Saves(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
