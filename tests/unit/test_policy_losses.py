"""The losses of the field: TRL's own where it has them, else their formulas token by token; and in a run."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from winnow import ConfigError
from winnow.config import RunConfig, validate
from winnow.env.rewards.simple import SoftOverlong
from winnow.methods.correct.none import NoCorrection
from winnow.methods.loss import LossConfig, kl_loss
from winnow.methods.policy_loss import POLICY_LOSSES, Clip, PolicyLoss, Sampled
from winnow.methods.policy_loss.base import rollout_log_ratio
from winnow.run.build import build_rewarder
from winnow.run.build_methods import build_methods, build_success
from winnow.run.conflicts import require_loss
from winnow.run.resolved import Options, loss_config
from winnow.tasks.countdown import CountdownConfig

B, T = 6, 9
draw = torch.Generator().manual_seed(3)
LOGP = -3 * torch.rand(B, T, dtype=torch.float64, generator=draw)
OLD = (LOGP + 0.8 * torch.randn(B, T, dtype=torch.float64, generator=draw)).clamp(max=-1e-9)
A = torch.tensor([1.5, -0.7, 0.0, 2.0, -3.0, 0.4], dtype=torch.float64)
MASK = torch.rand(B, T, generator=draw) < 0.8
WEIGHTS = torch.rand(B, T, dtype=torch.float64, generator=draw)


def sampled(logp: torch.Tensor, weights: torch.Tensor | None = None, **changes: Any) -> Sampled:
    weights = torch.ones(B, T, dtype=torch.float64) if weights is None else weights
    return Sampled(logp, OLD, A[:, None], weights, MASK)._replace(**changes)


def by_trl(logp: torch.Tensor, loss_type: str, level: str = "token", **args: float) -> torch.Tensor:
    """What TRL's trainer computes for these tokens, divided by their number or as mean of rollouts."""
    trl = pytest.importorskip("trl")
    trainer = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=args.get("epsilon", 0.2),
        epsilon_high=args.get("epsilon_high", 0.2),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, **args),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        model=SimpleNamespace(training=False),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=0.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros_like(logp), None),
    )
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": MASK.long(),
        "advantages": A,
        "old_per_token_logps": OLD,
        "num_items_in_batch": MASK.sum(),
    }
    found: torch.Tensor = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    return found


@pytest.mark.parametrize(
    ("ours", "loss_type", "args"),
    [
        ({"name": "cispo"}, "cispo", {"epsilon_high": 5.0}),
        ({"name": "cispo", "epsilon_high": 1.1}, "cispo", {"epsilon_high": 1.1}),
        ({"name": "sapo"}, "sapo", {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}),
        (
            {"name": "sapo", "sapo_temperature_pos": 3.0, "sapo_temperature_neg": 0.5},
            "sapo",
            {"sapo_temperature_pos": 3.0, "sapo_temperature_neg": 0.5},
        ),
        ({"name": "clip"}, "dapo", {}),
    ],
)
def test_value_and_gradient_are_those_of_trl(ours: dict[str, Any], loss_type: str, args: dict[str, float]) -> None:
    logp, theirs = LOGP.clone().requires_grad_(), LOGP.clone().requires_grad_()
    loss, _ = built(ours).policy_loss(sampled(logp))
    mean = (loss * MASK).sum() / MASK.sum()
    if loss_type == "sapo":  # TRL's mean is over a rollout's tokens first
        mean = ((loss * MASK).sum(1) / MASK.sum(1)).mean()
    expected = by_trl(theirs, loss_type, **args)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-14)
    mean.backward()
    expected.backward()
    torch.testing.assert_close(logp.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def built(spec: Any, **changes: Any) -> LossConfig:
    c: RunConfig = validate({"model": "m", "env": "countdown", "policy_loss": spec} | changes)
    options = Options.from_config(c)
    require_loss(c, options)
    return loss_config(c, options)


@pytest.mark.parametrize("kind", ["binary_tv", "binary_kl"])
def test_dppo_leaves_out_what_moves_too_far_from_the_sampler(kind: str) -> None:
    options = {"divergence_type": kind, "epsilon": 0.05, "epsilon_high": 0.1, "clip_ratio_c": 2.0}
    logp = LOGP.clone().requires_grad_()
    loss, outside = POLICY_LOSSES["dppo"](**options)(sampled(logp, WEIGHTS))
    (loss * MASK).sum().backward()
    for b in range(B):
        for t in range(T):
            p, q, a = math.exp(float(LOGP[b, t])), math.exp(float(OLD[b, t])), float(A[b])
            d = abs(p - q)
            if kind == "binary_kl":
                d = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            out = (a > 0 and p > q and d > 0.1) or (a < 0 and p < q and d > 0.05)
            assert bool(outside[b, t]) == out
            r, w = p / q, float(WEIGHTS[b, t])
            assert float(loss[b, t]) == pytest.approx(0.0 if out else -w * min(r, 2.0) * a, rel=1e-9, abs=1e-12)
            slope = 0.0 if out or r > 2 or not MASK[b, t] else -w * r * a
            assert float(logp.grad[b, t]) == pytest.approx(slope, rel=1e-9, abs=1e-12)  # type: ignore[index]
    assert 0 < int(outside.sum()) < B * T


def test_dppo_is_finite_where_a_token_is_certain() -> None:
    certain = torch.zeros(B, T, dtype=torch.float64)
    for logp, old in ((certain, OLD), (LOGP, certain), (certain, certain)):
        on = sampled(logp, old_logp_BT=old)
        loss, _ = POLICY_LOSSES["dppo"](divergence_type="binary_kl")(on)
        assert torch.isfinite(loss).all()


def test_what_lies_outside_the_mask_reaches_no_ratio() -> None:
    logp = OLD.masked_fill(~MASK, torch.nan).requires_grad_()
    ratio = rollout_log_ratio(sampled(logp))
    assert (ratio == 0).all()
    ratio.sum().backward()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()


def test_gspo_token_has_the_gradient_of_gspo_and_takes_advantages_of_tokens() -> None:
    grads = []
    for loss in (Clip(0.05, 0.07, "sequence"), POLICY_LOSSES["gspo_token"](epsilon=0.05, epsilon_high=0.07)):
        logp = LOGP.clone().requires_grad_()
        per_token, limited = loss(sampled(logp))
        ((per_token * MASK).sum(1) / MASK.sum(1)).sum().backward()
        grads.append(logp.grad)
        assert limited.any()
        assert not limited.all()
    torch.testing.assert_close(*grads)
    each = torch.linspace(-1, 1, B * T, dtype=torch.float64).view(B, T)
    logp = LOGP.clone().requires_grad_()
    per_token, limited = POLICY_LOSSES["gspo_token"](epsilon=0.05, epsilon_high=0.07)(sampled(logp, advantages=each))
    per_token.sum().backward()
    s = (((LOGP - OLD) * MASK).sum(1) / MASK.sum(1)).exp()[:, None]
    torch.testing.assert_close(logp.grad, torch.where(limited, 0.0, -s * each))


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "plain"])
def test_a_kl_is_weighed_with_the_whole_ratio(name: str) -> None:
    """No limit of the policy loss takes it away."""
    loss = POLICY_LOSSES[name]()
    on, reference = sampled(LOGP, WEIGHTS), OLD - 0.3
    ratio = (LOGP - OLD).exp()
    if name == "gspo_token":
        ratio = (((LOGP - OLD) * MASK).sum(1) / MASK.sum(1)).exp()[:, None]
    expected = WEIGHTS * ratio * ((reference - LOGP).exp() - 1 - (reference - LOGP))
    torch.testing.assert_close(kl_loss(on, reference, LossConfig(loss, correction=NoCorrection())), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy_loss": "cispoo"}, "policy_loss: unknown name 'cispoo'. Did you mean 'cispo'?"),
        ({"policy_loss": {"name": "cispo", "epsilon": 0.2}}, r"policy_loss \(cispo\): unknown option 'epsilon'"),
        (
            {"policy_loss": {"name": "cispo", "epsilon_high": 0.0}},
            "epsilon_high must be > 0, not 0.0; it is the largest",
        ),
        ({"policy_loss": {"name": "sapo", "sapo_temperature_neg": -1}}, "sapo_temperature_neg must be > 0"),
        ({"policy_loss": "sapo", "epsilon_high": 0.28}, "epsilon_high: 0.28 has no effect with policy_loss: sapo"),
        (
            {"policy_loss": "dppo", "correction": "truncate"},
            "policy_loss: dppo has no effect with correction: truncate",
        ),
        ({"policy_loss": "cispo", "advantage": "opob"}, "set policy_loss: plain, not cispo"),
    ],
)
def test_what_has_no_effect_or_is_wrong_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        all_built({"model": "m", "env": "countdown"} | changes)


