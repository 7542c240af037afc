"""Triton kernels of decode steps against PyTorch's operations, in the interpreter, which a process has from its start.

So one test runs the others in a process of their own. It is skipped where Triton cannot be imported. In float16: the
interpreter multiplies bits of bfloat16 as if they were integers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.pretend_cuda import PretendCuda
from winnow.base.noise import noise_key
from winnow.engine import LocalEngine, Request, SamplingParams
from winnow.engine.facts import Facts
from winnow.engine.local.cache import Chunk, KVCache
from winnow.engine.local.hf import make_backend
from winnow.engine.sampling import BLOCK, Transform
from winnow.engine.sampling import sample as plain_sample

from ..unit.engine_models import FUSED, VOCAB, make_model, run, word_tokenizer

COMPILED = Path(__file__).with_name("compiled_kernels.py")
HERE = os.environ.get("TRITON_INTERPRET") == "1"
if HERE:
    from winnow.engine.local import fused
    from winnow.engine.local.fused import sample as fused_sample
interpreted = pytest.mark.skipif(not HERE, reason="runs in the interpreter, from the first test of this file")


@pytest.mark.skipif(HERE, reason="is the process of the interpreter")
def test_all_below_hold_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(HERE, reason="is the process of the interpreter")
@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_kernels_compile_for_a_card_and_take_shared_memory_that_every_card_has(capability: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run([sys.executable, str(COMPILED), capability], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    taken = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(taken) == 6
    assert max(taken) <= 48


def engine_of(name: str, fused: bool, **options: Any) -> LocalEngine:
    return LocalEngine(make_model(name), word_tokenizer(VOCAB), dtype="float16", fused_kernels=fused, **options)


def step_of(name: str, fused: bool) -> tuple[torch.Tensor, ...]:
    """Hidden states, logits, keys and values of a step of six rows, of which three share 70 columns."""
    model, n = make_model(name), 6
    backend = make_backend(model, Facts.from_model(model, word_tokenizer(VOCAB)), "float16", "cpu", fused)
    cache = KVCache(backend.kv_shapes, n, torch.float16, torch.device("cpu"))
    cache.reserve(n, 128)
    positions = torch.tensor([70, 71, 100, 0, 63, 64])
    torch.manual_seed(1)
    for tensor in cache.keys + cache.values:
        tensor.normal_()
        tensor[1:3, :, :70] = torch.nan if fused else tensor[0, :, :70]  # only the first of them is read
    cache.mask[:] = torch.zeros(n, 128).masked_fill(torch.arange(128) >= positions[:, None], -torch.inf)
    cache.prompts[:, :3] = torch.tensor([[0], [70]])
    with torch.inference_mode():
        output = backend.decode(torch.arange(n) + 5, positions, cache, [Chunk(0, n, 128)])
    rows = torch.arange(n)
    stored = [tensor[rows, :, positions] for tensor in cache.keys + cache.values]
    return tuple(tensor.float() for tensor in (output.hidden_NH, output.logits_NV, *stored))


@interpreted
@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_decode_step_is_that_of_the_plain_path(name: str) -> None:
    """To some roundings of float16, of a relative step of 0.0005 to 0.001."""
    for plain, fused in zip(step_of(name, False), step_of(name, True), strict=True):
        assert (plain - fused).abs().max() <= 0.004 * plain.abs().max()
        assert (plain - fused).square().mean() <= 0.001**2 * plain.square().mean()


@interpreted
@pytest.mark.parametrize("size", [3, BLOCK, BLOCK + 1, 5000])
def test_tokens_and_log_probabilities_are_those_of_the_plain_sampler(size: int) -> None:
    """The same numbers of the noise draw the same tokens, the ends of the interval included; none has weight 0."""
    torch.manual_seed(size)
    logits = (4 * torch.randn(24, size)).to(torch.bfloat16)
    logits[:, ::3] = -torch.inf
    uniform = torch.rand(24)
    uniform[:2], uniform[2:4] = 0, 1 - 2**-24
    transform = Transform(torch.rand(24) + 0.5, None, None, None, None)
    expected, found = plain_sample(logits, uniform, transform), fused_sample(logits, uniform, transform)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=2e-6, rtol=0)
    assert logits.gather(1, found[0][:, None]).isfinite().all()
    for wrong in (torch.nan, torch.inf):
        logits[0, 1] = wrong
        assert not fused_sample(logits, uniform, transform)[1][0].isfinite()


@interpreted
def test_an_engine_samples_the_tokens_of_the_plain_one() -> None:
    """Siblings part, rows end, move and are taken again. Log-probabilities differ by roundings."""
    asked = [
        Request(i, tuple(range(3, 6 + 5 * (i // 3))), SamplingParams(1 + i * 5 % 6, top_k=5 * (i == 5)), i)
        for i in range(7)
    ]
    expected, found = (run(engine_of("qwen3", fused, slots=4), asked) for fused in (False, True))
    same = [i for i in expected if np.array_equal(expected[i].token_ids, found[i].token_ids)]
    assert len(same) >= 6  # a number within a rounding of a boundary may draw the neighbour
    for i in same:
        np.testing.assert_allclose(found[i].logp, expected[i].logp, atol=0.05)


class Counted:
    """A kernel of which every call is a launch on the pretended device."""

    def __init__(self, kernel: Any, gpu: PretendCuda) -> None:
        self._kernel, self._gpu = kernel, gpu

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self._gpu.launch(self._kernel.__name__)
            with _disable_current_modes():  # the interpreter's own operations are none of the device's
                self._kernel[grid](*args, **options)

        return launch


@interpreted
def test_a_step_starts_nine_kernels_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendCuda() as gpu:
        model = make_model("qwen3")
        engine = LocalEngine(model, word_tokenizer(VOCAB), slots=4, dtype="float16", device="cuda", fused_kernels=True)
        for name in ("_norm", "_rotate", "_attend", "_gate", "_draw"):
            monkeypatch.setattr(fused, name, Counted(getattr(fused, name), gpu))
        engine.submit([Request(i, (5, 6, i), SamplingParams(6), noise_key(0, i)) for i in range(4)])
        for _ in range(2):
            gpu.clear()
            engine.step()
        assert not gpu.mixed, gpu.report()
        assert sum(gpu.syncs.values()) == 1, gpu.report()
        assert sum(gpu.launches.values()) <= 9 * 2 + 12, gpu.report()
