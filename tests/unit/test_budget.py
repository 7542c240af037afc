"""Memory of a run on a GPU: predicted, and counted on the pretended device."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, Phi3Config, Phi3ForCausalLM

from tests.pretend_cuda import PretendCuda
from winnow.base.errors import ConfigError
from winnow.base.noise import noise_key
from winnow.base.weights import FiniteWeights
from winnow.config import load_config
from winnow.config.options import name_of
from winnow.engine import LocalEngine, Request, SamplingParams
from winnow.engine.loading import build_meta_model
from winnow.learner import batch
from winnow.learner.adapters import adapted
from winnow.learner.local import recompute
from winnow.learner.local.eval_mode import halve_frozen
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.methods.loss import LossConfig
from winnow.run import budget as budget_module
from winnow.run import resolved as resolved_module
from winnow.run.budget import GIB, Gpus, Shapes, host_budget
from winnow.run.plan import plan_for

from ..builders.budgets import QWEN3, RECIPES, SIZES, UPDATES, VOCAB, config, qwen3, rows_of, shell, total
from ..builders.resolving import budget, resolved
from .engine_models import word_tokenizer

ELSEWHERE: dict[str, Any] = {"sync": {"name": "processes", "devices": ["cuda:1"]}, "max_lag": 1}


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(("model", "changes", "recomputed"), UPDATES)
def test_an_update_holds_what_is_predicted(
    model: Any, changes: Any, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth, at the peak of a second update (optimizer state and gradients are there by then)."""
    monkeypatch.setattr(recompute, "WORTH", 0 if recomputed else 10**12)
    monkeypatch.setattr(budget_module, "WORTH", 0 if recomputed else 10**12)
    tokens = 1024
    c = config(tokens_per_microbatch=tokens, **changes)
    given = model()
    half = all(torch.equal(p.bfloat16().float(), p) for p in given.parameters())
    shapes = replace(Shapes.from_model(given, c.lora), in_bfloat16=half)
    predicted = budget(c, shapes, 80 * GIB, sampler=False).phases()["update"]
    del predicted["mask of prefix trees"]  # the rows have nothing in common
    with PretendCuda() as gpu:
        policy = model().to("cuda")
        if c.lora is not None:
            policy = adapted(policy, c.lora, None, None, word_tokenizer(VOCAB), keep_reference=False).model
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
        assert total(predicted) == pytest.approx(gpu.peak_bytes, rel=0.1), predicted
        assert shapes.trained == sum(p.numel() for p in learner.model.parameters() if p.requires_grad)


@pytest.mark.slow
def test_an_update_with_shared_prompts_holds_no_more_than_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "WORTH", 0)
    monkeypatch.setattr(budget_module, "WORTH", 0)
    monkeypatch.setattr(batch, "PASS_TOKENS_CUDA", 256)
    c = config(tokens_per_microbatch=2048, dtype="bfloat16")
    rows = rows_of(16_384, prompt_tokens=112, siblings=16)
    with PretendCuda() as gpu:
        given = qwen3(num_hidden_layers=8)
        predicted = budget(c, Shapes.from_model(given, c.lora), 80 * GIB, sampler=False).phases()["update"]
        options = LearnerOptions(tokens_per_microbatch=2048, compute_dtype=torch.bfloat16)
        learner = LocalLearner(given.to("cuda"), TokenDistribution(VOCAB), options)
        assert all(part.trees is not None for part in batch.micro_batches(rows, learner._limits, pad_id=0))
        for _ in range(2):
            gc.collect()
            gpu.reset_peak()
            learner.accumulate(rows, LossConfig(), 0)
            learner.apply(1e-4)
    assert 0.7 * total(predicted) < gpu.peak_bytes < 1.1 * total(predicted), predicted


