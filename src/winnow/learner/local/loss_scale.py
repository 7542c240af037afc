"""Loss scaling for float16, whose smallest number is 6e-8: smaller gradients become 0."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

START_FACTOR, LARGEST_FACTOR = 2.0**16, 2.0**24
GROWTH_UPDATES = 2_000
"""Updates without an overflow before the factor doubles, as in torch's GradScaler."""


class LossScale:
    """Factor on the loss of an update: a power of two, so that dividing gradients by it is exact.

    It is halved until all gradients are finite. Unlike torch's GradScaler it skips no batch: gradients are recomputed.
    Checkpoints do not contain the factor; a resume begins at `START_FACTOR`.
    """

    def __init__(self) -> None:
        self.factor = START_FACTOR
        self._clean = 0

    def fits(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Unscale gradients and return True; if one is not finite, zero all, halve the factor and return False.

        Raises FloatingPointError when gradients are not finite without a factor either.
        """
        gradients = [p.grad for p in params if p.grad is not None]
        if bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients, math.inf))):
            torch._foreach_div_(gradients, self.factor)
            self._clean += 1
            if self._clean % GROWTH_UPDATES == 0:
                self.factor = min(2 * self.factor, LARGEST_FACTOR)
            return True
        if self.factor <= 1:
            raise FloatingPointError("gradients overflow float16; no update was made. Set dtype: bfloat16 or float32")
        torch._foreach_zero_(gradients)
        self.factor, self._clean = self.factor / 2, 0
        return False
