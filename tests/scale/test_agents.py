"""Agents whose histories change, on vLLM and on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer

from ..builders.agents import agent_config
from ..builders.runs import assert_clean, metrics_of
from ..builders.tokenizers import save_chat_model
from ..builders.vllm_runs import VLLM, rollouts


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return agent_config(save_chat_model(tmp_path / "model", head_dim=32), tmp_path)


def segments(run: Path) -> list[float]:
    rows = metrics_of(run)
    return [row["segments/mean"] for row in rows if "segments/mean" in row]


def test_a_run_with_vllm_is_that_of_the_embedded_engine(config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    runs = []
    for engine in (VLLM | {"max_length": 256}, "local"):
        run = tmp_path / str(len(runs))
        Trainer(config=config | {"engine": engine, "output_dir": str(run), "max_steps": 3}).train()
        assert_clean(run)
        runs.append(run)
    theirs, ours = runs
    assert rollouts(theirs) == rollouts(ours)
    assert segments(theirs) == segments(ours)
    assert max(segments(ours)) > 1


@pytest.mark.usefixtures("local_cluster")
def test_samplers_as_ray_actors(config: dict[str, Any]) -> None:
    pytest.importorskip("ray")
    more = {"sync": {"name": "ray", "samplers": 2}, "max_lag": 1, "correction": "truncate"}
    run = Path(config["output_dir"])
    Trainer(config=config | more | {"max_steps": 2}).train()
    Trainer.resume(run, {"max_steps": 4}).train()
    assert_clean(run)
    assert max(segments(run)) > 1
