"""Memory of a run on a GPU: predicted, and counted on the pretended device."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.pretend_cuda import PretendCuda
from winnow.base.noise import noise_key
from winnow.base.weights import FiniteWeights, save_tensors
from winnow.config import ConfigError, RunConfig, load_config, name_of, validate
from winnow.engine import LocalEngine, Request, SamplingParams
from winnow.engine.loading import load_tokenizer, load_whole, shell_of
from winnow.engine.local.hf import HFBackend
from winnow.learner import batch
from winnow.learner.local import learner as learner_module
from winnow.learner.local import recompute
from winnow.learner.local.eval_mode import halve_frozen
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.optimizer import saved_state
from winnow.learner.local.reference import frozen_copy
from winnow.learner.rows import Row
from winnow.methods.loss import LossConfig
from winnow.run import budget, engine_choice
from winnow.run.auto_settings import settle
from winnow.run.budget import GIB, Budget, Gpus, Shapes, host_budget
from winnow.run.build import build_learner, build_policy, build_task
from winnow.run.build_adapters import with_lora
from winnow.run.plan import plan_for
from winnow.run.standalone import model_config, opened
from winnow.run.start import Start
from winnow.types import Rollout

from .engine_models import make_model, word_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"
VOCAB = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
QWEN3 = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
REAL: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def qwen3(**changes: Any) -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{"num_hidden_layers": 3} | changes, **SIZES, **QWEN3, head_dim=128)).eval()


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **QWEN3, num_hidden_layers=3)).eval()


def config(**changes: Any) -> RunConfig:
    values = {"model": "m", "env": "countdown", "dtype": "float32", "max_prompt_length": 64, "num_generations": 4}
    values |= {"engine": "local"}
    return validate(values | {"max_completion_length": 64, "prompts_per_step": 4} | changes)


def rows_of(tokens: int, prompt_tokens: int = 8, siblings: int = 1) -> list[Row]:
    """Rows of 128 tokens, prompts among them; so many siblings share one."""
    draws, rows, sampled = random.Random(0), [], 128 - prompt_tokens
    for number in range(tokens // 128):
        ids = np.array([draws.randrange(2, VOCAB) for _ in range(sampled)])
        zeros = np.zeros(sampled)
        first = 5 + number // siblings
        prompt = tuple(range(first, first + prompt_tokens))
        rollout = Rollout(number, prompt, ids, zeros == 0, zeros.astype(np.float32) - 5, zeros.astype(np.int32))
        rows.append(Row(rollout, 1.0, 0.01))
    return rows


BFLOAT16 = {"name": "local", "slots": 4, "dtype": "bfloat16"}


def total(held: Any) -> int:
    return sum(held.values())


UPDATES = [  # the slow ones differ from others in one setting
    (qwen3, {}, True),
    (qwen3, {}, False),
    (llama, {}, False),
    pytest.param(qwen3, {"dtype": "bfloat16"}, True, marks=pytest.mark.slow),
    pytest.param(qwen3, {"dtype": "bfloat16"}, False, marks=pytest.mark.slow),
    (llama, {"dtype": "bfloat16"}, True),
    (qwen3, {"dtype": "bfloat16", "gradient_checkpointing": True}, False),
    pytest.param(qwen3, {"dtype": "bfloat16", "lora": {"r": 8}}, True, marks=pytest.mark.slow),
    pytest.param(
        lambda: qwen3().bfloat16().float(), {"dtype": "bfloat16", "lora": {"r": 8}}, True, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("model", "changes", "recomputed"), UPDATES)
def test_an_update_holds_what_is_predicted(
    model: Any, changes: Any, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth, at the peak of a second update (optimizer state and gradients are there by then)."""
    monkeypatch.setattr(recompute, "WORTH", 0 if recomputed else 10**12)
    monkeypatch.setattr(budget, "WORTH", 0 if recomputed else 10**12)
    tokens = 1024
    c = config(tokens_per_microbatch=tokens, **changes)
    given = model()
    half = all(torch.equal(p.bfloat16().float(), p) for p in given.parameters())
    shapes = replace(Shapes.of(given, c), in_bfloat16=half)
    phases = Budget(c, shapes, 80 * GIB, sampler=False).phases()
    with PretendCuda() as gpu:
        policy = model().to("cuda")
        if c.lora is not None:
            policy = with_lora(policy, c, None, None, word_tokenizer(VOCAB)).model
        options = LearnerOptions(
            tokens_per_microbatch=tokens,
            compute_dtype=getattr(torch, c.dtype),
            gradient_checkpointing=c.gradient_checkpointing is True,
        )
        if half and c.lora is not None:
            halve_frozen(policy)
        learner = LocalLearner(policy, TokenDistribution(VOCAB), options)
        del policy
        rows = rows_of(tokens)
        for _ in range(2):
            gc.collect()
            gpu.reset_peak()
            learner.accumulate(rows, LossConfig(), 0)
            learner.apply(1e-4)
        assert total(phases["update"]) == pytest.approx(gpu.peak_bytes, rel=0.1), phases["update"]
        assert shapes.trained == sum(p.numel() for p in learner.model.parameters() if p.requires_grad)