def all_built(settings: dict[str, Any]) -> None:
    c = validate(settings)
    options = Options.from_config(c)
    build_methods(c, options, [], lambda rollout: False)  # type: ignore[arg-type]


def test_keys_of_clip_are_those_of_the_configuration() -> None:
    loss = built("clip", epsilon=0.1, epsilon_high=0.3, importance_sampling_level="sequence").policy_loss
    assert loss == Clip(0.1, 0.3, "sequence")
    assert built({"name": "clip", "epsilon": 0.4}).policy_loss == Clip(0.4)
    assert built({"name": "clip"}, correction="truncate").policy_loss == Clip(), "a section is no change"
    assert isinstance(built("dppo", num_iterations=2, correction="truncate").policy_loss, PolicyLoss)


def test_a_loss_of_ones_own_is_named_by_its_file(tmp_path: Path) -> None:
    """The one of docs/training.md."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?class SquareRoot.*?)```", text, re.DOTALL)
    assert code is not None
    (tmp_path / "my_loss.py").write_text(code[1], encoding="utf-8")
    loss = built(f"{tmp_path}/my_loss.py:SquareRoot", max_lag=1).policy_loss
    logp = LOGP.clone().requires_grad_()
    per_token, limited = loss(sampled(logp, old_logp_BT=LOGP))
    per_token.sum().backward()
    torch.testing.assert_close(logp.grad, -A[:, None].expand(B, T))
    assert not limited.any()


def test_long_completions_are_punished_and_none_is_wrong_for_it(tmp_path: Path) -> None:
    punish = SoftOverlong(100, 20)
    assert punish([[0] * n for n in (0, 80, 85, 100, 120)]) == [0.0, 0.0, -0.25, -1.0, -1.0]
    settings = {"model": "m", "env": "countdown", "max_completion_length": 100, "soft_overlong_cache": 20}
    task = CountdownConfig(train_size=8, test_size=4).build()
    rewarder = build_rewarder(validate(settings), task)
    try:
        success = build_success(validate(settings), task, rewarder.aliases, None)
        assert rewarder.names == ["countdown_reward", "soft_overlong"]
        assert str(success) == "countdown_reward >= 1 (the default)"
        weighted = build_rewarder(validate(settings | {"reward_weights": [2.0]}), task)
        assert weighted.names == rewarder.names
        weighted.close()
    finally:
        rewarder.close()
    with pytest.raises(ConfigError, match="soft_overlong_cache: 101 must be at most max_completion_length=100"):
        build_rewarder(validate(settings | {"soft_overlong_cache": 101}), task)
