"""OPOB against what it is meant to do: no other baseline gives a smaller variance; and its cheaper relatives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.learner.base import Stats
from winnow.learner.batch import PassLimits, collate, micro_batches
from winnow.learner.rows import Pool, Row, rows_of, with_gradient
from winnow.methods.advantage import ADVANTAGES, opo, optimal_baseline
from winnow.methods.advantage.otb import at_tokens, token_baselines, token_sums
from winnow.methods.correct import Evidence
from winnow.methods.correct.truncate import Truncate
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain

from ..builders.groups import make_group
from .learner_models import assert_equal, learner_of, llama, random_rows


def variance(rewards: np.ndarray, w: np.ndarray, gradients: np.ndarray, b: float) -> float:
    """Empirical second moment of w (r - b) g; its mean does not matter for the minimum where E[w g] = 0."""
    terms = (w * (rewards - b))[:, None] * gradients
    return float((terms**2).sum(1).mean())


def of_one_group(rewards: np.ndarray, norms: np.ndarray) -> float:
    return float(optimal_baseline(rewards, norms, np.zeros(len(rewards)))[0])


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(2, 12))
def test_no_baseline_on_a_grid_varies_less(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    rewards, w = rng.random(size), np.exp(rng.normal(size=size))
    gradients = rng.normal(size=(size, 5)) * rng.exponential(size=(size, 1))
    b = of_one_group(rewards, w**2 * (gradients**2).sum(1))
    least = variance(rewards, w, gradients, b)
    for other in np.linspace(-1, 2, 301):
        assert least <= variance(rewards, w, gradients, other) + 1e-12


def test_groups_have_their_own() -> None:
    rng = np.random.default_rng(0)
    rewards, norms = rng.random(9), rng.random(9)
    group = np.array([5, 1, 5, 1, 1, 5, 2, 2, 1])
    found = optimal_baseline(rewards, norms, group)
    for name in (1, 2, 5):
        rows = group == name
        assert found[rows] == pytest.approx(of_one_group(rewards[rows], norms[rows]))


def test_special_cases() -> None:
    rewards = np.array([1.0, 0.0, 0.0, np.nan])
    assert of_one_group(rewards, np.ones(4)) == pytest.approx(1 / 3)
    assert of_one_group(rewards, np.zeros(4)) == pytest.approx(1 / 3), "no gradient at all"
    assert of_one_group(rewards, np.array([1e300, 1e-300, 1.0, np.inf])) == pytest.approx(1.0)
    assert of_one_group(rewards, np.array([0.0, 1.0, 1.0, 1.0])) == 0.0
    assert np.isnan(optimal_baseline(rewards, np.ones(4), np.array([0, 0, 0, 1]))[3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, np.inf], [1.0, 1.0]), "rewards must be finite"),
        (([1.0, 0.0], [1.0, -1.0]), "not negative"),
        (([1.0, 0.0], [1.0, np.inf]), "norms finite"),
        (([1.0, 0.0], [1.0, np.nan]), "norms finite"),
    ],
)
def test_bad_input_is_named(arguments: tuple[list[float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimal_baseline(*map(np.array, arguments), np.zeros(2))


def test_length_is_the_weight_of_opo() -> None:
    rewards, lengths = np.array([1.0, 0.0, np.nan, 0.5]), np.array([10.0, 30.0, 500.0, 20.0])
    expected = rewards - (10 * 1.0 + 20 * 0.5) / 60
    np.testing.assert_allclose(opo(rewards, lengths), expected)
    np.testing.assert_array_equal(opo(np.array([0.5, 0.5]), np.array([1.0, 9.0])), [0, 0])
    np.testing.assert_allclose(opo(np.array([1.0, 0.0]), np.zeros(2)), [0.5, -0.5])
    group = make_group(0, [1.0, 0.0, None], [2, 6, 9])
    np.testing.assert_allclose(ADVANTAGES["opo"]().of_batch([group])[0], [0.75, -0.25, np.nan])


GROUPS = [make_group(0, [1.0, 0.0, 0.0], [2, 4, 6]), make_group(1, [1.0, 1.0], [3, 3]), make_group(2, [0.5, None, 1.0])]


def opob_rows(**options: Any) -> list[Row]:
    return rows_of(GROUPS, ADVANTAGES["opob"](**options), "sequence_sum", max_completion_length=8)


def test_rows_carry_rewards_and_what_scales_them() -> None:
    rows = opob_rows()
    assert [(r.advantage, r.pool.number) for r in rows if r.pool] == [
        *((1, 0), (0, 0), (0, 0), (1, 1), (1, 1), (0.5, 2), (1, 2))
    ]
    assert {r.weight for r in rows} == {1 / 7}
    loss = LossConfig(policy_loss=Plain())
    assert [r.rollout.sibling for r in with_gradient(rows, loss)] == [0, 1, 2, 0, 2], "group 1 teaches nothing"
    over_all = opob_rows(scope="minibatch")
    assert {r.pool.number for r in over_all if r.pool} == {0}
    assert len(with_gradient(over_all, loss)) == 7, "but it does against the baseline of the minibatch"
    scaled = opob_rows(scope="minibatch", scale=True)
    std = np.sqrt(2) / 3 + 1e-6, 0.25 + 1e-6
    assert [r.weight * 7 for r in scaled] == pytest.approx([1 / std[0]] * 3 + [0] * 2 + [1 / std[1]] * 2)
    assert len(with_gradient(scaled, loss)) == 5


@pytest.mark.parametrize(
    "options", [{}, {"scale": True}, {"scope": "minibatch"}, {"scope": "minibatch", "scale": True}]
)
def test_what_filters_go_by_is_the_case_of_equal_norms(options: dict[str, Any]) -> None:
    advantage = ADVANTAGES["opob"](**options)
    rows = opob_rows(**options)
    found = np.concatenate([a[~np.isnan(a)] for a in advantage.of_batch(GROUPS)])
    pools = np.array([r.pool.number for r in rows if r.pool])
    rewards, weights = np.array([r.advantage for r in rows]), np.array([r.weight * 7 for r in rows])
    baseline = optimal_baseline(rewards, (weights > 0).astype(float), pools)
    np.testing.assert_allclose(found, (rewards - baseline) * weights, atol=1e-12)


@pytest.mark.parametrize("budget", [1, 12, 30, 1000])
def test_blocks_hold_whole_pools(budget: int) -> None:
    rows = with_gradient(opob_rows(), LossConfig())
    batches = micro_batches(rows, PassLimits(budget), pad_id=0)
    assert sum(len(b.input_ids_BT) for b in batches) == 5
    blocks = {id(b.pools.pieces): b.pools for b in batches if b.pools}
    found = []
    for pools in blocks.values():
        rewards = torch.cat([b.advantages_B for b in pools.pieces])
        numbers = torch.cat([b.pools.number_B for b in pools.pieces if b.pools])
        assert pools.fits == (sum(int((b.input_ids_BT > 0).sum()) for b in pools.pieces) <= budget)
        for p, mean in enumerate(pools.mean_P.tolist()):
            found.append(sorted(rewards[numbers == p].tolist()))
            assert mean == pytest.approx(np.mean(found[-1]))
    assert sorted(found) == [[0.0, 0.0, 1.0], [0.5, 1.0]]


def otb_by_hand(rows: list[Row], logps: list[np.ndarray], squares: list[np.ndarray], w: list[np.ndarray]) -> list[Any]:
    """Advantage of every token after the prompt, in loops; 0 where the environment spoke.

    Siblings are compared at their t-th sampled token.
    """
    weights = []
    for row, logp, square, w_T in zip(rows, logps, squares, w, strict=True):
        energies = w_T**2 * (1 - 2 * np.exp(logp) + square)
        weights.append(np.cumsum(energies[row.rollout.action_mask]))
    advantages = []
    for row in rows:
        a = np.zeros(len(row.rollout.token_ids))
        for t, place in enumerate(np.flatnonzero(row.rollout.action_mask)):
            siblings = [j for j, r in enumerate(rows) if r.pool == row.pool and t < len(weights[j])]
            total = sum(weights[j][t] for j in siblings)
            a[place] = row.advantage - sum(weights[j][t] * rows[j].advantage for j in siblings) / total
        advantages.append(a)
    return advantages


@pytest.mark.parametrize(
    ("level", "budget"), [("token", 10_000), ("sequence", 10_000), ("sequence", 40), ("token", 15)]
)
def test_every_token_has_its_own_baseline_under_otb(level: str, budget: int) -> None:
    """Prompts differ in length, as those of random resets do, and environments speak in between."""
    model = llama().double()
    learner, loss = learner_of(model), LossConfig(policy_loss=Plain(), correction=Truncate(level=level, high=3.0))
    rewards, rows = np.random.default_rng(0).random(8), []
    for i, row in enumerate(random_rows(3, 8)):
        rows.append(replace(row, advantage=float(rewards[i]), pool=Pool(i % 2, "energy")))
    assert len({len(row.rollout.prompt_ids) for row in rows}) > 3
    total, logps, squares, w, graph = 0.0, [], [], [], []
    for row in rows:
        batch = collate([row], pad_id=0)
        prompt = len(row.rollout.prompt_ids)
        logits = model(input_ids=batch.input_ids_BT).logits[0, prompt - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, batch.input_ids_BT[0, prompt:, None])[:, 0]
        mask = batch.mask_BT[:1, prompt:]
        sampled = torch.from_numpy(row.rollout.sampler_logp)[None]
        w.append((loss.correction(Evidence(logp[None], sampled, mask, torch.ones(1)))[0] * mask)[0].detach().numpy())
        graph.append(logp)
        logps.append(logp.detach().numpy())
        squares.append(logits.softmax(-1).square().sum(-1).detach().numpy())
    for row, a, w_T, logp in zip(rows, otb_by_hand(rows, logps, squares, w), w, graph, strict=True):
        total = total - row.weight * (torch.from_numpy(a * w_T * row.rollout.action_mask) * logp).sum()
    expected = torch.autograd.grad(total, list(model.parameters()))
    stats = Stats()
    for batch in micro_batches(rows, PassLimits(budget), pad_id=0):
        learner.forward_backward(batch, loss, stats)
    assert_equal([p.grad for p in model.parameters() if p.grad is not None], list(expected), tolerance=1e-6)
    assert stats.sums["loss"] == pytest.approx(total.item(), rel=1e-6)
    assert len(torch.cat(stats.baselines)) == stats.sums["tokens"]


def test_otb_learns_from_siblings_whose_prompts_differ_in_length() -> None:
    """By padded column each of them would be alone, with its own reward for a baseline."""
    rewards_B, number_B = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64)
    mask_BT = torch.tensor([[0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 1]]).bool()
    energy_BT = torch.tensor([[9.0, 1, 2, 9, 9, 9, 9], [9, 9, 9, 3, 9, 9, 3]])
    found_PA = token_baselines(token_sums(rewards_B, energy_BT, mask_BT, number_B, 1))
    assert found_PA.tolist() == [[1 / 4, 3 / 9]]
    assert at_tokens(found_PA, number_B, mask_BT)[mask_BT].tolist() == [1 / 4, 3 / 9, 1 / 4, 3 / 9]


def test_opob_is_nowhere_worse_than_other_baselines() -> None:
    """The sum of squared norms of what each rollout adds is least at the baseline that the update has found."""
    learner, rows = learner_of(llama().double()), []
    for i, row in enumerate(random_rows(5, 6)):
        rows.append(replace(row, advantage=float(i % 3), pool=Pool(0, "gradient")))
    stats = Stats()
    for batch in micro_batches(rows, PassLimits(10_000), pad_id=0):
        learner.forward_backward(batch, LossConfig(policy_loss=Plain()), stats)
    (b,), (norms,) = stats.baselines[0].tolist(), stats.row_norm_B
    rewards = np.sort([r.advantage for r in rows])
    found = [r.advantage for r in sorted(rows, key=lambda r: r.length, reverse=True)]
    assert np.array_equal(np.sort(found), rewards)
    least = variance(np.array(found), np.ones(6), norms[:, None].numpy(), b)
    assert all(least <= variance(np.array(found), np.ones(6), norms[:, None].numpy(), o) for o in np.linspace(0, 2, 99))