def test_an_update_with_shared_prompts_holds_no_more_than_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys and values are kept in every row, which counts as tokens of the micro-batch."""
    monkeypatch.setattr(recompute, "WORTH", 0)
    monkeypatch.setattr(budget, "WORTH", 0)
    monkeypatch.setattr(batch, "PASS_TOKENS_CUDA", 256)
    c = config(tokens_per_microbatch=2048, dtype="bfloat16")
    rows = rows_of(4096, prompt_tokens=112, siblings=16)
    with PretendCuda() as gpu:
        given = qwen3(num_hidden_layers=8)
        predicted = Budget(c, Shapes.of(given, c), 80 * GIB, sampler=False).phases()["update"]
        options = LearnerOptions(tokens_per_microbatch=2048, compute_dtype=torch.bfloat16)
        learner = LocalLearner(given.to("cuda"), TokenDistribution(VOCAB), options)
        assert all(part.shared is not None for part in batch.micro_batches(rows, learner._budget, pad_id=0))
        for _ in range(2):
            gc.collect()
            gpu.reset_peak()
            learner.accumulate(rows, LossConfig(), 0)
            learner.apply(1e-4)
    assert 0.7 * total(predicted) < gpu.peak_bytes < 1.1 * total(predicted), predicted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_publish_under_lora_holds_what_is_predicted(dtype: str) -> None:
    """Merged weights go into the engine a layer at a time, and are looked at one by one before."""
    c = config(engine={"name": "local", "slots": 4, "dtype": dtype}, dtype=dtype, lora={"r": 8})
    shapes = replace(Shapes.of(qwen3(num_hidden_layers=12), c), in_bfloat16=dtype == "bfloat16")
    predicted = Budget(c, shapes, 80 * GIB).phases()["publish"]
    with PretendCuda() as gpu:
        base = qwen3(num_hidden_layers=12).bfloat16().float().to("cuda")
        engine = LocalEngine(base, word_tokenizer(VOCAB), slots=4, max_length=128, dtype=dtype, device="cuda")
        policy = with_lora(base, c, None, None, word_tokenizer(VOCAB)).model
        if dtype == "bfloat16":
            halve_frozen(policy)
        options = LearnerOptions(compute_dtype=getattr(torch, dtype))
        learner = LocalLearner(policy, TokenDistribution(VOCAB), options)
        del base, policy
        learner.accumulate(rows_of(256), LossConfig(), 0)
        learner.apply(1e-4)
        engine.release()
        gc.collect()
        gpu.reset_peak()
        engine.load_weights(FiniteWeights(learner.weights()), 1)
        assert not gpu.mixed
        assert total(predicted) == pytest.approx(gpu.peak_bytes, rel=0.1), predicted


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_generation_holds_what_is_predicted(dtype: str) -> None:
    slots, prompt, completion = 64, 64, 64
    c = config(
        engine={"name": "local", "slots": slots, "dtype": dtype},
        prompts_per_step=slots // 4,
        max_prompt_length=prompt,
        max_completion_length=completion,
    )
    predicted = Budget(c, Shapes.of(qwen3(), c), 80 * GIB, learner=False).phases()["generation"]
    with PretendCuda() as gpu:
        engine = LocalEngine(qwen3(), word_tokenizer(VOCAB), slots=slots, dtype=dtype, device="cuda")
        gc.collect()
        gpu.reset_peak()
        for i in range(slots):
            ids = tuple(2 + (i // 4 + j) % 500 for j in range(prompt))
            engine.submit([Request(i, ids, SamplingParams(completion), noise_key(0, i))])
        while engine.pending:
            engine.step()
        assert total(predicted) == pytest.approx(gpu.peak_bytes, rel=0.1), predicted


def shell(tmp_path: Path, name: str) -> str:
    sizes = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960, "vocab_size": 151_936}
    tied = name in ("0.6B", "1.7B", "4B")
    Qwen3Config(**REAL[name], **sizes, tie_word_embeddings=tied, dtype="bfloat16").save_pretrained(tmp_path / name)
    path = tmp_path / name / "config.json"
    path.write_text(path.read_text().replace('"model_type"', '"architectures": ["Qwen3ForCausalLM"], "model_type"'))
    return str(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "gpu", "changes"),
    [
        ("0.6B", "24GiB", {}),
        ("1.7B", "24GiB", {"lora": {"r": 16}}),
        ("1.7B", "80GiB", {}),
        ("4B", "80GiB", {"lora": {"r": 16}}),
        ("4B", "2x80GiB", {}),
    ],
)
def test_runs_that_fit_are_planned(tmp_path: Path, name: str, gpu: str, changes: Any) -> None:
    c = config(
        **{"model": shell(tmp_path, name), "dtype": "auto", "max_prompt_length": 512, "max_completion_length": 1024}
        | {"prompts_per_step": 32, "num_generations": 8}
        | changes
    )
    found = plan_for(c, Gpus.parsed(gpu))
    for phases in found["memory_gib"].values():
        assert max(sum(held.values()) for held in phases.values()) <= found["gib_of_each"]
    assert found["tokens_per_microbatch"] >= 256


@pytest.mark.parametrize(
    ("name", "gpu", "lora"),
    [("0.6B", "24GiB", None), ("1.7B", "24GiB", {"r": 16}), ("4B", "24GiB", {"r": 16}), ("4B", "80GiB", None)],
)
def test_what_fits_beside_vllm_that_sleeps(
    tmp_path: Path, name: str, gpu: str, lora: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TRL fits them in one process; `engine: auto` is vLLM where it is installed."""
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: name)
    values = {"model": shell(tmp_path, name), "dtype": "auto", "engine": "auto", "lora": lora}
    c = config(**values, max_prompt_length=512, max_completion_length=1024, prompts_per_step=32, num_generations=8)
    found = plan_for(c, Gpus.parsed(gpu))
    phases = found["memory_gib"]["GPU"]
    assert name_of(found["engine"]) == "vllm"
    assert "vLLM asleep" in phases["update"]
    assert found["tokens_per_microbatch"] >= 1536
    if (name, lora) == ("4B", None):  # at no share of the memory
        awake = {"name": "vllm", "sleep": False, "gpu_memory_utilization": 0.2}
        with pytest.raises(ConfigError, match="device: the update phase"):
            plan_for(c.model_copy(update={"engine": awake}), Gpus.parsed(gpu))


