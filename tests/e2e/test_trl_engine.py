"""Winnow's engine inside TRL: the models and adapters it copies, what TRL corrects, and an interrupt."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from winnow import ConfigError
from winnow.engine.local.engine import LocalEngine
from winnow.integrations import trl_engine
from winnow.integrations.trl import WinnowGRPOTrainer
from winnow.integrations.trl_engine import check_engine, unmerged

from ..builders.trl_runs import Watched, arguments, data, metrics, proven, settings
from ..unit.engine_models import make_model

__all__ = ["arguments", "data"]  # fixtures


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_whose_forward_the_engine_runs(
    adapted: bool, arguments: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    """TRL replaces the forward of the model; that of the engine's copy is its own."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    own = {"model": model, "processing_class": tokenizer, "peft_config": lora if adapted else None}
    trainer = WinnowGRPOTrainer(**arguments | own, engine="local", filter="zero_variance")
    trainer.train()
    rows = metrics(tmp_path / "out")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in rows)


def test_trl_corrects_where_the_engine_rounds(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log-probabilities are off by a constant: the loss has their ratio, by TRL's keys and in its metrics."""
    run_jobs = trl_engine.run_jobs

    def shifted(*given: Any) -> Any:
        groups = run_jobs(*given)
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.sampler_logp = rollout.sampler_logp + np.float32(0.05) * rollout.action_mask
        return groups

    monkeypatch.setattr(trl_engine, "run_jobs", shifted)
    monkeypatch.setattr(LocalEngine, "dtype", "bfloat16")
    norms = []
    for corrects in (False, True):
        how = {"vllm_importance_sampling_correction": corrects, "vllm_importance_sampling_mode": "token_truncate"}
        args = settings(tmp_path / str(corrects), max_steps=1, **how)
        trainer = Watched(**arguments | {"args": args}, engine="local", filter="zero_variance")
        trainer.train()
        log = trainer.state.log_history[0]
        norms.append(log["grad_norm"])
        assert ("importance_sampling_ratio" in trainer.seen[0]) == corrects
        assert not trainer.use_vllm
    assert norms[1] / norms[0] == pytest.approx(exp(-0.05), rel=1e-3)
    assert log["sampling/importance_sampling_ratio/mean"] == pytest.approx(exp(-0.05), rel=1e-3)


def test_a_loss_that_trl_cannot_correct_by_sequences(arguments: dict[str, Any], tmp_path: Path) -> None:
    args = settings(tmp_path / "out", loss_type="vespo")
    with pytest.raises(ConfigError, match="loss_type: vespo needs vllm_importance_sampling_mode 'token_truncate'"):
        WinnowGRPOTrainer(**arguments | {"args": args}, engine={"name": "local", "dtype": "bfloat16"})


PARTIAL: dict[str, Callable[[], Any]] = {
    "use_dora": lambda: LoraConfig(target_modules=["q_proj"], use_dora=True),
    "lora_bias": lambda: LoraConfig(target_modules=["q_proj"], lora_bias=True),
    "modules_to_save": lambda: LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]),
    "trainable_token_indices": lambda: LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]),
    "IA3Config": lambda: IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "tied": lambda: LoraConfig(target_modules=["embed_tokens"]),
}


@pytest.mark.parametrize("what", PARTIAL)
def test_what_the_engine_would_not_get_of_adapters(what: str) -> None:
    assert what in unmerged(get_peft_model(make_model("qwen2-tied"), PARTIAL[what]()))


def test_plain_adapters_are_merged_whole() -> None:
    scaled = LoraConfig(target_modules=["q_proj"], use_rslora=True, bias="all", alpha_pattern={"q_proj": 4})
    assert unmerged(get_peft_model(make_model("qwen2"), scaled)) == ""
    plain = LoraConfig(target_modules=["q_proj"])
    model = get_peft_model(make_model("qwen2"), plain)
    model.add_adapter("ref", plain)  # as TRL does for the KL term
    assert unmerged(model) == ""
    assert "'mine'" in unmerged(get_peft_model(make_model("qwen2"), plain, adapter_name="mine"))


def test_quantized_weights_are_refused() -> None:
    args = SimpleNamespace(use_vllm=False, repetition_penalty=1.0, generation_kwargs=None)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    none = {"tools": None, "environment_factories": None, "rollout_func": None}
    for kind in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
        model = SimpleNamespace(**{kind: True})
        with pytest.raises(ConfigError, match=r"quantization_config: .*the engine needs whole weights"):
            check_engine(SimpleNamespace(args=args, accelerator=accelerator, model=model, **none))


def test_a_resume_after_an_interrupt_of_the_engine(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same trainer, as in a notebook."""
    args = settings(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
    trainer = WinnowGRPOTrainer(**arguments | {"args": args}, engine="local")
    step = LocalEngine._step

    def interrupted(engine: LocalEngine) -> Any:
        if trainer.state.global_step:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(LocalEngine, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.undo()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2
    proven(tmp_path / "out")


def test_metrics_of_an_update_are_those_of_the_batch_that_ends_it(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Two batches an update: the first of each is booked before its optimizer step."""
    args = settings(tmp_path / "out", max_steps=2, steps_per_generation=1, gradient_accumulation_steps=2)
    WinnowGRPOTrainer(**arguments | {"args": args}, engine="local").train()
    assert ["learning_rate" in row for row in metrics(tmp_path / "out")] == [False, True, False, True]
