"""M2PO against dropping one token after another, and that micro-batches do not matter to it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.learner.base import Stats
from winnow.learner.batch import collate
from winnow.learner.local.learner import LocalLearner
from winnow.learner.rows import Row, rows_of
from winnow.learner.step import OptimizerStep, StepOptions
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.correct.m2po import M2PO, cutoff
from winnow.methods.correct.none import NoScale
from winnow.methods.correct.ratios import Evidence
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import POLICY_LOSSES

from ..builders.groups import make_group
from .learner_models import assert_equal, learner_of, llama, random_rows

STEP: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": 1, "num_iterations": 2}
STEP |= {"max_completion_length": 16, "mask_truncated_completions": False, "seed": 0}


def one_by_one(squared: list[float], threshold: float) -> list[bool]:
    """Kept or not: drop the largest (and its equals) until the mean of what is left is under the threshold."""
    left = list(squared)
    while left and math.fsum(left) / len(left) >= threshold:
        left = [x for x in left if x < max(left)]
    return [x in left for x in squared]


@given(st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.5, 4.0]), max_size=12))
def test_the_cutoff_is_that_of_dropping_one_after_another(squared: list[float]) -> None:
    limit = cutoff(torch.tensor(squared, dtype=torch.float64), 0.0415)
    assert [x < limit for x in squared] == one_by_one(squared, 0.0415)


def brute_force(logp: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    B, T = logp.shape
    d = {(b, t): float(logp[b, t] - sampler[b, t]) for b in range(B) for t in range(T) if mask[b, t]}
    bite = [at for at in d if (d[at] > 0 and A[at[0]] > 0) or (d[at] < 0 and A[at[0]] < 0)]
    kept = dict(zip(bite, one_by_one([d[at] ** 2 for at in bite], 0.04), strict=True))
    expected = torch.ones(B, T, dtype=torch.float64)
    for at in d:
        expected[at] = math.exp(d[at]) if kept.get(at, True) else 0.0
    return expected


@pytest.mark.parametrize("spread", [0.05, 0.3, 2.0])
def test_weights_by_brute_force(spread: float) -> None:
    torch.manual_seed(1)
    sampler, mask = torch.randn(6, 9, dtype=torch.float64) - 3, torch.rand(6, 9) < 0.7
    logp = sampler + spread * torch.randn(6, 9, dtype=torch.float64)
    logp[~mask] = 99.0
    A = torch.tensor([1.0, -2.0, 0.5, 0.0, -0.1, 3.0], dtype=torch.float64)
    weights, counts = M2PO()(Evidence(logp, sampler, mask, A))
    expected = brute_force(logp, sampler, mask, A)
    torch.testing.assert_close(weights[mask], expected[mask])
    dropped = int((expected[mask] == 0).sum())
    assert counts == {"clipped": dropped, "clipped_of": int(mask.sum())}
    assert (dropped > 0) == (spread > 0.1)
    unweighed = M2PO(weigh=False)(Evidence(logp, sampler, mask, A))[0]
    assert torch.equal(unweighed[mask], (expected[mask] > 0).double())
    parts = [Evidence(logp[i : i + 2], sampler[i : i + 2], mask[i : i + 2], A[i : i + 2]) for i in (0, 2, 4)]
    cut = M2PO().over_batch(parts)
    assert torch.equal(torch.cat([cut(part)[0] for part in parts]), weights)


def test_far_off_tokens_that_clipping_would_not_bite_stay_finite() -> None:
    weights, _ = M2PO()(
        Evidence(torch.zeros(1, 2), torch.full((1, 2), -500.0), torch.ones(1, 2).bool(), -torch.ones(1))
    )
    torch.testing.assert_close(weights, torch.full((1, 2), 1e6))
    with pytest.raises(ValueError, match=r"threshold\n.*greater than 0 "):
        M2PO(threshold=0.0)


@pytest.mark.parametrize("policy_loss", ["clip", "plain"])
def test_the_update_does_not_depend_on_micro_batches(monkeypatch: pytest.MonkeyPatch, policy_loss: str) -> None:
    """Two iterations; alone, the micro-batches would have dropped other tokens."""
    draw = np.random.default_rng(0)
    sampler_logp = [draw.normal(-3.5, 0.3, 4).astype(np.float32) for _ in range(9)]

    def trained(tokens: int) -> tuple[list[torch.Tensor], dict[str, float]]:
        model = llama().double()
        groups = [make_group(n, [1.0, 0.0, 0.3]) for n in range(3)]
        for n, rollout in enumerate(r for g in groups for r in g.rollouts):
            rollout.token_ids = (rollout.token_ids + n) % 30
            rollout.sampler_logp = sampler_logp[n]
        loss = LossConfig(policy_loss=POLICY_LOSSES[policy_loss](), correction=M2PO())
        options = StepOptions(learning_rate=1e-3, **STEP)
        learner = learner_of(model, tokens=tokens)
        metrics = OptimizerStep(learner, ADVANTAGES["grpo"](), loss, NoScale(), options)(groups, 0)
        return list(model.parameters()), metrics

    (whole, metrics), (pieces, same) = trained(10_000), trained(1)
    assert 0 < metrics["correction/clipped_share"] < 1
    assert same == pytest.approx(metrics, rel=1e-5, abs=1e-9)
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    monkeypatch.setattr(LocalLearner, "_ahead", lambda self, loss: loss)
    assert trained(1)[1]["correction/clipped_share"] != metrics["correction/clipped_share"]


def test_log_probabilities_without_gradients_are_those_of_the_update() -> None:
    learner, batch, stats = learner_of(llama().double()), collate(random_rows(), pad_id=0), Stats()
    logp = learner.batch_logp(batch)
    assert not logp.requires_grad
    learner.forward_backward(batch, LossConfig(correction=M2PO()), stats)
    assert batch.old_logp_BT is not None
    torch.testing.assert_close(logp, batch.old_logp_BT)


LAGS = [
    [0, 0, 0, 0],
    [1, 1, 1, 1],
    [3, 3, 0, 0],
    [6, 6, 6, 6],
    [6, 3, 1, 0],
    [0, 0, 1, 6],
    [1, 1, 3, 3],
    [3, 3, 3, 3],
    [6] * 4,
]
"""Of the tokens of nine rollouts: some were sampled by one policy, some by several."""


@pytest.mark.parametrize("tokens_per_microbatch", [1, 30, 10_000])
@pytest.mark.parametrize(("policy_loss", "weigh"), [("plain", True), ("clip", True), ("clip", False)])
def test_mixed_lags_by_brute_force(policy_loss: str, weigh: bool, tokens_per_microbatch: int) -> None:
    """The update's gradient against one that is computed a token at a time, with the tokens that M2PO keeps.

    Masking falls on the oldest tokens, wherever in their rollouts they are. Every token that is kept counts its ratio
    to the policy that sampled it: as a weight, or as the ratio that is clipped (`weigh: false`).
    """
    draw, threshold = np.random.default_rng(3), 0.04
    learner, groups = (
        learner_of(llama().double(), tokens=tokens_per_microbatch),
        [make_group(n, [1.0, 0.0, 0.3]) for n in range(3)],
    )
    rollouts = [r for g in groups for r in g.rollouts]
    for n, (rollout, lags) in enumerate(zip(rollouts, LAGS, strict=True)):
        rollout.token_ids = (rollout.token_ids + n) % 30
        rollout.versions = (6 - np.array(lags)).astype(np.int32)
        logp = learner.logp([Row(rollout, 0.0, 0.0)])[0].numpy()
        rollout.sampler_logp = (logp + 0.15 * np.array(lags) * draw.normal(size=4)).astype(np.float32)
    rows = rows_of(groups, ADVANTAGES["dr_grpo"](), "sequence_sum", max_completion_length=16)
    batch = collate(rows, pad_id=0)
    logp, _, _ = learner._logp(batch)
    sampler, mask, A = batch.sampler_logp_BT[:, 1:].double(), batch.mask_BT[:, 1:], batch.advantages_B
    total = torch.zeros((), dtype=torch.float64)
    weights = brute_force(logp.detach(), sampler, mask, A)
    for b, t in mask.nonzero().tolist():
        w, a = float(weights[b, t]), float(A[b])
        if weigh:
            total = total - w * a * logp[b, t] / len(rows)
        elif w:
            ratio = (logp[b, t] - sampler[b, t]).exp()
            total = total - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) / len(rows)
    exact = torch.autograd.grad(total, list(learner.model.parameters()))
    seen: list[torch.Tensor] = []
    learner.apply = lambda lr: seen.extend(p.grad.clone() for p in learner.model.parameters()) or 0.0  # type: ignore
    loss = LossConfig(POLICY_LOSSES[policy_loss](), loss_type="sequence_sum", correction=M2PO(threshold, weigh))
    options = StepOptions(learning_rate=1e-3, **STEP | {"num_iterations": 1})
    metrics = OptimizerStep(learner, ADVANTAGES["dr_grpo"](), loss, NoScale(), options)(groups, 6)
    assert_equal(seen, list(exact), tolerance=1e-6)
    of_lag = {
        lag: [float(weights[b, t]) == 0 for b, t in mask.nonzero().tolist() if LAGS[b][t - 2] == lag] for lag in (0, 6)
    }
    assert not any(of_lag[0])
    assert sum(of_lag[6]) >= 4
    dropped = sum(float(weights[b, t]) == 0 for b, t in mask.nonzero().tolist())
    assert metrics["correction/clipped_share"] == pytest.approx(dropped / int(mask.sum()))
