"""Weights of a model with adapters, in the form of the model without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...base.weights import LazyState, StateWeights, TensorSpec, state_once


class MergedWeights(StateWeights):
    """Weights of a model with LoRA layers injected, W + delta merged tensor by tensor; see `WeightSource`.

    The layers stay unchanged (merging and un-merging in place would drift).
    """

    def __init__(self, causal_lm: torch.nn.Module) -> None:
        self._base = {
            name.replace(".base_layer.", "."): value
            for name, value in state_once(causal_lm).items()
            if ".lora_" not in name
        }
        layers = ((f"{name}.weight", module) for name, module in causal_lm.named_modules())
        self._adapted: dict[str, Any] = {name: module for name, module in layers if hasattr(module, "get_delta_weight")}
        super().__init__(LazyState(self._base, self._merged))

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(value.shape), _wide(value.dtype)) for name, value in self._base.items()}

    @torch.no_grad()
    def _merged(self, name: str) -> torch.Tensor:
        value, layer = self._base[name], self._adapted.get(name)
        wide = _wide(value.dtype)
        return value.to(wide) if layer is None else layer.get_delta_weight("default").to(wide).add_(value)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the merge dtype: a bfloat16 base is merged in float32."""
    return torch.float32 if dtype == torch.bfloat16 else dtype
