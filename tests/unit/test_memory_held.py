"""Weights that engines, evaluations and checkpoints hold, counted on the pretended device and on the host."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Phi3Config, Phi3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.pretend_cuda import PretendCuda
from winnow.base.errors import ConfigError
from winnow.base.machine import heap_frozen
from winnow.base.weights import save_tensors
from winnow.config.options import name_of
from winnow.engine import LocalEngine, Request, SamplingParams
from winnow.engine.loading import load_tokenizer, load_whole
from winnow.engine.local.hf import HFBackend
from winnow.learner.adapters import adapted
from winnow.learner.local import learner as learner_module
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.optimizer import saved_state
from winnow.learner.local.reference import frozen_copy
from winnow.methods.loss import LossConfig
from winnow.run import budget as budget_module
from winnow.run.budget import GIB, Shapes, host_budget
from winnow.run.build import build_learner, build_policy
from winnow.run.inputs import build_task
from winnow.run.standalone import model_config, opened

from ..builders.budgets import BFLOAT16, QWEN3, SIZES, VOCAB, config, qwen3, rows_of, shell, total
from ..builders.resolving import budget, resolved
from .engine_models import make_model, word_tokenizer


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "qwen2-tied", "qwen3"])
def test_an_engine_holds_its_weights_once_and_gives_them_back(name: str) -> None:
    """Cast on their way to the device; loaded again without a second set; of every class, released for the update."""
    model = make_model(name, vocab_size=3000)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with PretendCuda() as gpu:
        engine = LocalEngine(model, word_tokenizer(VOCAB), dtype="bfloat16", device="cuda")
        gc.collect()
        held, float32 = gpu.bytes, sum(4 * p.numel() for p in model.parameters())
        assert gpu.peak_bytes < float32 + 2**20
        engine.submit([Request(0, (2, 3), SamplingParams(4), 0)])
        engine.step()
        gc.collect()
        gpu.reset_peak()
        before = gpu.bytes
        engine.load_weights(state, 1)
        assert gpu.peak_bytes < before + 0.5 * held, "not both"
        while engine.pending:
            engine.step()
        engine.release()
        gc.collect()
        assert gpu.bytes < 0.2 * held
        engine.load_weights(state, 2)
        engine.submit([Request(0, (2, 3), SamplingParams(4), 0)])
        while engine.pending:
            engine.step()
        assert not gpu.mixed, gpu.report()


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_an_evaluation_keeps_no_model_next_to_its_engine(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """And sizes the engine as one without a learner."""
    vocab = len(load_tokenizer(tiny_model))
    load_tokenizer(tiny_model).save_pretrained(tmp_path)
    model = make_model(name, vocab_size=vocab, hidden_size=256, max_position_embeddings=128)
    model.save_pretrained(tmp_path)
    sizes = {"max_prompt_length": 16, "max_completion_length": 8, "eval_prompts": 2, "eval_generations": 1}
    values = {"env": {"name": "countdown", "train_size": 24, "test_size": 8}, "device": "cuda"} | sizes
    with ExitStack() as stack:
        gpu = stack.enter_context(PretendCuda())
        c, *_ = stack.enter_context(model_config(str(tmp_path), values))
        task = build_task(c.env)
        parts = stack.enter_context(opened(c, task, task.test))
        gc.collect()
        weights = budget(c, Shapes.from_model(model, c.lora), GIB, learner=False).phases()["publish"]["engine weights"]
        assert 0.5 * weights < gpu.bytes < 1.2 * weights
        assert {p.device.type for p in parts[0].model.parameters()} == {"cpu"}
        assert not gpu.mixed, gpu.report()


def test_an_evaluation_is_budgeted_without_a_learner(tmp_path: Path) -> None:
    """8B fits 24 GiB for that, with vLLM's share of an engine alone; a run of the same model does not."""
    c = config(model=shell(tmp_path, "8B"), dtype="auto", engine="auto", device="cuda", max_completion_length=1024)
    with PretendCuda(memory=24 * GIB):
        alone = resolved(c, alone=True, no_vllm="")
        with pytest.raises(ConfigError, match="device: the update phase needs"):
            resolved(c, no_vllm="")
        c = c.model_copy(update={"model": shell(tmp_path, "1.7B"), "max_completion_length": 8192})
        with pytest.raises(ConfigError, match=r"generation phase needs .*\); lower engine\.slots or max_completion"):
            resolved(c.model_copy(update={"engine": "local", "max_prompt_length": 300_000}), alone=True)
    assert name_of(alone.config.engine) == "vllm"
    assert alone.engine.gpu_memory_utilization == 0.9


