"""Build runs with vLLM and every method."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer

from .. import parity

VLLM = {"name": "vllm", "slots": 16, "max_length": 64, "args": {"kv_cache_memory_bytes": 1 << 26}}


EVERYTHING = {
    "selector": "greso",
    "filter": "zero_variance",
    "rollout_batch": "adaptive",
    "group_size": {"name": "adaptive_k", "tau": 0.6},
    "gates": [{"name": "arrol", "at": 4, "cold_start": 1}],
    "audit": {"epsilon": 0.3},
    "max_lag": 2,
    "advantage": "opob",
    "correction": "truncate",
    "policy_loss": "plain",
    "step_scale": "ess",
}


@pytest.fixture
def config(tiny_config: dict[str, Any], wide_model: Path) -> dict[str, Any]:
    return tiny_config | {"model": str(wide_model), "max_steps": 3, "engine": VLLM}


def train(config: dict[str, Any]) -> Path:
    Trainer(config=config | {"reward_funcs": [f"{parity.__file__}:parity_reward"]}).train()
    return Path(config["output_dir"])


def rollouts(run: Path) -> list[tuple[Any, ...]]:
    query = "SELECT visit, sibling, tokens, fate, reward FROM rollouts ORDER BY visit, sibling"
    with sqlite3.connect(run / "ledger.sqlite") as db:
        return db.execute(query).fetchall()
