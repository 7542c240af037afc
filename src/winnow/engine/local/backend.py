"""Results of a backend's forward passes. The engine has two backends, with the same methods (see `llama`).

Shapes: N rows of a decode step, B prompts of a prefill, P the longest prompt of a batch, H hidden size, V sampled
vocabulary, D size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Output:
    """Results at the last position of each row."""

    hidden_NH: torch.Tensor
    """Input of the lm_head."""
    logits_NV: torch.Tensor
    """Before temperature, in the type of the weights or float32."""

    @classmethod
    def joined(cls, outputs: list[Output]) -> Output:
        """Return the rows of all."""
        return cls(torch.cat([o.hidden_NH for o in outputs]), torch.cat([o.logits_NV for o in outputs]))


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts that went through the model together. Columns past a prompt's length hold finite garbage."""

    keys: list[torch.Tensor]
    """One a layer, [B, heads, P, D]."""
    values: list[torch.Tensor]
    lengths: list[int]
    last: Output


@dataclass(frozen=True, slots=True)
class Read:
    """Sequences that went through the model together, with outputs at several positions of each."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    hidden_NH: torch.Tensor
    """Inputs of the lm_head, sequence by sequence."""
