"""The entropy of every step, also of those that train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity import parity_reward
from winnow import Trainer

from ..builders.runs import metrics_of


def constant(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


class Keeps:
    def __init__(self) -> None:
        self.nats: list[np.ndarray] = []

    def on_step_end(self, args: Any, state: Any, control: Any, groups: list[Any], **kwargs: Any) -> None:
        rollouts = [rollout for group in groups for rollout in group.siblings]
        self.nats.append(np.concatenate([-r.sampler_logp[r.action_mask] for r in rollouts]).astype(float))


def test_it_is_the_mean_of_what_was_sampled(tiny_config: dict[str, Any]) -> None:
    """In a run whose groups have equal rewards, and no update: the estimate alone."""
    keeps, config = Keeps(), tiny_config | {"max_steps": 2, "eval_steps": None, "temperature": 0.7}
    Trainer(config=config, reward_funcs=constant, callbacks=[keeps]).train()
    rows = metrics_of(Path(config["output_dir"]))
    assert [row["entropy"] for row in rows] == pytest.approx([nats.mean() for nats in keeps.nats])
    assert [row["sampling/entropy"] for row in rows] == [row["entropy"] for row in rows]


def test_the_estimate_is_close_to_the_exact_one(tiny_config: dict[str, Any]) -> None:
    keeps = Keeps()
    config = tiny_config | {"max_steps": 2, "eval_steps": None, "num_generations": 32, "advantage": "rloo"}
    Trainer(config=config, reward_funcs=parity_reward, callbacks=[keeps]).train()
    for row, nats in zip(metrics_of(Path(config["output_dir"])), keeps.nats, strict=True):
        assert row["entropy"] != row["sampling/entropy"]
        assert abs(row["entropy"] - row["sampling/entropy"]) < 4 * nats.std() / np.sqrt(nats.size)
