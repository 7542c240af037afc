"""What a GPU would meet, on a CPU: devices, host waits, launches and bytes, by `tests/pretend_cuda.py`."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.pretend_cuda import PretendCuda
from winnow.base.noise import noise_key
from winnow.base.weights import StateWeights
from winnow.config import validate
from winnow.engine import LocalEngine, Request, SamplingParams
from winnow.engine.facts import Facts
from winnow.engine.loading import resolve_device
from winnow.engine.local.cache import plan
from winnow.engine.local.hf import make_backend
from winnow.learner.base import Stats
from winnow.learner.batch import PassLimits, micro_batches
from winnow.learner.fsdp.sharded import OPTIMIZER_FOLDER
from winnow.learner.fsdp.shards import save_shards
from winnow.learner.local import recompute
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.off_policy import sampling_metrics
from winnow.learner.rows import Row
from winnow.methods.correct import CORRECTIONS
from winnow.methods.loss import LossConfig
from winnow.run.resolve import resolve_here
from winnow.sampler.in_process import InProcessSampler
from winnow.study import doctor
from winnow.types import Rollout

from ..builders.cuda import BF16, LAYERS, PLAIN, UPDATES, VOCAB, learner_of, qwen3, rank_of_one, rows_of, step_of
from .engine_models import word_tokenizer


def test_the_checker_finds_what_is_seeded() -> None:
    with PretendCuda() as gpu:
        torch.ones(3, device="cuda") + torch.ones(3)
        assert gpu.mixed
        gpu.clear()
        with pytest.raises(TypeError):
            torch.ones(3, device="cuda").numpy()
        there = torch.zeros(1000, device="cuda")
        before = gpu.bytes
        del there
        assert before - gpu.bytes == 4000
        parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        parameter.grad = torch.ones(3, device="cuda")
        optimizer.step()
        optimizer.state[parameter]["step"] = torch.zeros(())
        gpu.clear()
        optimizer.step()
        assert gpu.mixed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("params", "waits"), [({}, 1), ({"top_p": 0.9, "temperature": 0.7}, 2)])
def test_a_decode_step_mixes_no_devices_and_waits_at_most_twice(dtype: str, params: Any, waits: int) -> None:
    """Also few kernels, so that nobody makes it slower unseen. Prompts are put on the device before the first step."""
    with PretendCuda() as gpu:
        engine = LocalEngine(qwen3(), word_tokenizer(VOCAB), slots=16, dtype=dtype, device="cuda")
        engine.submit(
            [Request(i, (5, 6, 7), SamplingParams(12, **params), noise_key(0, i), report_at=(4,)) for i in range(16)]
        )
        engine.step()
        gpu.clear()
        engine.step()
        assert not gpu.mixed, gpu.report()
        assert sum(gpu.syncs.values()) <= waits, gpu.report()
        assert sum(gpu.launches.values()) <= 70 + 22 * LAYERS, gpu.report()
        while engine.pending:
            engine.step()
        assert not gpu.mixed, gpu.report()


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("name", sorted(UPDATES))
def test_an_update_mixes_no_devices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates, log-probabilities, reference, weights, checkpoint and export."""
    monkeypatch.setattr(recompute, "WORTH", 0)
    options = dict(UPDATES[name])
    loss, pool, vocab = options.pop("loss", LossConfig()), options.pop("pool", None), options.get("vocab", VOCAB)
    with PretendCuda() as gpu:
        learner, rows = learner_of(**options), rows_of(pool=pool, vocab=vocab)
        gpu.clear()
        for iteration in range(2):
            stats = learner.accumulate(rows, loss, iteration)
            if stats.log_ratio_N:
                sampling_metrics(torch.cat(stats.log_ratio_N), torch.cat(stats.log_w_B))
            learner.apply(1e-3)
        learner.logp(rows)
        if learner.reference is not None or options.get("lora") is not None:
            learner.reference_logp(rows)
        assert all(tensor.is_cuda for tensor in learner.weights().state_dict().values())
        learner.save(tmp_path)
        learner.load(tmp_path)
        learner.accumulate(rows, loss, 0)
        learner.apply(1e-3)
        learner.export(tmp_path / "model")
        assert not gpu.mixed, gpu.report()


def test_the_head_waits_for_nothing() -> None:
    """Waits of an update are independent of the size of the vocabulary, of which a slice is computed at a time."""
    waits = []
    for vocab in (VOCAB, 20 * VOCAB):
        with PretendCuda() as gpu:
            learner, rows = learner_of(vocab=vocab, **BF16), rows_of(vocab=vocab)
            gpu.clear()
            learner.accumulate(rows, LossConfig(), 0)
            waits.append(sum(n for (where, _), n in gpu.syncs.items() if "vocabulary" in where))
    assert waits == [0, 0]


