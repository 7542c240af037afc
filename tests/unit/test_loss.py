from __future__ import annotations

import math

import pytest
import torch

from winnow.methods.correct.mask import Mask
from winnow.methods.correct.ratios import Evidence, Level
from winnow.methods.correct.truncate import Truncate
from winnow.methods.loss import LossConfig, kl_divergence
from winnow.methods.policy_loss import POLICY_LOSSES, Clip, Plain, PolicyLoss, Sampled

torch.manual_seed(0)
B, T = 5, 7
LOGP = torch.randn(B, T, dtype=torch.float64) - 2
OLD = LOGP + 0.4 * torch.randn(B, T, dtype=torch.float64)
ADVANTAGES = torch.tensor([1.5, -0.7, 0.0, 2.0, -3.0], dtype=torch.float64)
WEIGHTS = torch.rand(B, T, dtype=torch.float64)
MASK = torch.rand(B, T) < 0.7


def of_tokens(
    loss: PolicyLoss, logp: torch.Tensor = LOGP, old: torch.Tensor = OLD, weights: torch.Tensor = WEIGHTS
) -> tuple[torch.Tensor, torch.Tensor]:
    return loss(Sampled(logp, old, ADVANTAGES[:, None], weights, MASK))


@pytest.mark.parametrize("epsilon_high", [None, 0.28])
def test_clipped_loss_token_by_token(epsilon_high: float | None) -> None:
    loss, clipped = of_tokens(Clip(epsilon=0.2, epsilon_high=epsilon_high))
    high = 1 + (epsilon_high or 0.2)
    for b in range(B):
        for t in range(T):
            ratio, a = math.exp(LOGP[b, t] - OLD[b, t]), float(ADVANTAGES[b])
            bounded = min(max(ratio, 0.8), high)
            assert float(loss[b, t]) == pytest.approx(-float(WEIGHTS[b, t]) * min(ratio * a, bounded * a), rel=1e-12)
            assert bool(clipped[b, t]) == ((a > 0 and ratio > high) or (a < 0 and ratio < 0.8))
    assert clipped.any()
    assert not clipped.all()


def test_clipped_tokens_have_no_gradient() -> None:
    logp = LOGP.clone().requires_grad_()
    loss, clipped = of_tokens(Clip(), logp, weights=torch.ones(B, T))
    loss.sum().backward()
    assert (logp.grad[clipped] == 0).all()
    assert (logp.grad[~clipped & (ADVANTAGES[:, None] != 0)] != 0).all()


def test_gspo_clips_the_geometric_mean_of_a_rollouts_ratios() -> None:
    config = Clip(epsilon=0.1, epsilon_high=0.2, importance_sampling_level="sequence")
    logp = LOGP.clone().requires_grad_()
    loss, clipped = of_tokens(config, logp)
    (loss * MASK).sum().backward()
    for b in range(B):
        rows = MASK[b]
        ratio, a, n = math.exp(float((LOGP - OLD)[b, rows].mean())), float(ADVANTAGES[b]), int(rows.sum())
        out = (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.9)
        surrogate = min(ratio * a, min(max(ratio, 0.9), 1.2) * a)
        torch.testing.assert_close(loss[b].detach(), -WEIGHTS[b] * surrogate)
        assert clipped[b].tolist() == [out] * T
        # d ratio / d logp_t = ratio / n on the mask; every token's loss holds the one ratio
        slope = 0.0 if out else -float(WEIGHTS[b][rows].sum()) * a * ratio / n
        torch.testing.assert_close(logp.grad[b], slope * rows.double())


def test_plain_loss_gradient_is_the_policy_gradient() -> None:
    logp = LOGP.clone().requires_grad_()
    loss, _ = of_tokens(Plain(), logp)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, -WEIGHTS * ADVANTAGES[:, None])


def test_on_policy_all_have_the_same_gradient() -> None:
    grads = []
    for kind in ("clip", "plain", "cispo", "sapo", "gspo_token", "dppo"):
        logp = LOGP.clone().requires_grad_()
        loss, _ = of_tokens(POLICY_LOSSES[kind](), logp, LOGP, torch.ones(B, T))
        loss.sum().backward()
        grads.append(logp.grad)
    for other in grads[1:]:
        torch.testing.assert_close(grads[0], other)


