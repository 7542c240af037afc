"""Sums over rollouts of several segments, which have one row each in a micro-batch.

`rollout_B`: int64, number of each row's rollout, ascending from 0; None: each row is a rollout. Shapes: B rows, R
rollouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def sum_by_rollout(values_B: torch.Tensor, rollout_B: torch.Tensor | None) -> torch.Tensor:
    """Return the sum over the rows of each rollout, [R, ...]."""
    if rollout_B is None:
        return values_B
    rollouts = int(rollout_B[-1]) + 1
    return values_B.new_zeros(rollouts, *values_B.shape[1:]).index_add(0, rollout_B, values_B)


def sum_at_rows(values_B: torch.Tensor, rollout_B: torch.Tensor | None) -> torch.Tensor:
    """Return for each row the sum over all rows of its rollout, [B, ...]."""
    return values_B if rollout_B is None else sum_by_rollout(values_B, rollout_B)[rollout_B]


def first_rows(values_B: torch.Tensor, rollout_B: torch.Tensor | None) -> torch.Tensor:
    """Return the values of each rollout's first row, [R, ...]."""
    return values_B if rollout_B is None else values_B[_is_first(rollout_B)]


def sum_before(counts_B: torch.Tensor, rollout_B: torch.Tensor | None) -> torch.Tensor:
    """Return for each row the sum over the rows of its rollout before it, int64 [B]."""
    import torch

    if rollout_B is None:
        return torch.zeros_like(counts_B)
    earlier_B = counts_B.cumsum(0) - counts_B
    return earlier_B - earlier_B[_is_first(rollout_B)][rollout_B]


def _is_first(rollout_B: torch.Tensor) -> torch.Tensor:
    import torch

    first_B = torch.ones_like(rollout_B, dtype=torch.bool)
    first_B[1:] = rollout_B[1:] != rollout_B[:-1]
    return first_B
