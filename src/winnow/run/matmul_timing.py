"""How fast this machine multiplies matrices of a model's sizes: by threads, and in one type beside another.

Both sides of a comparison take turns for about half a second, so that whatever else runs disturbs both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.nn.functional import linear, silu

BUDGET_S = 0.5
ROUNDS = 3
"""At least, after one that warms up."""
TURN_S = 5e-3
"""A turn is repeated until it takes at least so long."""
HOPELESS = 4.0
"""Sides that take so many times as long as the fastest while warming up are tried no further."""
MAX_SIZE = 4096
"""Matrices of more rows are cut: of a vocabulary, a part is enough."""
WORK = 4e8
"""Multiplications of the tokens of one pass with all matrices, at most."""

Side = TypeVar("Side")
Clock = Callable[[], float]


@dataclass(frozen=True)
class Matrices:
    """The matrices of a model."""

    parameters: int
    """Number of parameters of the whole model."""
    shapes: tuple[tuple[int, int], ...]
    """Outputs and inputs of each size that there is."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> Matrices:
        """Weights are not looked at; they may be on the meta device."""
        shapes = {(min(p.shape[0], MAX_SIZE), p.shape[1]) for p in model.parameters() if p.ndim == 2}
        return cls(sum(p.numel() for p in model.parameters()), tuple(sorted(shapes)))

    def rows(self, wanted: int) -> int:
        """Tokens to multiply at once: as many as are wanted, or as take a few milliseconds."""
        return max(1, min(wanted, int(WORK / sum(out * inputs for out, inputs in self.shapes))))


class Products:
    """The products of two decode steps of `rows` sequences, and of an update on the tokens that they sampled.

    That is how a run shares its multiplications between generation and update.
    """

    def __init__(self, matrices: Matrices, rows: int, dtype: torch.dtype) -> None:
        def constant(*shape: int) -> torch.Tensor:  # no random number of the run's is drawn
            return torch.full(shape, 1e-3, dtype=dtype)

        self.rows = rows
        self.pairs = [
            (constant(2 * rows, inputs).requires_grad_(), constant(out, inputs).requires_grad_())
            for out, inputs in matrices.shapes
        ]

    def __call__(self) -> None:
        with torch.inference_mode():
            for _ in range(2):
                for x, weight in self.pairs:
                    silu(linear(x[: self.rows], weight))
        for pair in self.pairs:
            torch.autograd.grad(silu(linear(*pair)).sum(), pair)


def seconds_by_threads(
    matrices: Matrices, rows: int, dtype: torch.dtype, counts: Sequence[int], clock: Clock = time.perf_counter
) -> dict[int, float]:
    """Seconds of `Products` on each number of threads; what was hopeless is left out."""
    products, before = Products(matrices, matrices.rows(rows), dtype), torch.get_num_threads()

    def on(threads: int) -> Callable[[], None]:
        def turn() -> None:
            torch.set_num_threads(threads)
            products()

        return turn

    try:
        return {n: statistics.median(times) for n, times in in_turn({n: on(n) for n in counts}, clock).items()}
    finally:
        torch.set_num_threads(before)


def times_slower(
    dtype: torch.dtype, than: torch.dtype, matrices: Matrices, device: torch.device, clock: Clock = time.perf_counter
) -> float:
    """Products in `dtype`: how many times as long as in another type they take."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rows = matrices.rows(128)

    def multiply(kind: torch.dtype) -> Callable[[], None]:
        pairs = [
            [torch.full(shape, 1e-3, dtype=kind, device=device) for shape in ((rows, inputs), (out, inputs))]
            for out, inputs in matrices.shapes
        ]

        def turn() -> None:
            with torch.inference_mode():
                for x, weight in pairs:
                    linear(x, weight)
            wait()

        return turn

    found = in_turn({kind: multiply(kind) for kind in (dtype, than)}, clock, drop=False)
    return statistics.median(a / b for a, b in zip(found[dtype], found[than], strict=True))


def in_turn(
    sides: dict[Side, Callable[[], None]], clock: Clock = time.perf_counter, *, drop: bool = True
) -> dict[Side, list[float]]:
    """Seconds of each side's turns, `BUDGET_S` in all or `ROUNDS` rounds, whatever takes longer.

    `drop`: leave out sides that are hopeless, and those after them.
    """

    def timed(turn: Callable[[], None], times: int) -> float:
        started = clock()
        for _ in range(times):
            turn()
        return (clock() - started) / times

    started, first = clock(), {}
    for side, turn in sides.items():
        turn()
        first[side] = min(timed(turn, 1) for _ in range(2))
        if drop and first[side] > HOPELESS * min(first.values()):
            break  # and so would be what comes after it: more threads
    fastest = min(first.values())
    times = max(1, int(TURN_S / max(fastest, 1e-9)))
    kept = [side for side, seconds in first.items() if not drop or seconds <= HOPELESS * fastest]
    found: dict[Side, list[float]] = {side: [] for side in kept}
    while clock() - started < BUDGET_S or len(found[kept[0]]) < ROUNDS:
        for side in kept:
            found[side].append(timed(sides[side], times))
    return found