def test_kl_estimators_are_right_in_expectation() -> None:
    """Over the whole vocabulary: E k1 = E k3 = KL exactly; k2's gradient is KL's gradient (enumerated)."""
    logits, ref_logits = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = logits.requires_grad_()
    logp, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    p = logp.exp().detach()
    true_kl = (logp.exp() * (logp - ref)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((p * kl_divergence(logp, ref, estimator)).sum(), true_kl)
    (true_gradient,) = torch.autograd.grad(true_kl, logits, retain_graph=True)
    (k2_gradient,) = torch.autograd.grad((p * kl_divergence(logp, ref, "k2")).sum(), logits, retain_graph=True)
    torch.testing.assert_close(k2_gradient, true_gradient)
    assert (kl_divergence(logp, ref, "k3") >= 0).all()
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_divergence(logp, ref, "k4")


@pytest.mark.parametrize("bad", [{"epsilon": 0.0}, {"epsilon_high": -1.0}])
def test_bad_options_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Clip(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beta"):
        LossConfig(beta=-0.1)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling(level: str) -> None:
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 3:] = False
    weights, metrics = Truncate(level=level, low=0.5, high=2.0)(Evidence(LOGP, OLD, mask, ADVANTAGES))
    for b in range(B):
        log_ratios = [(float(LOGP[b, t] - OLD[b, t]) if mask[b, t] else 0.0) for t in range(T)]
        for t in range(T):
            ratio = math.exp(sum(log_ratios) if level == "sequence" else log_ratios[t])
            got = float(weights[b, 0] if level == "sequence" else weights[b, t])
            assert got == pytest.approx(min(max(ratio, 0.5), 2.0), rel=1e-12)
    assert metrics["clipped_of"] == (B if level == "sequence" else mask.sum())
    assert not weights.requires_grad


def test_truncation_cannot_overflow() -> None:
    logp = torch.full((1, 4), 600.0)
    weights, _ = Truncate()(Evidence(logp, -logp, torch.ones(1, 4, dtype=torch.bool), torch.ones(1)))
    assert weights.item() == pytest.approx(8.0)
    weights, _ = Truncate(high=None)(Evidence(logp, -logp, torch.ones(1, 4, dtype=torch.bool), torch.ones(1)))
    assert torch.isfinite(weights).all()
    with pytest.raises(ValueError, match="low < high"):
        Truncate(low=2.0, high=1.0)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("only_negative", [False, True])
@pytest.mark.parametrize("weigh", [False, True])
def test_masking_element_by_element(level: Level, only_negative: bool, weigh: bool) -> None:
    low, high = 0.995, 1.005  # narrow enough that every kind of row is outside now and then
    rule = Mask(level=level, low=low, high=high, only_negative=only_negative, weigh=weigh)
    weights, metrics = rule(Evidence(LOGP, OLD, MASK, ADVANTAGES))
    weights, clipped, of = weights.expand(B, T), 0, 0
    for b in range(B):
        differences = (LOGP - OLD)[b, MASK[b]]
        for t in range(T):
            whole = {"sequence": differences.sum(), "geometric": differences.mean()}
            log_w = float(whole.get(level, (LOGP - OLD)[b, t] if MASK[b, t] else torch.tensor(0.0)))
            outside = not low <= math.exp(log_w) <= high and (not only_negative or float(ADVANTAGES[b]) < 0)
            assert float(weights[b, t]) == pytest.approx(0.0 if outside else math.exp(log_w) if weigh else 1.0)
            if bool(MASK[b, t]) if level == "token" else t == 0:
                clipped, of = clipped + outside, of + 1
    assert metrics == {"clipped": clipped, "clipped_of": of}
    assert clipped > 0


def test_a_mask_never_gives_an_infinite_weight() -> None:
    far = torch.full((1, 4), 500.0)
    weights, metrics = Mask(high=None)(Evidence(far, -far, torch.ones(1, 4, dtype=torch.bool), torch.ones(1)))
    assert torch.isfinite(weights).all()
    assert metrics["clipped"] == 0
    weights, _ = Mask(high=2.0, only_negative=True)(
        Evidence(far, -far, torch.ones(1, 4, dtype=torch.bool), torch.ones(1))
    )
    assert torch.isfinite(weights).all()
    with pytest.raises(ValueError, match="low < high"):
        Mask(low=1.0, high=0.5)
