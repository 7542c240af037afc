"""Reward for short answers whose form counts as well as their content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .pooled import completion_text, gold_text


def exact_answer(completions: Sequence[Any], ground_truth: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1.0 for exactly the reference answer, ignoring surrounding blanks; else 0.0."""
    rewards: list[float | None] = []
    for completion, gold in zip(completions, ground_truth, strict=True):
        rewards.append(float(completion_text(completion).strip() == gold_text(gold)))
    return rewards