@pytest.mark.parametrize(
    ("optim", "args", "tied"),
    [("adafactor", {"beta1": 0.9}, True), ("adafactor", {}, True), ("muon", {}, False), ("muon", {}, True)],
)
def test_states_of_other_optimizers_are_counted(optim: str, args: dict[str, float], tied: bool) -> None:
    """Muon leaves a head of its own to AdamW, as it does the embedding."""
    sizes = SIZES | QWEN3 | {"num_hidden_layers": 1, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    predicted = budget(config(optim=optim, optim_args=args), Shapes.from_model(model, None), GIB)._optimizer_bytes()
    learner = LocalLearner(model, TokenDistribution(VOCAB), LearnerOptions(optim=optim, optim_args=args))
    learner.accumulate(rows_of(256), LossConfig())
    learner.apply(1e-4)
    values = [value for state in learner.optimizer.state.values() for value in state.values()]
    held = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    assert predicted == pytest.approx(held, rel=0.03, abs=100_000)


def test_the_mask_of_prefix_trees_is_counted() -> None:
    """Of one lane as wide as a micro-batch, which long prompts may have."""
    lane = torch.ones(1, 1024, dtype=torch.int64)
    trees = batch.PrefixTrees(lane, lane, lane, lane, lane[0], lane[0])
    c = config(tokens_per_microbatch=1024, dtype="bfloat16")
    held = budget(c, Shapes.from_model(qwen3(), None), 80 * GIB).phases()["update"]
    assert held["mask of prefix trees"] == trees.mask(torch.bfloat16).nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lanes_of_a_large_micro_batch_are_some_rows_wide(dtype: str) -> None:
    c, shapes = config(tokens_per_microbatch=8192, dtype=dtype), Shapes.from_model(qwen3(), None)
    limits = batch.PassLimits.for_model(8192, 10**9, share=True, device="cuda")
    parts = batch.micro_batches(rows_of(2**15, prompt_tokens=64, siblings=8), limits, pad_id=0)
    largest = max(part.trees.mask(getattr(torch, dtype)).nbytes for part in parts if part.trees is not None)
    held = budget(c, shapes, 80 * GIB).phases()["update"]
    assert largest <= held["mask of prefix trees"] < 8192**2
    held = budget(c.model_copy(update={"torch_compile": True}), shapes, 80 * GIB).phases()["update"]
    assert held["mask of prefix trees"] == 0, "a mask by blocks"


@pytest.mark.parametrize("tokens", [1024, "auto"])
def test_a_row_longer_than_a_micro_batch_is_counted(tmp_path: Path, tokens: Any) -> None:
    """It is one by itself, so smaller ones are no remedy."""
    values = {"model": shell(tmp_path, "4B"), "dtype": "bfloat16", "gradient_checkpointing": True}
    c = config(**values, tokens_per_microbatch=tokens, max_completion_length=32_768)
    with pytest.raises(ConfigError, match=r"update phase needs 8\d\.\d GiB of 80.0 GiB .*lower max_completion_length"):
        plan_for(c, Gpus.from_text("80GiB"))
    assert plan_for(c.model_copy(update={"max_completion_length": 1024}), Gpus.from_text("80GiB"))


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_publish_under_lora_holds_what_is_predicted(dtype: str) -> None:
    """Merged weights go into the engine a layer at a time, and are looked at one by one before."""
    c = config(engine={"name": "local", "slots": 4, "dtype": dtype}, dtype=dtype, lora={"r": 8})
    shapes = replace(Shapes.from_model(qwen3(num_hidden_layers=12), c.lora), in_bfloat16=dtype == "bfloat16")
    predicted = budget(c, shapes, 80 * GIB).phases()["publish"]
    with PretendCuda() as gpu:
        base = qwen3(num_hidden_layers=12).bfloat16().float().to("cuda")
        engine = LocalEngine(base, word_tokenizer(VOCAB), slots=4, max_length=128, dtype=dtype, device="cuda")
        policy = adapted(base, c.lora, None, None, word_tokenizer(VOCAB), keep_reference=False).model
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_generation_holds_what_is_predicted(dtype: str) -> None:
    slots, prompt, completion = 64, 64, 64
    c = config(
        engine={"name": "local", "slots": slots, "dtype": dtype},
        prompts_per_step=slots // 4,
        max_prompt_length=prompt,
        max_completion_length=completion,
    )
    predicted = budget(c, Shapes.from_model(qwen3(), c.lora), 80 * GIB, learner=False).phases()["generation"]
    with PretendCuda() as gpu:
        engine = LocalEngine(qwen3(), word_tokenizer(VOCAB), slots=slots, dtype=dtype, device="cuda")
        gc.collect()
        gpu.reset_peak()
        for i in range(slots):
            ids = tuple(2 + (i // 4 + j) % 500 for j in range(prompt))
            engine.submit([Request(i, ids, SamplingParams(completion), noise_key(0, i))])
        while engine.pending:
            engine.step()
        assert total(predicted) == pytest.approx(gpu.peak_bytes, rel=0.12), predicted


@pytest.mark.parametrize(
    ("name", "gpu", "changes"),
    [
        ("0.6B", "24GiB", {}),
        ("1.7B", "24GiB", {"lora": {"r": 16}}),
        ("1.7B", "80GiB", {}),
        ("4B", "80GiB", {"lora": {"r": 16}}),
        ("4B", "2x80GiB", ELSEWHERE),
    ],
)
def test_runs_that_fit_are_planned(tmp_path: Path, name: str, gpu: str, changes: Any) -> None:
    c = config(
        **{"model": shell(tmp_path, name), "dtype": "auto", "max_prompt_length": 512, "max_completion_length": 1024}
        | {"prompts_per_step": 32, "num_generations": 8}
        | changes
    )
    found = plan_for(c, Gpus.from_text(gpu))
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
    monkeypatch.setattr(resolved_module, "find_spec", lambda name: name)
    values = {"model": shell(tmp_path, name), "dtype": "auto", "engine": "auto", "lora": lora}
    c = config(**values, max_prompt_length=512, max_completion_length=1024, prompts_per_step=32, num_generations=8)
    found = plan_for(c, Gpus.from_text(gpu))
    phases = found["memory_gib"]["GPU"]
    assert name_of(found["engine"]) == "vllm"
    assert "vLLM asleep" in phases["update"]
    assert found["tokens_per_microbatch"] >= 1536
    if (name, lora) == ("4B", None):  # at no share of the memory
        awake = {"name": "vllm", "sleep": False, "gpu_memory_utilization": 0.2}
        with pytest.raises(ConfigError, match="device: the update phase"):
            plan_for(c.model_copy(update={"engine": awake}), Gpus.from_text(gpu))


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
    found = plan_for(load_config(path, [f"model={shell(tmp_path, name)}"]), Gpus.from_text(gpu))
    assert found["dtype"] == "bfloat16"
    assert found["tokens_per_microbatch"] >= 1536, "a whole row"


def test_a_plan_for_another_gpu_takes_the_type_that_the_run_takes(tmp_path: Path) -> None:
    given = {"model": shell(tmp_path, "0.6B"), "dtype": "auto", "max_prompt_length": 64, "max_completion_length": 64}
    for precision, dtype in (("highest", "bfloat16"), ("high", "float32")):
        c = config(**given | {"matmul_precision": precision})
        assert plan_for(c, Gpus.from_text("80GiB"))["dtype"] == dtype


def test_ranks_cut_what_one_gpu_cannot_hold(tmp_path: Path) -> None:
    c = config(model=shell(tmp_path, "8B"), dtype="bfloat16", learner={"name": "fsdp", "ranks": 4})
    shapes = Shapes.from_model(build_meta_model(c.model), c.lora)
    parts = {
        name: budget(c, shapes, 80 * GIB, sampler=False).phases()["update"][name] for name in ("weights", "optimizer")
    }
    assert parts == {"weights": shapes.parameters, "optimizer": 2 * shapes.parameters}
    with pytest.raises(ConfigError, match="device: the update phase needs"):
        plan_for(config(model=c.model, dtype="bfloat16", **ELSEWHERE), Gpus.from_text("8x80GiB"))


@pytest.mark.parametrize(
    ("name", "gpu", "key"), [("1.7B", "24GiB", "lora"), ("8B", "40GiB", "lora"), ("8B", "80GiB", "adamw_torch_8bit")]
)
def test_one_that_cannot_fit_is_refused_with_the_key(tmp_path: Path, name: str, gpu: str, key: str) -> None:
    c = config(model=shell(tmp_path, name), dtype="bfloat16", max_completion_length=1024)
    with pytest.raises(ConfigError, match=rf"device: the update phase needs .*{key}"):
        plan_for(c, Gpus.from_text(gpu))


def test_a_gpu_that_the_run_would_leave_idle_is_pointed_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--gpu: 2 GPUs, but sync: in_process samples on the learner's; plan for one"):
        plan_for(config(model=shell(tmp_path, "0.6B")), Gpus.from_text("2x80GiB"))


def test_keys_and_values_are_reserved_by_memory(tmp_path: Path) -> None:
    """256 rollouts of 1,024 tokens need 36 GB of keys and values in float32; a card of 24 GiB queues them."""
    c = config(model=shell(tmp_path, "0.6B"), dtype="bfloat16", prompts_per_step=32, num_generations=8)
    c = c.model_copy(update={"max_completion_length": 1024, "max_prompt_length": 512})
    found = plan_for(c, Gpus.from_text("24GiB"))
    assert 16 <= found["engine"]["slots"] < 256
    assert "slots" not in plan_for(c, Gpus.from_text("80GiB"))["engine"]


def test_what_waits_between_two_turns_or_two_steps_is_counted() -> None:
    """Keys and values of the embedded engine while environments answer; on the host, weights of vLLM under adapters."""
    shapes, memory = Shapes.from_model(qwen3(), None), 24 * GIB
    one = budget(config(), shapes, memory)
    several = replace(one, several_turns=True).phases()["generation"]
    assert several["keys and values between turns"] == several["keys and values"] > 0
    assert "keys and values between turns" not in one.phases()["generation"]
    for merge, asleep in ((False, {"weights of a sleeping vLLM, pinned": 4 * shapes.parameters}), (True, None)):
        c = config(engine="vllm", lora={"r": 4, "merge": merge})
        host = host_budget(c, shapes, budget(c, shapes, memory).engine, behind=0)
        assert host.get("update") == asleep


def test_filters_of_tokens_take_memory() -> None:
    shapes = Shapes.from_model(qwen3(), None)
    changes: list[dict[str, Any]] = [{}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.1}]
    logits = [budget(config(**c), shapes, 24 * GIB).phases()["generation"]["logits"] for c in changes]
    assert logits[0] == logits[1]
    assert logits[2] == logits[3] > 2 * logits[0]


def test_a_recurrent_model_is_left_to_the_engine_to_refuse() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))
    assert Shapes.from_model(model, None).layers == 2


