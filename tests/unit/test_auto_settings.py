"""What `dtype: auto` and `threads: auto` choose, by the processor's flags and the model's size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import winnow.base.machine as processor_module
from tests.pretend_cuda import PretendCuda
from winnow.base.errors import ConfigError
from winnow.base.machine import bfloat16_units, main_memory, processor, usable_cores, usable_threads
from winnow.config import RunConfig, validate
from winnow.config.options import name_of
from winnow.engine import LocalOptions, VllmOptions
from winnow.engine.initial_model import InitialModel
from winnow.engine.server.options import ServerOptions
from winnow.record.resume_keys import changes_of, resumed_config
from winnow.run.budget import AT_MOST
from winnow.run.inputs import refuse_changes
from winnow.run.resolve import (
    CPU_ACTIVATION_BYTES,
    LONGEST_ROW_SHARE,
    PAYS_FROM,
    bytes_per_token,
    choose_checkpointing,
    choose_dtype,
    choose_engine,
    choose_slots,
    choose_tokens,
    threads_for,
)
from winnow.run.resolved import Machine, Options

from ..builders.resolving import resolved

AMX = "model name\t: Xeon\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n\nmodel name\t: other\nflags\t\t: fpu\n"
ZEN4 = "model name\t: EPYC\nflags\t\t: avx2 avx512f avx512_bf16\n"
AVX2 = "model name\t: Core\nflags\t\t: sse2 avx2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"
CPU = torch.device("cpu")


def start() -> InitialModel:
    return InitialModel(source="given", model=large())


def config(**changes: Any) -> RunConfig:
    return validate({"model": "given", "env": "countdown", "threads": 1} | changes)


def large() -> LlamaForCausalLM:
    """A model for which bfloat16 pays, without weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32_000, **sizes))
    assert model.num_parameters() >= PAYS_FROM
    return model


def small() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts a processor of this description in the place of this machine's."""

    def pretend(info: str) -> None:
        (tmp_path / "cpuinfo").write_text(info)
        monkeypatch.setattr(processor_module, "CPUINFO", tmp_path / "cpuinfo")

    return pretend


@pytest.mark.parametrize(
    ("info", "name", "units"),
    [
        (AMX, "Xeon (avx2, avx512f, avx512_bf16, amx_bf16)", ["amx_bf16", "avx512_bf16"]),
        (ZEN4, "EPYC (avx2, avx512f, avx512_bf16)", ["avx512_bf16"]),
        (AVX2, "Core (avx2)", []),
        (ARM, None, []),
        ("", None, []),
    ],
)
def test_flags_of_the_first_core(info: str, name: str | None, units: list[str], on: Callable[[str], None]) -> None:
    on(info)
    assert bfloat16_units() == units
    assert processor() == name or (name is None and processor())


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("4,2", 4), ("", None), ("0", None), ("many", None)])
def test_usable_threads_are_what_the_environment_says_or_the_cores(
    said: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = usable_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert usable_threads() == (threads or cores) >= 1


@pytest.mark.parametrize(
    ("memory", "cpu", "found"), [("4096", "150000 100000", (4096, 1)), ("max", "max 100000", None)]
)
def test_a_container_has_what_its_limits_leave(
    memory: str, cpu: str, found: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processor_module, "LIMITS", tmp_path)
    whole = main_memory(), usable_threads()
    (tmp_path / "memory.max").write_text(f"{memory}\n")
    (tmp_path / "cpu.max").write_text(f"{cpu}\n")
    assert (main_memory(), usable_threads()) == (found or whole)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert (usable_cores(), usable_threads()) == ((found or whole)[1], 3)


@pytest.mark.parametrize(
    ("info", "parameters", "changes", "dtype", "reason"),
    [
        (AMX, PAYS_FROM, {}, "bfloat16", "amx_bf16"),
        (ZEN4, PAYS_FROM, {}, "bfloat16", "avx512_bf16"),
        (AVX2, PAYS_FROM, {}, "float32", "without amx_bf16 or avx512_bf16"),
        (AMX, PAYS_FROM - 1, {}, "float32", "million parameters"),
        (AMX, PAYS_FROM, {"matmul_precision": "medium"}, "float32", "matmul_precision: medium"),
    ],
)
def test_the_type_by_processor_and_size(
    info: str,
    parameters: int,
    changes: dict[str, Any],
    dtype: str,
    reason: str,
    on: Callable[[str], None],
) -> None:
    on(info)
    found, because = choose_dtype(config(**changes), parameters, Machine.here("cpu"))
    assert found == dtype
    assert reason in because


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({}, {"name": "local", "dtype": "bfloat16"}),
        ({"engine": {"name": "local", "slots": 7}}, {"name": "local", "slots": 7, "dtype": "bfloat16"}),
        ({"engine": {"name": "local", "dtype": "float32"}}, {"name": "local", "dtype": "float32"}),
        ({"policy_loss": "plain"}, "local"),
        ({"engine": "vllm"}, "vllm"),
        (
            {"policy_loss": "plain", "correction": "truncate"},
            {"name": "local", "dtype": "bfloat16"},
        ),
    ],
)
def test_the_engine_follows_where_the_loss_weighs_what_it_samples(
    on: Callable[[str], None], changes: dict[str, Any], engine: Any
) -> None:
    on(AMX)
    settled = resolved(config(**changes), start())
    assert settled.config.dtype == "bfloat16"
    assert settled.config.engine == engine
    assert not settled.warnings
    on(AVX2)
    there = resolved(config(**changes), start())
    given = config(**changes).engine
    assert (there.config.dtype, there.config.engine) == ("float32", "local" if given == "auto" else given)
    kept = resolved(settled.config, start(), resumed=True)
    assert kept.config == settled.config, "a resume elsewhere does the same"
    assert kept.why["dtype"] == "as the run began"


