"""Runs with vLLM: those of the embedded engine, every method on; and what the comparison with the learner catches."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.engine.loading import ModelReference
from winnow.engine.vllm.options import VllmOptions
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError
from winnow.run.standalone import evaluate_model

from .. import parity
from ..builders.vllm_runs import (
    EVERYTHING,
    VLLM,
    config,  # noqa: F401
    rollouts,
    train,
)

pytest.importorskip("vllm")

from vllm.v1.engine.llm_engine import LLMEngine

from winnow.engine.vllm import core as core_module

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

    def keep(model: Any) -> None:
        first.append(model.lm_head.weight.detach().clone())
        model.lm_head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, first[0], bias)

    monkeypatch.setattr("winnow.engine.vllm.core.repack_head", keep)


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


def test_a_second_run_in_a_process_has_an_engine_of_its_own(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the cell of a notebook runs twice: the first engine is closed, its model gone."""
    given = config | {"reward_funcs": [f"{parity.__file__}:parity_reward"]}
    dropped: list[bool] = []
    cleaned = staticmethod(lambda model: dropped.append(model() is not None))
    monkeypatch.setattr(LLMEngine, "_cleanup_instance_caches", cleaned)  # of compiled models: CPUs have none
    first = Trainer(config=given | {"max_steps": 1})
    model = weakref.ref(first.engine._core.runner.model)  # type: ignore[union-attr]
    first.train()
    gc.collect()
    assert model() is None
    assert dropped == [True], "while the model could be found"
    with pytest.raises(RuntimeError, match="the engine is closed; build a new one"):
        first.engine.submit([])  # type: ignore[union-attr]
    Trainer.resume(config["output_dir"], {"max_steps": 2}).train()
    Trainer(config=given | {"max_steps": 1, "output_dir": config["output_dir"] + "-2"}).train()


def test_without_a_length_vllm_takes_what_fits(wide_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(wide_model)
    limit = AutoConfig.from_pretrained(wide_model).max_position_embeddings
    found = []
    for bytes_ in (1 << 26, 1 << 18):
        options = VllmOptions(slots=4, args={"kv_cache_memory_bytes": bytes_})
        engine = options.build(ModelReference(str(wide_model), torch.device("cpu")), tokenizer)
        found.append(engine.sequences.facts.max_length)
        engine.close()
    assert found[0] == limit
    assert 32 <= found[1] < limit


def test_an_engine_that_sleeps_is_woken_before_it_is_closed(wide_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU vLLM would free memory that is not there. A second close does nothing."""
    tokenizer = AutoTokenizer.from_pretrained(wide_model)
    options = VllmOptions(slots=4, max_length=32, args={"kv_cache_memory_bytes": 1 << 24})
    engine: Any = options.build(ModelReference(str(wide_model), torch.device("cpu")), tokenizer)
    core, calls = engine._core, []
    for name in ("sleep", "wake", "_shut_down"):
        real = getattr(core, name)
        monkeypatch.setattr(core, name, lambda *x, name=name, real=real: (calls.append((name, *x)), real(*x)))
    monkeypatch.setattr(engine, "_sleeps", True)
    engine.release()
    engine.close()
    assert calls == [("sleep", 2), ("wake", "weights"), ("wake", "kv_cache"), ("_shut_down",)]
    monkeypatch.setattr(core_module, "cleanup_dist_env_and_memory", lambda: calls.append(("others' groups",)))
    engine.close()
    assert len(calls) == 4


def test_two_engines_that_sleep_are_refused(wide_model: Path) -> None:
    """As where a cell makes a trainer again before the first has trained; vLLM itself would name its allocator only."""
    tokenizer = AutoTokenizer.from_pretrained(wide_model)
    options = VllmOptions(slots=4, max_length=32, args={"kv_cache_memory_bytes": 1 << 24})
    first: Any = options.build(ModelReference(str(wide_model), torch.device("cpu")), tokenizer)
    first._core.sleeps = True
    with pytest.raises(ValueError, match=r"another vLLM engine that can sleep; close\(\) its trainer first"):
        core_module.Core({"enable_sleep_mode": True})
    first.close()