def test_a_class_whose_activations_are_not_computed_again_needs_more() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32_000}
    with torch.device("meta"):
        again, kept = LlamaForCausalLM(LlamaConfig(**sizes)), Phi3ForCausalLM(Phi3Config(**sizes, pad_token_id=0))
    c = config()
    shapes = Shapes.from_model(again, c.lora)
    assert (shapes.recomputes, Shapes.from_model(kept, c.lora).recomputes) == (True, False)
    without = budget(c, replace(shapes, recomputes=False), GIB)
    assert without._activations() > 1.2 * budget(c, shapes, GIB)._activations()


def test_what_was_chosen_by_the_user_stays() -> None:
    c = config(tokens_per_microbatch=1000, gradient_checkpointing=False)
    shapes = Shapes.from_model(qwen3(), c.lora)
    assert budget(c, shapes, 80 * GIB).fitted()[1] == {}
    with pytest.raises(ConfigError, match="device: the update phase needs"):
        budget(c, shapes, 1 << 20).require_room()


@pytest.mark.parametrize("text", ["24", "x24GiB", "0x24GiB", "24 MiB", ""])
def test_gpus_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpu: cannot read"):
        Gpus.from_text(text)


@pytest.mark.parametrize(("text", "count", "memory"), [("24GiB", 1, 24 * GIB), ("2x80gb", 2, 80 * 10**9)])
def test_gpus_by_text(text: str, count: int, memory: int) -> None:
    assert Gpus.from_text(text) == Gpus(count, memory)