@pytest.mark.parametrize(
    ("info", "changes", "told"),
    [
        (AVX2, {"dtype": "bfloat16"}, "dtype: bfloat16 is probably slower here than float32 (cpu without amx_bf16"),
        (
            AMX,
            {"dtype": "float32"},
            "dtype: float32 is probably slower here than bfloat16 (the processor",
        ),
        (AVX2, {"dtype": "float32"}, None),
        (AMX, {"dtype": "bfloat16"}, None),
        (AMX, {"dtype": "bfloat16", "matmul_precision": "medium"}, None),
        (AMX, {"dtype": "float32", "matmul_precision": "medium"}, None),
        (AVX2, {"dtype": "float16"}, None),
    ],
)
def test_a_given_type_is_kept_and_a_slower_one_is_told(
    on: Callable[[str], None], info: str, changes: dict[str, Any], told: str | None
) -> None:
    on(info)
    settled = resolved(config(**changes), start())
    assert settled.config.dtype == changes["dtype"]
    found = settled.warnings
    assert len(found) == (told is not None)
    assert all(warning.startswith(told or "") for warning in found)


def test_more_threads_than_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (warning,) = resolved(config(threads=3, dtype="float32", matmul_precision="high"), start()).warnings
    assert "threads: 3, but this process may use 2" in warning


def test_sampler_processes_keep_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    apart = {"sync": {"name": "processes", "samplers": 2}, "max_lag": 1, "threads": "auto"}
    settled = resolved(config(**apart), start())
    assert settled.config.threads == 1
    assert resolved(config(threads="auto"), start()).config.threads == 3


@pytest.mark.parametrize("threads", [0, 257, "fast", 1.5])
def test_threads_that_are_none(threads: Any) -> None:
    with pytest.raises(ConfigError, match="threads"):
        config(threads=threads)


@pytest.mark.parametrize(
    ("parameters", "usable", "chosen"),
    [(PAYS_FROM - 1, 8, 1), (PAYS_FROM, 8, 8), (PAYS_FROM, 1, 1), (10**9, 64, 64)],
)
def test_threads_by_size_and_cores(parameters: int, usable: int, chosen: int) -> None:
    assert threads_for(parameters, usable) == chosen