@pytest.mark.parametrize(
    ("recipe", "name", "gpu"),
    [
        ("gsm8k-qwen3", "0.6B", "24GiB"),
        ("gsm8k-qwen3-80gb", "4B", "80GiB"),
        ("gsm8k-qwen3-2gpus", "1.7B", "2x24GiB"),
        ("gsm8k-qwen3-8gpus", "8B", "8x80GiB"),
    ],
)
def test_recipes_fit_the_gpus_that_they_name(tmp_path: Path, recipe: str, name: str, gpu: str) -> None:
    path = RECIPES / f"{recipe}.yaml"
    assert f"{path.name} --dry-run --gpu {gpu}" in path.read_text()
    assert load_config(path).model == f"Qwen/Qwen3-{name}"
    found = plan_for(load_config(path, [f"model={shell(tmp_path, name)}"]), Gpus.parsed(gpu))
    assert found["dtype"] == "bfloat16"
    assert found["tokens_per_microbatch"] >= 1536, "a whole row"


def test_ranks_cut_what_one_gpu_cannot_hold(tmp_path: Path) -> None:
    c = config(model=shell(tmp_path, "8B"), dtype="bfloat16", learner={"name": "fsdp", "ranks": 4})
    shapes = Shapes.of(shell_of(c.model), c)
    parts = {
        name: Budget(c, shapes, 80 * GIB, sampler=False).phases()["update"][name] for name in ("weights", "optimizer")
    }
    assert parts == {"weights": shapes.parameters, "optimizer": 2 * shapes.parameters}
    with pytest.raises(ConfigError, match="device: the update phase needs"):
        plan_for(config(model=c.model, dtype="bfloat16"), Gpus.parsed("8x80GiB"))


@pytest.mark.parametrize(
    ("name", "gpu", "key"), [("1.7B", "24GiB", "lora"), ("8B", "40GiB", "lora"), ("8B", "80GiB", "adamw_torch_8bit")]
)
def test_one_that_cannot_fit_is_refused_with_the_key(tmp_path: Path, name: str, gpu: str, key: str) -> None:
    c = config(model=shell(tmp_path, name), dtype="bfloat16", max_completion_length=1024)
    with pytest.raises(ConfigError, match=rf"device: the update phase needs .*{key}"):
        plan_for(c, Gpus.parsed(gpu))


def test_keys_and_values_are_reserved_by_memory(tmp_path: Path) -> None:
    """256 rollouts of 1,024 tokens need 36 GB of keys and values in float32; a card of 24 GiB queues them."""
    c = config(model=shell(tmp_path, "0.6B"), dtype="bfloat16", prompts_per_step=32, num_generations=8)
    c = c.model_copy(update={"max_completion_length": 1024, "max_prompt_length": 512})
    found = plan_for(c, Gpus.parsed("24GiB"))
    assert 16 <= found["engine"]["slots"] < 256
    assert "slots" not in plan_for(c, Gpus.parsed("80GiB"))["engine"]