def test_seconds_of_a_step_are_those_that_an_h100_took(tmp_path: Path) -> None:
    """An update of 128 rows of 512 tokens took 1.75 s, one of 64 rows of 256 and more 0.41 s; 256 rows of up to 144
    new tokens 0.76 s of generation (benchmarks/results/gpu_h100.json, engine_gpu.json, docs/gpu.md)."""
    shapes = {"model": shell(tmp_path, "0.6B"), "dtype": "auto", "gradient_checkpointing": False}

    def seconds(gpu: str = "80GiB", **changes: Any) -> dict[str, Any]:
        return plan_for(config(**shapes | changes), Gpus.from_text(gpu))["seconds_per_step"]

    found = seconds(prompts_per_step=16, num_generations=8, max_prompt_length=256, max_completion_length=256)
    assert found["update"] == pytest.approx(1.75, rel=0.1)
    generated = seconds(prompts_per_step=32, num_generations=8, max_prompt_length=16, max_completion_length=128)
    assert generated["generation"] == pytest.approx(0.76, rel=0.2)
    assert found["because"].startswith("measured on an H100 80GB")
    assert "another one" in seconds("24GiB", lora={"r": 16})["because"]
    assert "within a factor of 2" in seconds(model=shell(tmp_path, "1.7B"), lora={"r": 16})["because"]
    assert "vLLM has not been measured" in seconds(engine="vllm")["because"]


@pytest.mark.parametrize(
    ("changes", "behind"),
    [
        ({"max_lag": 2}, 2),
        ({"max_lag": 2, "sync": {"name": "in_process", "lag": "mixed"}}, 2),
        ({"max_lag": 1, "rollout_batch": "adaptive"}, 0),
        ({"max_lag": 3, "rollout_batch": "adaptive", "sync": {"name": "in_process", "overlap": True}}, 1),
        ({"max_lag": 4, "sync": {"name": "in_process", "lag": "continuous"}}, 0),
        ({"max_lag": 2, "sync": "processes"}, 0),
    ],
)
def test_older_weights_are_kept_where_the_sampler_is_behind(
    tmp_path: Path, changes: dict[str, Any], behind: int
) -> None:
    """Not for a surplus, which waits for its step, nor in a run whose samplers keep their own."""
    c = config(model=shell(tmp_path, "0.6B"), **changes)
    assert resolved(c).behind == behind
    shapes = Shapes.from_model(qwen3(), None)
    kept = host_budget(c, shapes, None, behind=behind)["checkpoint"].get("kept versions", 0)
    assert kept == (4 * shapes.parameters * (behind + 1) if behind else 0)