class TestActivations:
    def test_estimate_is_what_a_backward_pass_keeps(self) -> None:
        """Within a factor of two of what autograd saves for a token more, the vocabulary's part left out."""
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def saved(tokens: int) -> int:
            found: dict[int, int] = {}

            def note(tensor: torch.Tensor) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:
                    found[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                kept = model.get_decoder()(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
            assert kept.last_hidden_state.requires_grad
            return sum(found.values())

        one_more = (saved(48) - saved(16)) / 32
        assert 0.5 < bytes_per_token(model) / one_more < 2

    def test_micro_batches_are_smaller_for_larger_models(self) -> None:
        tokens = [choose_tokens(m)[0] for m in (large(), small())]
        assert tokens[0] == CPU_ACTIVATION_BYTES // bytes_per_token(large()) < tokens[1] == AT_MOST

    def test_layers_are_recomputed_where_the_longest_row_would_not_fit(self) -> None:
        model = large()
        memory = 24 << 30
        fits = int(memory * LONGEST_ROW_SHARE / bytes_per_token(model))
        assert not choose_checkpointing(model, fits, memory)[0]
        assert choose_checkpointing(model, fits + 1, memory)[0]
        assert not choose_checkpointing(torch.nn.Linear(1 << 12, 1 << 12), 10**9, memory)[0], "it has no layers"

    def test_a_step_of_more_sequences_has_more_slots_if_memory_allows(self) -> None:
        def slots_of(memory: int = 1 << 40, **changes: Any) -> int:
            c = config(**{"dtype": "float32", "prompts_per_step": 100} | changes)
            return int(resolved(c, start(), memory=memory).engine.slots)

        assert slots_of() == 800
        assert slots_of(prompts_per_step=1000) == 1024
        rounds = {"filter": "zero_variance", "rollout_batch": {"name": "adaptive", "surplus": "discard"}}
        assert slots_of(prompts_per_step=40, **rounds) == 480, "a round of one and a half batches of 8 siblings"
        assert slots_of(memory=4 << 30) == slots_of(prompts_per_step=8) == 256
        assert slots_of(memory=1 << 30) == 85, "half of it"
        assert slots_of(memory=1 << 30, max_completion_length=200_000) == 32, "of as many tokens as the model takes"
        assert slots_of(engine={"name": "local", "slots": 64}) == 64
        assert slots_of(engine={"name": "local", "fixed_slots": True}) == 256
        slots, why = choose_slots(256, 800, 1 << 20, 8 << 30, several_turns=True)
        assert slots == 512
        assert "0.5 of 8 GiB" in why
        assert choose_slots(256, 800, 1 << 20, 128 << 20, several_turns=True)[0] == 32, "and as many between turns"

    def test_a_run_keeps_what_was_chosen_or_configured(self) -> None:
        settled = resolved(config(dtype="float32"), start())
        assert settled.config.tokens_per_microbatch == choose_tokens(large())[0]
        assert settled.config.gradient_checkpointing is False
        assert "GiB" in settled.why["tokens_per_microbatch"]
        longest = resolved(config(dtype="float32", max_completion_length=10**9), start())
        assert longest.config.gradient_checkpointing is True
        assert "1,000,000," in longest.why["gradient_checkpointing"]
        kept = resolved(config(dtype="float32", tokens_per_microbatch=7, gradient_checkpointing=True), start())
        assert (kept.config.tokens_per_microbatch, kept.config.gradient_checkpointing) == (7, True)
        assert "tokens_per_microbatch" not in kept.why


@pytest.mark.parametrize(
    ("changes", "device", "engine", "reason"),
    [
        ({}, "cuda", "vllm", "vLLM is installed"),
        ({}, "cpu", "local", "samplers are on cpu"),
        ({"engine": {"name": "auto", "slots": 8}}, "cuda", {"name": "vllm", "slots": 8}, "installed"),
        ({"engine": {"name": "auto", "slots": 8}}, "cpu", {"name": "local", "slots": 8}, "on cpu"),
        (
            {"engine": {"name": "auto", "fixed_slots": True}},
            "cuda",
            {"name": "local", "fixed_slots": True},
            "no option fixed_slots",
        ),
        ({"policy_loss": "plain"}, "cuda", "local", "without a correction"),
        ({"policy_loss": "plain", "correction": "truncate"}, "cuda", "vllm", "installed"),
    ],
)
def test_the_engine_by_device_options_and_loss(changes: dict[str, Any], device: str, engine: Any, reason: str) -> None:
    c = config(**changes)
    found, why = choose_engine(c, Options.from_config(c), PAYS_FROM, device)
    assert found == engine
    assert reason in why


def test_vllm_provides_whatever_a_run_may_need_of_the_embedded_engine() -> None:
    assert LocalOptions.provides <= VllmOptions.provides


def test_without_vllm_or_for_a_small_model_the_engine_on_a_gpu_is_the_embedded_one() -> None:
    for missing, parameters, reason in (
        ("pip install it", PAYS_FROM, "pip install it"),
        ("", PAYS_FROM - 1, "million parameters"),
    ):
        engine, why = choose_engine(config(), Options.from_config(config()), parameters, "cuda", missing)
        assert engine == "local"
        assert reason in why


@pytest.mark.parametrize(
    ("sync", "engine"),
    [("in_process", "vllm"), ({"name": "processes", "devices": ["cpu"]}, "local"), ({"name": "ray"}, "vllm")],
)
def test_what_the_engine_is_on_a_gpu_is_settled_once_and_kept(sync: Any, engine: str) -> None:
    with PretendCuda():
        settled = resolved(config(sync=sync, max_lag=int(sync != "in_process")), start(), no_vllm="")
        assert name_of(settled.config.engine) == engine
        assert "engine" in settled.why
        assert resolved(settled.config, start(), resumed=True, no_vllm="pip").config.engine == settled.config.engine


def test_samplers_on_the_cpu_are_not_planned_on_a_gpu() -> None:
    c = config(sync={"name": "processes", "devices": ["cpu"]}, max_lag=1)
    with PretendCuda():
        settled = resolved(c, start(), no_vllm="")
    assert list(settled.budgets) == ["learner GPU"]
    assert "slots" not in settled.config.engine


def test_servers_leave_no_engine_to_choose_and_no_memory_to_plan_for() -> None:
    c = config(sync={"name": "server", "url": "http://here"}, max_lag=1)
    with PretendCuda():
        settled, alone = (resolved(c, start(), no_vllm="", alone=alone) for alone in (False, True))
    assert settled.config.engine == "auto"
    assert settled.engine == ServerOptions("http://here", 300.0, max_length=c.longest)
    assert list(settled.budgets) == ["learner GPU"]
    assert isinstance(alone.engine, VllmOptions)


def test_dots_reach_into_a_section_of_the_run(tmp_path: Path) -> None:
    values = config(sync={"name": "processes", "samplers": 1}, max_lag=1).model_dump(mode="json")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert changes_of(tmp_path, []) == {}
    changes = changes_of(tmp_path, ["sync.samplers=2", "max_steps=9"])
    assert changes == {"sync": {"name": "processes", "samplers": 2}, "max_steps": 9}


def test_one_option_of_the_engine_changes_on_a_resume_and_the_others_stay(tmp_path: Path) -> None:
    for saved in ("vllm", {"name": "local", "dtype": "bfloat16"}):
        values = config(engine=saved).model_dump(mode="json")
        (tmp_path / "config.json").write_text(json.dumps(values))
        changed = resumed_config(tmp_path, changes_of(tmp_path, ["engine.slots=8"]))
        assert changed.engine == ({"name": saved} if isinstance(saved, str) else saved) | {"slots": 8}
        refuse_changes(tmp_path, values, changed)
        with pytest.raises(ConfigError, match=r"engine: was .*, is .*'max_length': 64"):  # where rollouts end
            refuse_changes(tmp_path, values, resumed_config(tmp_path, changes_of(tmp_path, ["engine.max_length=64"])))


@pytest.mark.parametrize(
    "changes",
    [{"sync": {"name": "in_process"}}, {"sync": "processes", "max_lag": 1, "rollout_batch": {"name": "exact"}}],
)
def test_a_default_as_a_section_is_no_option_without_effect(changes: dict[str, Any]) -> None:
    assert resolved(config(**changes), start()).config.sync == changes["sync"]
