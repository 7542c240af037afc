"""The KL term off policy: its gradient against that of the exact expectation, by enumeration.

Four tokens, rollouts of two: all sixteen are in the batch, each weighed by the chance that the sampler draws it. So the
update's gradient is the expectation over what is sampled, and what it should be can be written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from winnow.learner.base import Stats
from winnow.learner.batch import MicroBatch
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.methods.correct import Correction, Evidence
from winnow.methods.correct.m2po import M2PO
from winnow.methods.correct.mask import Mask
from winnow.methods.correct.none import NoCorrection
from winnow.methods.correct.truncate import Truncate
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import POLICY_LOSSES

from ..builders.toy_models import BETA, PROMPT, SEQUENCES, Toy, V, close, flat, model_of, parameters, toy

FREE = Truncate(level="sequence", high=None)
Slope = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def learned(t: Toy, loss: LossConfig) -> torch.Tensor:
    """The gradient that the learner adds up, with all advantages 0."""
    ids = torch.tensor([[*PROMPT, *sequence] for sequence in SEQUENCES])
    pad = torch.zeros(len(ids), len(PROMPT), dtype=torch.float64)
    batch = MicroBatch(
        input_ids_BT=ids,
        mask_BT=torch.arange(ids.shape[1]).ge(len(PROMPT)).expand(ids.shape),
        sampler_logp_BT=torch.cat([pad, t.sampler], dim=1),
        advantages_B=torch.zeros(len(ids), dtype=torch.float64),
        row_weight_B=t.sampler.sum(1).exp(),
    )
    learner = LocalLearner(model_of(0), TokenDistribution(V), LearnerOptions(), model_of(2))
    model_of(0).zero_grad()
    learner.forward_backward(batch, loss, Stats())
    return flat(p.grad for p in parameters()) / BETA


def of_coefficients(t: Toy, weight: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """Sum over sequences and tokens of sampler(y) * weight * coefficient * grad logp; no graph but that of logp."""
    value = (t.sampler.sum(1, keepdim=True).exp() * weight * coefficient * t.policy).sum()
    return flat(torch.autograd.grad(value, parameters(), retain_graph=True))


def divergence_gradient(t: Toy, estimator: str, states_V: torch.Tensor) -> torch.Tensor:
    """Of the sum over both tokens, the second at first tokens drawn with `states_V`. k1: 0."""
    total = torch.zeros((), dtype=torch.float64)
    for p, q, chance in ((t.policy_DV[0], t.reference_DV[0], 1.0), (t.policy_DV[1], t.reference_DV[1], states_V)):
        kl = (p.exp() * (p - q)).sum(-1) if estimator == "k2" else (q.exp() * (q - p)).sum(-1)
        total = total + (0 * kl if estimator == "k1" else chance * kl).sum()
    return flat(torch.autograd.grad(total, parameters(), retain_graph=True))


SLOPES: dict[str, Slope] = {
    "k1": lambda logp, ref: torch.ones_like(logp),
    "k2": lambda logp, ref: logp - ref,
    "k3": lambda logp, ref: 1 - (ref - logp).exp(),
}
"""d estimate / d logp."""
ESTIMATORS = list(SLOPES)


def config(estimator: Any, policy_loss: Any, correction: Correction, **options: Any) -> LossConfig:
    loss = POLICY_LOSSES[policy_loss](**options)
    return LossConfig(loss, beta=BETA, kl_estimator=estimator, correction=correction)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("policy_loss", ["clip", "plain"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_weights_of_rollouts_give_the_gradient_of_the_divergence(
    estimator: str, policy_loss: str, on_policy: bool
) -> None:
    """At the states that the policy visits. Without weights the gradient is off by a third of its size and more."""
    t = toy(on_policy)
    exact = divergence_gradient(t, estimator, t.policy_DV[0].detach().exp())
    close(learned(t, config(estimator, policy_loss, FREE)), exact)
    bare = of_coefficients(t, torch.ones(()), SLOPES[estimator](t.policy, t.reference).detach())
    apart = float((bare - exact).norm() / (exact.norm() + 1e-12))
    assert apart < 1e-5 * (1 + 1e12 * (estimator == "k1")) if on_policy else apart > 0.2


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("policy_loss", "correction"),
    [("clip", NoCorrection()), ("clip", Truncate("token", high=None)), ("plain", Truncate("token", high=None))],
)
def test_weights_of_tokens_give_it_at_the_states_of_the_sampler(
    estimator: str, policy_loss: str, correction: Correction
) -> None:
    """The clipped loss has such a weight without any correction, and no clip takes it away."""
    t = toy()
    sampler_V = t.sampler.exp()[::V, 0]
    close(learned(t, config(estimator, policy_loss, correction)), divergence_gradient(t, estimator, sampler_V))


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("policy_loss", ["clip", "plain"])
@pytest.mark.parametrize(
    "correction",
    [Truncate("sequence", 0.5, 1.5), Truncate("token", 0.8, 1.2), Mask("token", 0.5, 2.0), M2PO(threshold=0.5)],
)
def test_other_weights_are_those_of_the_policy_term(estimator: str, policy_loss: str, correction: Correction) -> None:
    """The gradient is the sum of sampler(y) * w * (d estimate / d logp) * grad logp with the w of the policy term."""
    t = toy()
    mask = torch.ones_like(t.sampler, dtype=torch.bool)
    weight, _ = correction(Evidence(t.policy.detach(), t.sampler, mask, torch.zeros(len(mask), dtype=torch.float64)))
    slope = SLOPES[estimator](t.policy, t.reference).detach()
    close(learned(t, config(estimator, policy_loss, correction)), of_coefficients(t, weight, slope))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gspo_weighs_it_with_the_ratio_of_the_rollout(estimator: str) -> None:
    t = toy()
    weight = (t.policy - t.sampler).detach().mean(1, keepdim=True).exp()
    slope = SLOPES[estimator](t.policy, t.reference).detach()
    ours = learned(t, config(estimator, "clip", NoCorrection(), importance_sampling_level="sequence"))
    close(ours, of_coefficients(t, weight, slope))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("policy_loss", ["clip", "plain"])
@pytest.mark.parametrize("correction", [NoCorrection(), FREE])
def test_on_policy_nothing_has_changed(estimator: str, policy_loss: str, correction: Correction) -> None:
    t = toy(on_policy=True)
    slope = SLOPES[estimator](t.policy, t.reference).detach()
    close(learned(t, config(estimator, policy_loss, correction)), of_coefficients(t, torch.ones(()), slope))
