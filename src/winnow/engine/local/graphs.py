"""Decode steps as CUDA graphs: one launch instead of about 20 a layer.

A graph has fixed shapes and addresses. Rows and columns are rounded up so that few shapes occur; rows beyond the
running ones are free slots, whose keys and values nobody reads. A shape is captured when it comes a second time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .cache import GRAIN, Chunk, KVCache

Step = Callable[[torch.Tensor, torch.Tensor, KVCache, list[Chunk]], torch.Tensor]
Replay = Callable[[], torch.Tensor]
Capture = Callable[[Replay, bool], Replay]
MOST_GRAPHS = 64


class DecodeGraphs:
    """Runs `step`, which returns [N, H] hidden states and never waits for the device, as graphs.

    What it returns is overwritten by the next call.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step, self._device = step, device
        self._capture: Capture | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all graphs: weights or cache are about to have other addresses."""
        self._mask: torch.Tensor | None = None
        self._seen: set[tuple[int, int]] = set()
        self._graphs: dict[tuple[int, int], Replay] = {}

    def __call__(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, cache: KVCache, chunks: list[Chunk]
    ) -> torch.Tensor:
        if cache.mask is not self._mask:  # the cache has grown: its tensors are new ones
            self.clear()
            self._mask = cache.mask
            self._ints = torch.zeros(2, cache.rows, dtype=torch.int64, device=self._device)
        n = len(tokens_N)
        rows, columns = _rounded(n, cache.rows), _rounded(max(chunk.columns for chunk in chunks), cache.columns)
        if (rows, columns) not in self._graphs:
            if (rows, columns) not in self._seen or len(self._graphs) == MOST_GRAPHS:
                self._seen.add((rows, columns))
                return self._step(tokens_N, positions_N, cache, chunks)
            tokens, positions = self._ints[:, :rows]
            self._capture = self._capture or capturing(self._device)
            self._graphs[rows, columns] = self._capture(
                lambda: self._step(tokens, positions, cache, [Chunk(0, rows, columns)]), not self._graphs
            )
        self._ints[0, :n], self._ints[1, :n] = tokens_N, positions_N
        self._ints[:, n:rows] = 0
        return self._graphs[rows, columns]()[:n]


def capturing(device: torch.device) -> Capture:
    """Return a function that captures a step as a graph and returns its replay. Its second argument: no other is left.

    All graphs use one stream: PyTorch keeps a workspace of cuBLAS for every stream for good, 32 MiB each on Hopper.
    """
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(step: Replay, first: bool) -> Replay:
        nonlocal pool
        if first:  # a pool whose graphs are gone cannot be used again
            pool = torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                hidden = step()
            finally:
                graph.capture_end()
        current.wait_stream(stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return hidden

        return replay

    return capture


def _rounded(n: int, most: int) -> int:
    """Return `n` rounded up by at most an eighth, or to the next multiple of `GRAIN`; at most `most`."""
    grain = max(GRAIN, 1 << max(n.bit_length() - 4, 0))
    return min(-(-n // grain) * grain, most)
