"""How far an update's tokens are from the policy: every metric by brute force, whatever the micro-batches."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from winnow.learner.local.learner import LocalLearner
from winnow.learner.off_policy import lag_metrics, log_weights, sampling_metrics
from winnow.learner.rows import Row
from winnow.learner.step import OptimizerStep, StepOptions
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.correct import STEP_SCALES
from winnow.methods.correct.truncate import Truncate
from winnow.methods.lag_bands import LAG_BANDS
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain
from winnow.types import Group

from ..builders.groups import make_group, make_rollout
from ..builders.off_policy import STEP
from .learner_models import learner_of, llama


def quantile(values: list[float], q: float) -> float:
    """Linear between the two neighbours."""
    values, at = sorted(values), q * (len(values) - 1)
    low = math.floor(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def test_every_figure_by_brute_force() -> None:
    draw = np.random.default_rng(0)
    rows = [draw.normal(0, 0.4, int(n)).tolist() for n in draw.integers(1, 9, 23)]
    tokens, log_w = [d for row in rows for d in row], [math.fsum(row) for row in rows]
    w, ratios = [math.exp(x) for x in log_w], [math.exp(d) for d in tokens]
    expected = {
        "sampling/sampling_logp_difference/mean": math.fsum(map(abs, tokens)) / len(tokens),
        "sampling/sampling_logp_difference/max": max(map(abs, tokens)),
        "sampling/importance_sampling_ratio/min": min(ratios),
        "sampling/importance_sampling_ratio/mean": math.fsum(ratios) / len(tokens),
        "sampling/importance_sampling_ratio/max": max(ratios),
        "sampling/kl": math.fsum(r - 1 - d for r, d in zip(ratios, tokens, strict=True)) / len(tokens),
        "sampling/log_ratio/p05": quantile(log_w, 0.05),
        "sampling/log_ratio/p50": quantile(log_w, 0.5),
        "sampling/log_ratio/p95": quantile(log_w, 0.95),
        "sampling/log_ratio/max": max(log_w),
        "ess_ratio/with_gradient": math.fsum(w) ** 2 / math.fsum(x * x for x in w) / len(w),
    }
    found = sampling_metrics(torch.tensor(tokens, dtype=torch.float64), torch.tensor(log_w, dtype=torch.float64))
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_divergence_is_that_of_sampler_to_learner() -> None:
    """Over all tokens, each as often as the sampler draws it, the estimate is the divergence itself."""
    sampler, learner = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.125, 0.625, 0.25]).double()
    drawn = torch.tensor([0, 0, 1, 2])
    log_ratio = (learner.log() - sampler.log())[drawn]
    kl = float((sampler * (sampler.log() - learner.log())).sum())
    assert sampling_metrics(log_ratio, log_ratio)["sampling/kl"] == pytest.approx(kl, rel=1e-12)


def test_on_policy_everything_is_at_its_neutral_value() -> None:
    found = sampling_metrics(torch.zeros(7), torch.zeros(3))
    ones = {name for name in found if "importance_sampling_ratio" in name} | {"ess_ratio/with_gradient"}
    assert found == {name: float(name in ones) for name in found}


def test_lags_are_counted_by_token() -> None:
    versions = [[20, 20, 19], [18, 17, 12], [4, 3, 0], [16, 15, 11]]
    rows = []
    for ages in versions:
        rollout = make_rollout(0, 4, 1.0, env_tokens=1)
        rollout.versions[1:] = ages
        rows.append(Row(rollout, 1.0, 1.0))
    found = lag_metrics(rows, 20)
    lags = [20 - v for ages in versions for v in ages]
    assert (found["lag/mean"], found["lag/max"]) == (sum(lags) / 12, 20)
    counts = {"0": 2, "1": 1, "2": 1, "3-4": 2, "5-8": 2, "9-16": 2, "17_up": 2}
    assert {name: found[f"lag/{name}"] for name in LAG_BANDS} == {n: c / 12 for n, c in counts.items()}


@pytest.mark.parametrize("scale", ["none", "ess"])
def test_micro_batches_do_not_matter_and_the_step_size_goes_by_what_is_shown(scale: str) -> None:
    draw = np.random.default_rng(0)
    sampler_logp = [draw.normal(-3.5, 0.5, 2 + n).astype(np.float32) for n in range(9)]

    def metrics_of(tokens: int) -> dict[str, float]:
        groups = [make_group(n, [1.0, 0.0, 0.3], [3 * n + i + 2 for i in range(3)], version=n) for n in range(3)]
        for n, rollout in enumerate(r for g in groups for r in g.rollouts):
            rollout.sampler_logp = sampler_logp[n]
        loss, build = LossConfig(policy_loss=Plain(), correction=Truncate()), STEP_SCALES[scale]().build()
        options = StepOptions(learning_rate=1e-3, **STEP)
        step = OptimizerStep(learner_of(llama().double(), tokens=tokens), ADVANTAGES["grpo"](), loss, build, options)
        return step(groups, 4)

    whole = metrics_of(10_000)
    for tokens in (1, 40):
        assert metrics_of(tokens) == pytest.approx(whole, rel=1e-6, abs=1e-12)
    assert 1 / 9 < whole["ess_ratio"] < 0.9
    shrunk = whole["effective_learning_rate"] / whole["learning_rate"]
    assert shrunk == pytest.approx(whole["ess_ratio"] ** 0.5 if scale == "ess" else 1.0)
    assert (whole["lag/max"], whole["lag/2"], whole["lag/3-4"]) == (4, 27 / 54, (18 + 9) / 54)


def sixteen_rollouts() -> list[Group]:
    """Of four groups two have a signal. A rollout of the third, whose rewards are all 1, has a large ratio."""
    draw, groups = np.random.default_rng(1), []
    for n, rewards in enumerate([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0] * 4, [0.0, 1.0, 0.0, 0.0]]):
        groups.append(make_group(n, rewards, [3, 6, 4, 5]))
        for rollout in groups[-1].rollouts:
            rollout.sampler_logp = draw.normal(-3.5, 0.4, len(rollout.token_ids)).astype(np.float32)
    groups[2].rollouts[1].sampler_logp -= 1.0
    return groups


@pytest.mark.parametrize("advantage", ["dr_grpo", "opob", "otb"])
def test_all_rollouts_of_the_batch_count_in_the_effective_sample_size(advantage: str) -> None:
    """Also those without a gradient; with a KL term too small to matter, which gives them one, nothing changes."""
    groups, model = sixteen_rollouts(), llama().double()
    rows = [Row(rollout, 0.0, 0.0) for group in groups for rollout in group.rollouts]
    logps = learner_of(model).logp(rows)
    log_w = [float(x.sum()) - float(r.rollout.sampler_logp.sum()) for x, r in zip(logps, rows, strict=True)]
    w = [math.exp(x) for x in log_w]
    expected, of_eight = (math.fsum(x) ** 2 / math.fsum(y * y for y in x) / len(x) for x in (w, w[:4] + w[12:]))

    def metrics_of(scale: str, beta: float) -> dict[str, float]:
        loss, learner = (
            LossConfig(policy_loss=Plain(), correction=Truncate(), beta=beta),
            learner_of(copy.deepcopy(model), copy.deepcopy(model)),
        )
        options = StepOptions(learning_rate=1e-3, **STEP)
        step = OptimizerStep(learner, ADVANTAGES[advantage](), loss, STEP_SCALES[scale]().build(), options)
        return step(groups, 1)

    found = metrics_of("ess", 0.0)
    assert (found["rows"], found["rows_with_gradient"]) == (16, 8)
    assert found["ess_ratio"] == pytest.approx(expected, rel=1e-6)
    assert found["effective_learning_rate"] == pytest.approx(1e-3 * expected**0.5, rel=1e-6)
    assert found["ess_ratio/with_gradient"] == pytest.approx(of_eight, rel=1e-6)
    assert expected < 0.7 * of_eight, "otherwise this proves nothing"
    if advantage == "dr_grpo":  # the others refuse a KL term
        for scale in ("none", "ess"):
            assert metrics_of(scale, 1e-12)["ess_ratio"] == pytest.approx(expected, rel=1e-6)


def test_ratios_that_nothing_needs_cost_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLearner, "logp", None)
    for rewards, known in (([1.0, 0.0], True), ([1.0, 1.0], False)):
        groups = [make_group(0, [1.0, 0.0]), make_group(1, rewards)]
        loss, scale = LossConfig(policy_loss=Plain()), STEP_SCALES["none"]().build()
        options = StepOptions(learning_rate=1e-3, **STEP)
        found = OptimizerStep(learner_of(llama()), ADVANTAGES["rloo"](), loss, scale, options)(groups, 0)
        assert ("ess_ratio" in found) == known
        assert found["learning_rate"] == found["effective_learning_rate"] == 1e-3


def test_a_rollout_without_a_token_has_a_ratio_of_1() -> None:
    learner = learner_of(llama())
    empty, full = make_rollout(0, 2, 1.0, env_tokens=2), make_rollout(1, 3, 1.0)
    assert log_weights([Row(empty, 0.0, 0.0)], learner).tolist() == [0.0]
    both = log_weights([Row(empty, 0.0, 0.0), Row(full, 0.0, 0.0)], learner)
    assert both[0] == 0.0
    assert float(both[1]) == pytest.approx(float(learner.logp([Row(full, 0.0, 0.0)])[0].double().sum()) + 3)
