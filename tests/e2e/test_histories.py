"""Agents whose histories change learn: one that compacts its history, and two that play with each other."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.env.dataset import DatasetConfig
from winnow.tasks.agents import with_agent

from ..builders.compacting import example, model
from ..builders.runs import assert_clean, fingerprint

__all__ = ["example", "model"]  # fixtures


def test_an_agent_without_compaction_runs_out_of_its_context(example: Any, model: Path, tmp_path: Path) -> None:
    example.train(model, example.whole, tmp_path / "run", max_steps=1)
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as db:
        assert set(db.execute("SELECT stop_reason, reward FROM rollouts")) == {("context", 0.0)}


@pytest.mark.exhaustive
def test_an_agent_that_compacts_its_history_learns_to(example: Any, model: Path, tmp_path: Path) -> None:
    rows = example.train(model, example.compacting, tmp_path / "run", max_steps=100)
    assert_clean(tmp_path / "run")
    assert rows[0]["reward"] < 0.3
    assert sum(row["reward"] for row in rows[-5:]) / 5 > 0.9
    assert rows[-1]["segments/mean"] > 1


@pytest.mark.exhaustive
def test_a_proposer_and_a_solver_learn(example: Any, model: Path, tmp_path: Path) -> None:
    rows = example.train(model, example.play, tmp_path / "run", max_steps=60)
    assert_clean(tmp_path / "run")
    assert rows[0]["rewards/env/solver/mean"] < 0.4
    assert sum(row["rewards/env/solver/mean"] for row in rows[-5:]) / 5 > 0.8


@pytest.mark.slow
def test_a_resume_goes_on_exactly(example: Any, model: Path, tmp_path: Path) -> None:
    whole, parts, saved = tmp_path / "whole", tmp_path / "parts", {"save_steps": 1, "max_lag": 1}
    example.train(model, example.compacting, whole, max_steps=4, **saved)
    example.train(model, example.compacting, parts, max_steps=2, **saved)
    task = with_agent(DatasetConfig(str(model / "rows.jsonl")).build(), example.compacting, max_turn_length=1)
    Trainer.resume(parts, {"max_steps": 4}, env=task).train()
    computed = "num_computed_tokens"  # depends on when the agent's program asks
    assert fingerprint(parts, computed) == fingerprint(whole, computed)
