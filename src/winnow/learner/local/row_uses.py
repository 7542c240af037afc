"""What hooks keep of a module for the gradients of single rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .logprob import at_least_float32
from .row_sums import Rows


class Uses:
    """Inputs of a module and gradients of its outputs; a module may be used more than once."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.of_prompts: OfPrompts | None = None

    @property
    def complete(self) -> bool:
        return self.of_prompts is None and len(self.gradients) == len(self.inputs)

    def joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Along T: the gradient is the sum over uses as it is over tokens. Last used comes first in `gradients`."""
        inputs, gradients = self.inputs, self.gradients[::-1]
        if self.of_prompts is not None:
            inputs, gradients = [self.of_prompts.inputs(), *inputs], [self.of_prompts.gradient, *gradients]
        if len(inputs) == 1:
            return inputs[0], gradients[0]
        return torch.cat(inputs, 1), torch.cat(gradients, 1)


@dataclass
class OfPrompts:
    """What a module made of U prompts that B rows share, and each row's own gradient of it."""

    input_U: torch.Tensor
    prompt_B: torch.Tensor
    gradient: torch.Tensor
    """[B, P, ...]; filled in pass by pass."""
    arrived_U: torch.Tensor | None = None
    """[U, P, ...], of the pass under way: one row of each prompt."""

    def inputs(self) -> torch.Tensor:
        return self.input_U.index_select(0, self.prompt_B)

    def take(self, rows: torch.Tensor) -> None:
        """Book what has arrived for these rows, one of a prompt at most."""
        if self.arrived_U is not None:
            self.gradient[rows] = self.arrived_U[self.prompt_B[rows]]
        self.arrived_U = None

    def weighted(self, rows: Rows, coefficient_B: torch.Tensor) -> torch.Tensor:
        """Weighted sum of a linear layer's gradients [out, in]: a prompt's rows are added up before the product."""
        y = self.gradient
        scaled = y * rows.of(coefficient_B, y)[:, None, None]
        left_UPI = y.new_zeros(len(self.input_U), *y.shape[1:]).index_add_(0, self.prompt_B, scaled)
        return at_least_float32(left_UPI.flatten(0, 1).t() @ self.input_U.to(left_UPI.dtype).flatten(0, 1))