def test_a_base_that_ends_in_bfloat16_starts_in_it(tmp_path: Path, tiny_model: Path) -> None:
    """The most that the start of a run with LoRA takes of the GPU is what a publish takes."""
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.save_pretrained(tmp_path)
    sizes = {**QWEN3, "vocab_size": len(tokenizer), "num_hidden_layers": 24, "head_dim": 128}
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | sizes, max_position_embeddings=256)).bfloat16()
    model.save_pretrained(tmp_path)
    c = config(model=str(tmp_path), device="cuda", dtype="bfloat16", lora={"r": 4}, engine=BFLOAT16)
    with PretendCuda() as gpu:
        policy, engine = build_policy(resolved(c))
        learner = build_learner(policy, resolved(c))
        assert engine is not None
        predicted = budget(c, Shapes.from_model(model, c.lora), 80 * GIB).phases()["publish"]
        assert gpu.peak_bytes < 1.05 * total(predicted), predicted
        assert gpu.peak_bytes < 4 * sum(p.numel() for p in model.parameters()) + predicted["engine weights"]
        assert not gpu.mixed, gpu.report()
        assert learner.device.type == "cuda"


def test_late_positions_are_turned_as_in_float32() -> None:
    """Rotary frequencies of bfloat16 double the error of log-probabilities after a thousand tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = Phi3ForCausalLM(Phi3Config(**SIZES | sizes, num_key_value_heads=1, max_position_embeddings=2048)).eval()
    backend = HFBackend(model, vocab_size=VOCAB, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert backend._model.model.rotary_emb.inv_freq.equal(model.model.rotary_emb.inv_freq)
    assert {p.dtype for p in backend._model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("changes", [{}, {"beta": 0.1}, {"lora": {"r": 4}}])
def test_a_checkpoint_holds_a_file_at_a_time_on_the_host(
    changes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer and a reference tensor by tensor. A resume finds the same; the export is made on the host, too."""
    for module in (learner_module, budget_module):
        monkeypatch.setattr(module, "FILE_BYTES", 3 << 20)
    c = config(**changes)
    with PretendCuda() as gpu:
        model = qwen3().to("cuda")
        predicted = host_budget(c, Shapes.from_model(model, c.lora), None, behind=0)
        reference = frozen_copy(model) if c.keeps_reference else None
        if c.lora is not None:
            model = adapted(model, c.lora, None, None, word_tokenizer(VOCAB), keep_reference=False).model
        learner = LocalLearner(model, TokenDistribution(VOCAB), LearnerOptions(), reference)
        learner.accumulate(rows_of(256), LossConfig(), 0)
        learner.apply(1e-3)
        if reference is not None:
            learner.sync_reference(0.5)
        gc.collect()
        gpu.reset_peak()
        learner.save(tmp_path)
        most = max(total(predicted["checkpoint"]), 1 << 20)  # an adapter, which is small
        assert 0 < gpu.peak_host_bytes - gpu.host_bytes < 1.1 * most
        saved = load_file(tmp_path / "optimizer.safetensors")
        expected = saved_state(learner.optimizer, learner._params)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name].cpu()) for name in saved)
        gc.collect()
        gpu.reset_peak()
        learner.export(tmp_path / "model")
        assert gpu.peak_bytes < gpu.bytes + 3 * 2**20, "a matrix of 0.8 MB, merged"
        assert gpu.peak_host_bytes - gpu.host_bytes < 1.1 * total(predicted["export"])
    if c.lora is None:
        loaded = load_whole(tmp_path / "model", torch.device("cpu")).state_dict()
        assert all(torch.equal(loaded[name], tensor.cpu()) for name, tensor in learner.model.state_dict().items())


def test_tensors_are_saved_as_safetensors_saves_them(tmp_path: Path) -> None:
    """Byte for byte, of all types, sizes and strides."""
    floats = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
    tensors = {f"{kind}.weight": torch.randn(5, 3).to(kind) for kind in floats}
    tensors |= {
        f"{kind}:step": torch.tensor(3).to(kind) for kind in (torch.int64, torch.int32, torch.uint8, torch.int8)
    }
    tensors |= {"mask": torch.ones(7, dtype=torch.bool), "none": torch.empty(0, 4), "größe": torch.ones(2)}
    save_file(tensors, tmp_path / "theirs")
    save_tensors({**tensors, "mask": torch.ones(7, 2, dtype=torch.bool)[:, 0]}, tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_heap_that_the_caller_has_frozen_stays_frozen() -> None:
    frozen = gc.get_freeze_count()
    assert frozen, "conftest.py froze it"
    with heap_frozen():
        assert gc.get_freeze_count() == frozen
    assert gc.get_freeze_count() == frozen


def test_a_heap_is_frozen_only_as_long_as_asked() -> None:
    """In a process of its own: to unfreeze is to unfreeze everything."""
    lines = [
        "import gc",
        "from winnow.base.machine import heap_frozen",
        "with heap_frozen():",
        "    assert gc.get_freeze_count() > 1000",
        "assert gc.get_freeze_count() == 0",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=60)
