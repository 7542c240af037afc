"""Products with weight matrices, in the layout in which the machine multiplies fastest."""

from __future__ import annotations

import torch

TYPICAL_ROWS = 128
"""A packed layout is chosen for so many rows; any number can be multiplied."""


class Linear:
    """x @ weight.t() + bias for a weight [out, in]; on a CPU packed once by oneDNN, not anew in every product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight)
        pack = torch.ops.mkldnn._reorder_linear_weight
        if self._packed:
            self._weight = pack(weight, TYPICAL_ROWS)
        else:  # a GPU multiplies by a transposed matrix as fast; a copy would take memory
            self._weight = weight.t() if weight.is_cuda else weight.t().contiguous()

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self._weight, self._bias, "none", [], "")
            return product
        return x_NI @ self._weight if self._bias is None else torch.addmm(self._bias, x_NI, self._weight)

    def add_to(self, sum_NO: torch.Tensor, x_NI: torch.Tensor) -> None:
        """Add x @ weight.t() to `sum_NO` in place; for a matrix without bias."""
        if self._packed or sum_NO.dtype != x_NI.dtype:
            sum_NO.add_(self(x_NI))
        else:
            sum_NO.addmm_(x_NI, self._weight)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
