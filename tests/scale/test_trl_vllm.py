"""TRL's trainer with Winnow's methods while vLLM samples: the same run as with the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from winnow.study.warm_start import WarmStartConfig, warm_start
from winnow.tasks.countdown import CountdownConfig

from ..builders.pruning import PRUNING
from ..builders.trl_runs import PROMPTS, G, Watched, arguments, data, metrics, proven, settings
from ..builders.vllm import SMALL_CACHE

__all__ = ["arguments", "data"]  # fixtures
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the one of all tests, with heads of 32, the least that vLLM computes on a CPU."""
    path = tmp_path_factory.mktemp("wide") / "tiny"
    config = WarmStartConfig(
        max_steps=30, batch_size=32, warmup_steps=5, hidden_size=64, intermediate_size=64, num_layers=2, num_heads=2
    )
    warm_start(CountdownConfig(train_size=64, test_size=16).build(), path, config=config)
    return path


def test_a_gate_prunes_while_vllm_samples(arguments: dict[str, Any], tmp_path: Path) -> None:
    methods = {"gates": [PRUNING], "filter": "zero_variance", "step_scale": "ess", "selector": "greso"}
    by_vllm = {"name": "vllm", "slots": 16, "args": SMALL_CACHE}
    totals = []
    for name, engine in (("vllm", by_vllm), ("local", "local")):
        args = settings(tmp_path / name)
        trainer = Watched(**arguments | {"args": args}, engine=engine, **methods)
        trainer.train()
        totals.append({fate: row | {"seconds": 0} for fate, row in proven(tmp_path / name).items()})
        assert len(trainer.seen) == 4
        assert max(row["sampling/sampling_logp_difference/max"] for row in metrics(tmp_path / name)) < 1e-3
    theirs, ours = totals
    assert theirs["pruned"]["rollouts"] > 0
    assert theirs["trained"]["rollouts"] <= 4 * G * PROMPTS
    assert theirs == ours
