"""Runs with vLLM: those of the embedded engine, every method on; and what the comparison with the learner catches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow.base.errors import ConfigError
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError
from winnow.run.standalone import evaluate_model

from ..builders.vllm_runs import (
    EVERYTHING,
    VLLM,
    config,  # noqa: F401
    rollouts,
    train,
)

pytest.importorskip("vllm")


IN_PARTS = {"group_size": {"name": "sequential", "probe": 2, "hard_size": 6}, "num_generations": 4}
POSTERIORS = {"selector": "bayes", "group_size": "allocate", "num_generations": 4}
DRAWS = {"selector": "thompson", "filter": "zero_variance", "rollout_batch": "adaptive", "max_lag": 1}


@pytest.mark.parametrize(
    "methods",
    [{}, EVERYTHING, IN_PARTS, POSTERIORS, DRAWS],
    ids=["plain", "everything", "in parts", "posteriors", "draws"],
)
def test_a_run_is_that_of_the_embedded_engine(config: dict[str, Any], tmp_path: Path, methods: dict[str, Any]) -> None:
    """Up to rounding, which in so few steps turns no token."""
    theirs = train(config | methods)
    ours = train(config | methods | {"engine": "local", "output_dir": str(tmp_path / "local")})
    assert rollouts(theirs) == rollouts(ours)
    for run in (theirs, ours):
        with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
            proof = ledger.verify()
            assert proof.ok, proof.problems
    last = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in (theirs, ours)]
    assert last[0]["updated"] == 1
    for name in ("loss", "grad_norm", "sampling/kl", "reward"):
        assert last[0][name] == pytest.approx(last[1][name], abs=1e-3)
    found = evaluate_model(str(theirs), {"eval_generations": 1, "eval_prompts": 2})  # by vLLM, which loads the model
    assert found["prompts"] == 2
    assert found["failed"] == 0


def test_samplers_with_vllm(config: dict[str, Any]) -> None:
    """Each process has an engine of its own; gates are asked there, and evaluations run there."""
    gated = {"gates": [{"name": "arrol", "at": 4, "cold_start": 1}], "correction": "truncate"}
    run = train(config | gated | {"sync": {"name": "processes", "samplers": 1}, "max_lag": 1})
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
        assert ledger.totals()["pruned"]["rollouts"] > 0
    assert "eval/pass@1" in (run / "metrics.jsonl").read_text()


def stale_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's packed copies for some processors do."""
    first: list[torch.Tensor] = []

    def keep(model: Any, facts: Any) -> None:
        first.append(model.lm_head.weight.detach().clone())
        model.lm_head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, first[0], bias)

    monkeypatch.setattr("winnow.engine.vllm.core._retie", keep)


def stale_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    from winnow.engine.vllm import core

    prompt = core.TokensPrompt
    monkeypatch.setattr(core, "TokensPrompt", lambda cache_salt, **rest: prompt(cache_salt="0", **rest))


@pytest.mark.parametrize("cause", [stale_head, stale_prefixes])
def test_what_keeps_old_weights_shows_after_the_first_update(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Any
) -> None:
    cause(monkeypatch)
    prompts = [{"prompt": " ".join(str(1 + (n + i) % 9) for i in range(40))} for n in range(12)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    options = {"env": {"name": "dataset", "path": str(tmp_path / "long.jsonl")}, "max_prompt_length": 48}
    options |= {"learning_rate": 0.1, "warmup_steps": 0, "eval_steps": None}
    with pytest.raises(RunStoppedError, match=r"step 1: engine: its log-probabilities are not the learner's"):
        train(config | options)
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok


def test_another_type_than_the_engine_says_is_refused(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from winnow.engine.vllm.engine import VllmEngine

    monkeypatch.setattr(VllmEngine, "dtype", "float32")
    with pytest.raises(ConfigError, match="its log-probabilities are not the learner's"):
        train(config | {"engine": VLLM | {"dtype": "bfloat16"}})