def test_a_class_whose_activations_are_not_computed_again_needs_more() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32_000}
    with torch.device("meta"):
        again, kept = LlamaForCausalLM(LlamaConfig(**sizes)), Phi3ForCausalLM(Phi3Config(**sizes, pad_token_id=0))
    c = config()
    shapes = Shapes.of(again, c)
    assert (shapes.recomputes, Shapes.of(kept, c).recomputes) == (True, False)
    without = Budget(c, replace(shapes, recomputes=False), GIB)
    assert without._activations() > 1.2 * Budget(c, shapes, GIB)._activations()


def test_what_was_chosen_by_the_user_stays() -> None:
    c = config(tokens_per_microbatch=1000, gradient_checkpointing=False)
    shapes = Shapes.of(qwen3(), c)
    assert Budget(c, shapes, 80 * GIB).fitted() == {}
    with pytest.raises(ConfigError, match="device: the update phase needs"):
        Budget(c, shapes, 1 << 20).require_room()


@pytest.mark.parametrize("text", ["24", "x24GiB", "0x24GiB", "24 MiB", ""])
def test_gpus_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpu: cannot read"):
        Gpus.parsed(text)


@pytest.mark.parametrize(("text", "count", "memory"), [("24GiB", 1, 24 * GIB), ("2x80gb", 2, 80 * 10**9)])
def test_gpus_by_text(text: str, count: int, memory: int) -> None:
    assert Gpus.parsed(text) == Gpus(count, memory)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "qwen2-tied", "qwen3"])
def test_an_engine_holds_its_weights_once_and_gives_them_back(name: str) -> None:
    """Cast on their way to the device; loaded anew without a second set; of every class, released for the update."""
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
    with PretendCuda() as gpu, model_config(str(tmp_path), values) as (c, _), opened(c, build_task(c.env)) as parts:
        gc.collect()
        weights = Budget(c, Shapes.of(model, c), GIB, learner=False).phases()["publish"]["engine weights"]
        assert 0.5 * weights < gpu.bytes < 1.2 * weights
        assert {p.device.type for p in parts[0].model.parameters()} == {"cpu"}
        assert not gpu.mixed, gpu.report()


def test_an_evaluation_is_budgeted_without_a_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8B fits 24 GiB for that, with vLLM's share of an engine alone; a run of the same model does not."""
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: name)
    c = config(model=shell(tmp_path, "8B"), dtype="auto", engine="auto", device="cuda", max_completion_length=1024)
    with PretendCuda(memory=24 * GIB):
        settled = settle(c, Start.of(c), alone=True).config
        with pytest.raises(ConfigError, match="device: the update phase needs"):
            settle(c, Start.of(c))
        c = c.model_copy(update={"model": shell(tmp_path, "1.7B"), "max_completion_length": 8192})
        with pytest.raises(ConfigError, match=r"generation phase needs .*\); lower engine\.slots or max_completion"):
            settle(c.model_copy(update={"engine": "local", "max_prompt_length": 300_000}), Start.of(c), alone=True)
    assert name_of(settled.engine) == "vllm"
    assert engine_choice.engine_options(settled, alone=True).gpu_memory_utilization == 0.9


def test_a_base_that_ends_in_bfloat16_starts_in_it(tmp_path: Path, tiny_model: Path) -> None:
    """The most that the start of a run with LoRA takes of the GPU is what a publish takes."""
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.save_pretrained(tmp_path)
    sizes = {**QWEN3, "vocab_size": len(tokenizer), "num_hidden_layers": 24, "head_dim": 128}
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | sizes, max_position_embeddings=256)).bfloat16()
    model.save_pretrained(tmp_path)
    c = config(model=str(tmp_path), device="cuda", dtype="bfloat16", lora={"r": 4}, engine=BFLOAT16)
    with PretendCuda() as gpu:
        policy, engine = build_policy(c, Start.of(c))
        learner = build_learner(policy, c)
        assert engine is not None
        predicted = Budget(c, Shapes.of(model, c), 80 * GIB).phases()["publish"]
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
    for module in (learner_module, budget):
        monkeypatch.setattr(module, "FILE_BYTES", 3 << 20)
    c = config(**changes)
    with PretendCuda() as gpu:
        model = qwen3().to("cuda")
        predicted = host_budget(c, Shapes.of(model, c))
        reference = frozen_copy(model) if c.keeps_reference else None
        if c.lora is not None:
            model = with_lora(model, c, None, None, word_tokenizer(VOCAB)).model
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
        expected = saved_state(learner._optimizer, learner._params)
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
