"""What a group counts in the loss when groups differ in size: a mean of means, by brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.learner.rows import rows_of
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.loss import LossConfig
from winnow.types import Fate, Group

from ..builders.groups import make_group
from ..builders.kl_in_reward import trained
from .learner_models import VOCABULARY, llama

LOSS_TYPES = ["dapo", "grpo", "dr_grpo", "sequence_sum"]
LONGEST = 16
UNEQUAL: list[tuple[list[float | None], list[int]]] = [
    ([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0], [3, 5, 2, 7, 1, 4, 6, 2]),
    ([1.0, None, None, 0.0], [4, 9, 3, 8]),
    ([0.0, 1.0, 0.5], [2, 2, 5]),
]


def groups() -> list[Group]:
    found = [make_group(n, rewards, lengths) for n, (rewards, lengths) in enumerate(UNEQUAL)]
    found[2].rollouts[1].stop_reason = "length"
    return found


def weights(found: list[Group], loss_type: Any, **options: Any) -> list[float]:
    rows = rows_of(found, ADVANTAGES["rloo"](), loss_type, max_completion_length=LONGEST, **options)
    return [row.weight for row in rows]


def mean_of_rollouts(loss_type: str, values: list[np.ndarray]) -> float:
    return float(
        {
            "dapo": lambda: np.concatenate(values).mean(),
            "grpo": lambda: np.mean([v.mean() for v in values]),
            "dr_grpo": lambda: np.mean([v.sum() / LONGEST for v in values]),
            "sequence_sum": lambda: np.mean([v.sum() for v in values]),
        }[loss_type]()
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_the_loss_is_a_mean_of_the_groups_means(loss_type: Any, mask_truncated: bool, equal: bool) -> None:
    rng = np.random.default_rng(0)
    found = groups()
    of_groups = [
        [
            rng.normal(size=len(r.token_ids))
            for r in g.rollouts
            if r.reward is not None and not (mask_truncated and r.stop_reason == "length")
        ]
        for g in found
    ]
    everyone = [v for values in of_groups for v in values]
    given_weights = weights(found, loss_type, mask_truncated=mask_truncated, equal_groups=equal)
    total = sum(w * v.sum() for w, v in zip(given_weights, everyone, strict=True))
    means = [mean_of_rollouts(loss_type, values) for values in of_groups]
    assert total == pytest.approx(np.mean(means) if equal else mean_of_rollouts(loss_type, everyone), rel=1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_group_counts_the_same_whatever_was_pruned(loss_type: Any) -> None:
    """Sixteen siblings of which four are left have a half of the loss beside sixteen, not a fifth."""
    pair = [make_group(0, [1.0, 0.0] * 8), make_group(1, [1.0, 0.0, 0.0, 1.0, *[None] * 12])]
    for rollout in pair[1].rollouts[4:]:
        rollout.fate = Fate.PRUNED
    shares = {}
    for equal in (True, False):
        found = weights(pair, loss_type, equal_groups=equal)
        shares[equal] = sum(found[16:]) / sum(found)
    assert shares == {True: pytest.approx(0.5), False: pytest.approx(0.2)}


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "sequence_sum"])
@given(st.lists(st.integers(1, LONGEST), min_size=12, max_size=12), st.sampled_from([2, 3, 4, 6]))
def test_groups_of_one_size_weigh_as_ever_bit_for_bit(loss_type: Any, lengths: list[int], size: int) -> None:
    found = [
        make_group(n, [float(i % 2) for i in range(size)], lengths[n * size : (n + 1) * size])
        for n in range(12 // size)
    ]
    assert weights(found, loss_type, equal_groups=True) == weights(found, loss_type, equal_groups=False)


@pytest.mark.parametrize(
    ("loss_type", "equal"), [("dapo", False), ("grpo", True), ("dr_grpo", True), ("sequence_sum", True)]
)
def test_the_default_is_the_formula_of_the_loss(loss_type: Any, equal: bool) -> None:
    assert LossConfig(loss_type=loss_type).equal_groups == equal
    assert LossConfig(loss_type=loss_type, group_weighting="equal").equal_groups
    assert not LossConfig(loss_type=loss_type, group_weighting="size").equal_groups


def test_active_rloo_with_groups_of_four_and_eight() -> None:
    """Equation 3 with the K of each group: -w A logp / (B_eff K_b), through the optimizer's step."""
    pair = [make_group(0, [1.0, 0.0, 0.0, 1.0]), make_group(1, [1.0] + [0.0] * 7)]
    metrics = trained(pair, ADVANTAGES["rloo"](), 0.0)[1]
    torch.testing.assert_close(metrics["loss"], by_hand(pair), rtol=1e-6, atol=1e-9)


def by_hand(pair: list[Group]) -> float:
    model, total = llama().double(), 0.0
    for group in pair:
        rewards = [float(r.reward) for r in group.rollouts if r.reward is not None]
        K = len(rewards)
        for i, r in enumerate(group.rollouts):
            ids = torch.tensor([[*r.prompt_ids, *r.token_ids.tolist()]])
            p = len(r.prompt_ids)
            logps = model(input_ids=ids).logits[0, p - 1 : -1, :VOCABULARY].log_softmax(-1)
            logp = float(logps.gather(1, ids[0, p:, None]).sum())
            w = min(float(np.exp(logp - r.sampler_logp.sum())), 8.0)
            advantage = rewards[i] - (sum(rewards) - rewards[i]) / (K - 1)
            total -= w * advantage * logp / (len(pair) * K)
    return total
