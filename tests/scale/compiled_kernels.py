"""Compile the Triton kernels of decode steps for a card that is not here: `python tests/scale/compiled_kernels.py 90`.

Prints the KiB of shared memory that each takes, at shapes of Qwen3-0.6B. The interpreter refuses less.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from winnow.engine.local import fused

HEADS, KV_HEADS, D, HIDDEN, FORWARD, VOCABULARY, ROWS, COLUMNS = 16, 8, 128, 1024, 3072, 151_936, 4, 64


class Absent(DriverBase):
    """The driver of a card of this compute capability, as far as a compilation asks it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(ROWS, *shape, dtype=torch.bfloat16)


def compiled() -> dict[str, Any]:
    n, groups, scale = ROWS, HEADS // KV_HEADS, D**-0.5
    ints, floats, hidden = torch.zeros(n, dtype=torch.int64), torch.zeros(n), torch.zeros(n, HIDDEN)
    cache, queries = (half(KV_HEADS, COLUMNS, D), half(KV_HEADS, COLUMNS, D)), half(HEADS * D)
    qkv, norm, rotation = half((HEADS + 2 * KV_HEADS) * D), torch.zeros(HEADS + KV_HEADS, D), torch.zeros(99, D)
    rotated = HEADS, KV_HEADS, D, D // 2, 1e-6, True
    read = groups, KV_HEADS, D, D, fused.LEAST_QUERIES, fused.COLUMNS, scale
    found: dict[str, Any] = {}
    for add in (True, False):
        given = hidden, half(HIDDEN), torch.zeros(HIDDEN), half(HIDDEN), 1e-6, add, HIDDEN, HIDDEN
        found[f"norm, {add}"] = fused._norm.warmup(*given, grid=(n,))
    given = qkv, norm, rotation, ints, queries, cache, COLUMNS, rotated
    found["rotate"] = fused._rotate.warmup(*given, grid=(n, HEADS + 2 * KV_HEADS))
    given = queries, cache, ints, (ints, ints), queries, COLUMNS, read
    found["attend"] = fused._attend.warmup(*given, num_stages=2, grid=(n, KV_HEADS))
    found["gate"] = fused._gate.warmup(half(2 * FORWARD), half(FORWARD), FORWARD, 1024, grid=(n, 3))
    given = half(VOCABULARY), floats, floats, ints, floats, VOCABULARY, 149, 256
    found["draw"] = fused._draw.warmup(*given, num_warps=8, grid=(n,))
    return found


if __name__ == "__main__":
    driver.set_active(Absent(int(sys.argv[1])))
    for name, kernel in compiled().items():
        assert kernel.asm["cubin"]
        print(name, kernel.metadata.shared / 1024, flush=True)
