"""The rectangle that TRL trains on: its loss weighs tokens as Winnow's own update does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from winnow.integrations.trl_batch import batch_of
from winnow.learner.rows import token_weights

LONGEST = 9


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("times", [[1.0] * 5, [1.0, 2.0, 4.0, 1.0, 1.25]])
def test_tokens_weigh_what_they_weigh_in_winnows_own_update(times: list[float], loss_type: str, parts: int) -> None:
    lengths_N, times_N = np.array([3, 1, 9, 4, 4]), np.array(times)
    advantages_N = np.array([1.0, -2.0, 0.5, 0.0, 3.0])

    def row(length: int) -> dict[str, torch.Tensor]:
        ones = torch.ones(length, dtype=torch.long)
        two = torch.ones(2, dtype=torch.long)
        return {"prompt_ids": two, "prompt_mask": two, "completion_ids": ones, "completion_mask": ones}

    batch = batch_of(
        [row(length) for length in lengths_N],
        advantages_N,
        times_N,
        loss_type=loss_type,
        empty=[row(2)] * (-5 % parts),
        pad_token=0,
    )
    B = len(batch["advantages"])
    assert {1: 5, 4: 8}[parts] == B
    tokens_B = batch["completion_mask"].sum(1)
    assert tokens_B.tolist() == [*lengths_N, *[0] * (B - 5)]
    of_trl = {
        "dapo": batch["advantages"] / batch["num_items_in_batch"],
        "grpo": batch["advantages"] / tokens_B.clamp(min=1) / B,
        "dr_grpo": batch["advantages"] / LONGEST / B,
    }[loss_type]
    own = advantages_N * token_weights(lengths_N.astype(float), loss_type, LONGEST, times_N)
    np.testing.assert_allclose(of_trl[:5].numpy(), own, rtol=1e-6)
    assert (of_trl[5:] == 0).all()


def test_padding_has_a_ratio_of_one() -> None:
    """VESPO multiplies the ratios of all positions."""
    ones = torch.ones(1, dtype=torch.long)
    rows = [
        {"prompt_ids": ones, "completion_mask": torch.ones(n), "importance_sampling_ratio": torch.full((n,), 0.5)}
        for n in (1, 3)
    ]
    batch = batch_of(rows, np.ones(2), np.ones(2), loss_type="vespo", empty=[], pad_token=0)
    assert batch["importance_sampling_ratio"].prod(1).tolist() == [0.5, 0.125]
