"""Adapters alone, over a vLLM that keeps its model: the tokens and log-probabilities of the model with them merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.config.options import LoraConfig
from winnow.engine import Finished, ModelReference
from winnow.engine.vllm.options import VllmOptions
from winnow.learner.local.merged import MergedWeights
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError
from winnow.run.standalone import evaluate_model

from ..builders.vllm import SMALL_CACHE, WIDE, assert_same, play, requests
from ..builders.vllm_lora import (
    Parts,
    assert_adapters_change_between_steps,
    parts,  # noqa: F401
)
from ..builders.vllm_runs import EVERYTHING, VLLM, rollouts, train
from ..unit.engine_models import make_model, word_tokenizer

pytest.importorskip("vllm")


def test_adapters_between_two_steps(parts: Parts) -> None:
    """Running sequences go on with the new ones, and no prefix is stale."""
    assert_adapters_change_between_steps(parts)


def test_log_probabilities_are_those_of_the_model_with_adapters(parts: Parts) -> None:
    plain = [r for r in requests(300) if r.params.temperature in (0.0, 1.0) and not r.params.top_k]
    plain = [r for r in plain if r.params.temperature == 0 or r.params.top_p == 1]
    seen = []
    for seed in (3, 4):
        parts.draw(seed)
        parts.load(parts.theirs, seed)
        found = [e for e in play(parts.theirs, plain).values() if isinstance(e, Finished)]
        assert len(found) == len(plain) > 3
        for event, request in zip(sorted(found, key=lambda e: e.id), plain, strict=True):
            expected = parts.logp(request.prompt_ids, event.token_ids)
            np.testing.assert_allclose(event.logp, expected, rtol=0, atol=1e-4)
        seen.append({e.id: tuple(e.token_ids) for e in found})
    assert seen[0] != seen[1]


def test_weights_that_are_no_such_adapters_are_refused(parts: Parts) -> None:
    state = parts.draw(5)
    parts.load(parts.theirs, 5)
    before = play(parts.theirs, requests(400))
    name = next(iter(state))
    for broken, message in (
        (MergedWeights(parts.adapted.get_base_model()), "pass the adapters of lora alone"),
        ({k: v for k, v in state.items() if k != name}, "missing"),
        (state | {name: state[name] * torch.nan}, "not finite"),
        (state | {name: state[name][:-1]}, "has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            parts.theirs.load_weights(broken, 6)
    assert parts.theirs.version == 5
    assert_same(play(parts.theirs, requests(400)), before)


def test_a_module_that_vllm_does_not_have_is_refused_by_name(parts: Parts, tmp_path: Path) -> None:
    from winnow.engine.vllm.adapters import Adapters, AdapterSlot

    other = Adapters({"model.layers.0.mlp.router.lora_A.weight": torch.Size([4, 128])}, 4, 1.0)
    with pytest.raises(ValueError, match=r"received \['model.layers.0.mlp.router'\].*; leave that out"):
        AdapterSlot(parts.theirs._core._llm, other, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["embed_tokens"]}, "its LoRA has no place for embed_tokens; leave that out"),
        ({"target_modules": ["x"]}, "'x'"),
        ({"r": 1000}, "its LoRA has no rank 1000; set lora.r to 512 or less"),
    ],
)
def test_adapters_that_vllm_has_no_place_for_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    make_model("qwen3", **WIDE).save_pretrained(tmp_path)
    reference = ModelReference(str(tmp_path), torch.device("cpu"), adapters=LoraConfig(merge=False, **changes))
    with pytest.raises(ConfigError, match=message):
        VllmOptions(args=SMALL_CACHE).build(reference, word_tokenizer())


# ---------------------------------------------------------------- runs


@pytest.fixture
def config(tiny_config: dict[str, Any], wide_model: Path) -> dict[str, Any]:
    lora = {"lora": {"r": 4, "merge": False}, "learning_rate": 0.01}
    return tiny_config | lora | {"model": str(wide_model), "max_steps": 3, "engine": VLLM}


def last_metrics(run: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return found


def assert_clean(run: Path) -> None:
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
        assert proof.ok, proof.problems
        assert ledger.totals()["trained"]["rollouts"] > 0


def test_a_run_is_that_with_merged_weights(config: dict[str, Any], tmp_path: Path) -> None:
    """Up to rounding, with every method on and lag; it can be resumed, and what it leaves is a whole model."""
    alone = train(config | EVERYTHING)
    merged = config | EVERYTHING | {"lora": {"r": 4}, "engine": "local", "output_dir": str(tmp_path / "merged")}
    whole = train(merged)
    assert rollouts(alone) == rollouts(whole)
    assert_clean(alone)
    theirs, ours = last_metrics(alone), last_metrics(whole)
    assert ours["updated"] == 1
    for name in ("loss", "grad_norm", "sampling/kl", "reward"):
        assert theirs[name] == pytest.approx(ours[name], abs=1e-3)
    Trainer.resume(alone, {"max_steps": 4}).train()
    assert_clean(alone)
    found = evaluate_model(str(alone), {"engine": "local", "eval_generations": 1, "eval_prompts": 2})
    assert found["failed"] == 0


def test_an_adapter_that_stays_as_it_was_shows_after_the_first_update(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from winnow.engine.vllm.adapters import AdapterSlot

    load, loaded = AdapterSlot.load, []

    def once(slot: AdapterSlot, state: Any) -> None:
        if not loaded:
            load(slot, state)
        loaded.append(state)

    monkeypatch.setattr(AdapterSlot, "load", once)
    with pytest.raises(RunStoppedError, match=r"step 1: engine: its log-probabilities are not the learner's"):
        train(config | {"learning_rate": 0.3, "eval_steps": None})
    assert len(loaded) > 2


@pytest.mark.slow
def test_samplers_in_processes(config: dict[str, Any]) -> None:
    """Adapters go through files, and nothing else does."""
    options = {"sync": {"name": "processes", "samplers": 1}, "max_lag": 1, "correction": "truncate"}
    assert_clean(train(config | options))


@pytest.mark.slow
@pytest.mark.usefixtures("local_cluster")
def test_samplers_and_ranks_of_a_cluster(config: dict[str, Any]) -> None:
    """Adapters are put together from two ranks, and go through Ray's store."""
    options = {"sync": {"name": "ray", "samplers": 1}, "learner": {"name": "fsdp", "ranks": 2}, "max_lag": 1}
    run = train(config | options | {"correction": "truncate"})
    assert_clean(run)
    assert (run / "model" / "config.json").is_file()


@pytest.mark.slow
def test_samplers_elsewhere_refuse_by_name_what_vllm_cannot_do(config: dict[str, Any]) -> None:
    options = {"sync": {"name": "processes", "samplers": 1}, "max_lag": 1, "correction": "truncate"}
    with pytest.raises(ConfigError, match="its LoRA has no rank 1000; set lora"):
        train(config | options | {"lora": {"r": 1000, "merge": False}})