def test_a_gpu_gets_few_micro_batches() -> None:
    """256 rollouts of GSM8K's lengths."""
    draws, rows = random.Random(0), []
    for number in range(32):
        prompt = tuple(draws.randrange(2, VOCAB) for _ in range(draws.randint(60, 180)))
        for sibling in range(8):
            n = min(1024, int(draws.lognormvariate(5.2, 0.6)))
            zeros = np.zeros(n)
            rollout = Rollout(sibling, prompt, zeros + 5 + number, zeros == 0, zeros, zeros.astype(np.int32))
            rows.append(Row(rollout, 1.0, 1 / 256))
    counts = [
        len(micro_batches(rows, PassLimits.for_model(16_384, 600_000_000, share=True, device=device), pad_id=0))
        for device in ("cpu", "cuda")
    ]
    assert max(counts) <= 20


def test_a_gpu_gets_one_attention_call_a_layer() -> None:
    """256 rollouts with prompts of GSM8K's lengths, two heads of 64; a CPU reads less padding instead."""
    lengths = np.sort(np.random.default_rng(0).integers(60, 180, 256))[::-1]
    calls = {device: len(plan(lengths, 2 * 2 * 64, device)) for device in ("cpu", "cuda")}
    assert calls["cuda"] == 1 < calls["cpu"]


def test_a_rank_gives_tensors_of_the_host() -> None:
    """The driver that gets them may have no GPU."""
    with PretendCuda():
        there = torch.ones(2, device="cuda")
        stats = Stats({"loss": 1.0}, [there], [there], [there], [there])
        host = stats.on_host()
        tensors = host.log_w_B + host.log_ratio_N + host.baselines + host.row_norm_B
        assert len(tensors) == 4
        assert not any(tensor.is_cuda for tensor in tensors)
        assert host.sums == {"loss": 1.0}


@pytest.mark.filterwarnings("ignore")
def test_optimizer_state_of_ranks_is_loaded_to_the_device(tmp_path: Path) -> None:
    """Fused AdamW refuses a `step` on the host."""
    saved = rank_of_one("cpu")
    step_of(saved)
    save_shards(saved._optimizer_state(), tmp_path / OPTIMIZER_FOLDER)
    with PretendCuda() as gpu:
        loaded = rank_of_one("cuda")
        loaded.load(tmp_path)
        (state,) = loaded.optimizer.state.values()
        assert {name: tensor.is_cuda for name, tensor in state.items()} == dict.fromkeys(state, True)
        step_of(loaded)
        assert float(state["step"]) == 2
        assert not gpu.mixed, gpu.report()


@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (14, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefill_holds_the_keys_and_values_it_returns(heads: tuple[int, int], dtype: str) -> None:
    model = qwen3(heads=heads[0], kv_heads=heads[1])
    backend = make_backend(model, Facts.from_model(model, word_tokenizer(VOCAB)), dtype, "cpu")
    with torch.inference_mode():
        prefilled = backend.prefill([tuple(range(5, 55))] * 4)
    tensors = prefilled.keys + prefilled.values
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(held.values()) == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_of_groups_is_that_of_heads(dtype: str) -> None:
    """On GPUs heads of a group are folded into queries, where PyTorch would take its math kernel."""
    results = []
    for pretended in (False, True):
        with PretendCuda() as gpu:
            engine = LocalEngine(qwen3(), word_tokenizer(VOCAB), dtype=dtype, device="cuda" if pretended else "cpu")
            params = SamplingParams(6, temperature=0)
            engine.submit([Request("a", (5, 6, 7), params, 0, keep=True)])
            (first,) = [event for _ in range(20) if engine.pending for event in engine.step()]
            tail = (5, 6, 7, *first.token_ids.tolist(), 9, 10, 11)
            engine.submit([Request("a", tail, params, 1, keep=True)])
            (second,) = [event for _ in range(20) if engine.pending for event in engine.step()]
            results.append((first, second))
            assert not gpu.mixed
    for ours, theirs in zip(*results, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.logp, theirs.logp, atol=1e-5 if dtype == "float32" else 2e-2)


def test_an_engine_of_a_directory_is_on_the_gpu(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path)
    word_tokenizer(VOCAB).save_pretrained(tmp_path)
    with PretendCuda() as gpu:
        engine = LocalEngine.from_pretrained(str(tmp_path))
        assert gpu.bytes > 0
        assert LocalEngine.from_pretrained(str(tmp_path), device="cpu")._backend.device.type == "cpu"
        del engine


def test_no_plans_of_cudnn_on_a_gpu() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        with PretendCuda():
            assert resolve_device("auto").type == "cuda"
            assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture
def algorithms_as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("slots", [1, 4])
def test_deterministic_runs_call_nothing_that_has_no_such_kernel(slots: int, algorithms_as_before: None) -> None:
    """Updates of every kind of loss, and sampling, whose running sums PyTorch refuses to make."""
    drawn = {"top_p": 0.9, "temperature": 0.7}
    with PretendCuda():
        m2po = LossConfig(correction=CORRECTIONS["m2po"]())
        for pool, loss in ((None, LossConfig()), (None, m2po), ("energy", PLAIN), ("gradient", PLAIN)):
            learner = learner_of(deterministic=True, drawn=drawn if pool is None else None, **BF16)
            learner.accumulate(rows_of(pool=pool), loss, 0)
            learner.apply(1e-3)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.ones(3, device="cuda").cumsum(0)
        engine = LocalEngine(qwen3(), word_tokenizer(VOCAB), slots=slots, device="cuda")
        engine.submit([Request(i, (5, 6, 7), SamplingParams(6, **drawn), noise_key(0, i)) for i in range(slots)])
        while engine.pending:
            engine.step()
        assert torch.are_deterministic_algorithms_enabled()


def test_a_processor_is_left_as_it_is(algorithms_as_before: None) -> None:
    LocalLearner(qwen3(), TokenDistribution(VOCAB), LearnerOptions(deterministic=True))
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.slow
def test_samplers_are_forked_off_a_process_that_has_not_started_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports may ask whether there is a GPU: with this variable NVML answers, and CUDA is not initialized."""
    code = """
import os, torch
asked, real = [0], torch.cuda.is_available
def counted():
    asked[0] += 1
    return real()
torch.cuda.is_available = counted
import winnow.run.serve
assert not asked[0] or os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1"
"""
    from winnow.sampler import processes

    environment: dict[str, str] = {}

    class Asked:
        def fork(self) -> Any:
            raise InterruptedError

    def server(target: str, env: dict[str, str]) -> Any:
        environment.update(env)
        return Asked()

    monkeypatch.setattr(processes, "forkserver", server)
    with pytest.raises(InterruptedError):
        processes.open_pipe(None, 1, "winnow.run.serve:main")  # type: ignore[arg-type]
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


def test_versions_kept_for_a_lag_are_on_the_host() -> None:
    with PretendCuda() as gpu:
        model = qwen3().to("cuda")
        engine = LocalEngine(model, word_tokenizer(VOCAB), slots=4, device="cuda")
        runner: Any = SimpleNamespace(engine=engine, pending=0, set_rules=lambda rules: None)
        sampler = InProcessSampler(runner, behind=3, mixed=False, seed=0)
        held = []
        for version in range(4):
            sampler.publish(StateWeights(model.state_dict()), [], version)
            gc.collect()
            held.append(gpu.bytes)
        assert len(sampler._kept) == 4
        assert held == held[:1] * 4
        assert not gpu.mixed, gpu.report()


def test_fixed_slots_have_one_shape_of_attention_whatever_else_runs() -> None:
    """A kernel that is chosen by the shape is then the same."""
    shapes = []
    for others in (0, 5):
        with PretendCuda() as gpu:
            options = {"slots": 8, "fixed_slots": True, "max_length": 64}
            engine = LocalEngine(qwen3(), word_tokenizer(VOCAB), device="cuda", **options)
            requests = [Request(i, (5, 6, 7 + i)[: 2 + i % 2], SamplingParams(6), i) for i in range(1 + others)]
            engine.submit(requests)
            engine.step()
            gpu.clear()
            while engine.pending:
                engine.step()
            shapes.append(set(gpu.shapes))
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) == 1


def test_the_engine_follows_a_type_that_is_given_on_a_gpu(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path)
    given = {"model": str(tmp_path), "env": "countdown", "engine": "local", "dtype": "bfloat16"}
    found = {}
    with PretendCuda():
        for device in ("cpu", "cuda"):
            c = validate(given | {"device": device})
            settled = resolve_here(c).config
            found[device] = settled.engine.get("dtype") if isinstance(settled.engine, dict) else None
    assert found == {"cpu": None, "cuda": "bfloat16"}


def test_a_torch_without_cuda_on_a_machine_with_a_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NVIDIA", [tmp_path])
    monkeypatch.setattr(torch.version, "cuda", None)
    (gpu,) = [finding for finding in doctor.examine() if finding["what"] == "GPU"]
    assert "has no CUDA; install the CUDA build" in gpu["remedy"]
    with PretendCuda(memory=24 << 30):
        (gpu,) = [finding for finding in doctor.examine() if finding["what"] == "GPU 0"]
    assert gpu["found"].startswith("pretended GPU, 24 GiB (24 free), compute capability 9.0, bfloat16")
