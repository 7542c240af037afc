"""Updates in float16: small gradients survive, overflows are computed again; where there is no float16, a refusal.

The arithmetic is that of the CPU's autocast. No device with float16 units has run it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from winnow import ConfigError, Trainer
from winnow.config import validate
from winnow.learner.base import Stats
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.loss_scale import START_FACTOR, LossScale
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain
from winnow.run.build_methods import build_methods
from winnow.run.resolved import Options

from ..parity import parity_reward
from .learner_models import VOCABULARY, llama, random_rows

LOSS = LossConfig(policy_loss=Plain())
TINY = 1e-7
"""Weight of a row: of the size that a token has in a batch of ten million, so that the effect can be seen here."""


def learner_in(dtype: torch.dtype) -> LocalLearner:
    return LocalLearner(llama(), TokenDistribution(VOCABULARY), LearnerOptions(compute_dtype=dtype))


def gradients(learner: LocalLearner, weight: float) -> tuple[torch.Tensor, Stats]:
    rows = [replace(row, weight=weight) for row in random_rows()]
    stats = learner.accumulate(rows, LOSS)
    return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]), stats


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_small_gradients_are_not_rounded_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, _ = gradients(learner_in(torch.float32), TINY)
    scaled, _ = gradients(learner_in(torch.float16), TINY)
    assert distance(scaled, exact) < 0.02
    monkeypatch.setattr("winnow.learner.local.loss_scale.START_FACTOR", 1.0)
    plain, _ = gradients(learner_in(torch.float16), TINY)
    assert distance(plain, exact) > 0.2


def test_a_batch_whose_gradients_overflow_is_computed_again() -> None:
    """With the same sums: nothing is counted twice."""
    exact, stats = gradients(learner_in(torch.float32), 10.0)
    learner = learner_in(torch.float16)
    scaled, again = gradients(learner, 10.0)
    assert learner._scale is not None
    assert learner._scale.factor < START_FACTOR
    assert distance(scaled, exact) < 0.02
    assert again.sums["tokens"] == stats.sums["tokens"]
    assert learner.apply(1e-3) == pytest.approx(float(exact.norm()), rel=0.02)


def test_gradients_that_never_fit_end_the_run() -> None:
    scale, parameter = LossScale(), torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, torch.inf])
    for _ in range(16):
        assert not scale.fits([parameter])
        parameter.grad = torch.tensor([1.0, torch.inf])
    with pytest.raises(FloatingPointError, match=r"overflow float16.*dtype: bfloat16"):
        scale.fits([parameter])


def test_the_factor_grows_again_after_many_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.learner.local.loss_scale.GROWTH_UPDATES", 3)
    scale, parameter = LossScale(), torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    for _ in range(3):
        assert scale.fits([parameter])
    assert scale.factor == 2 * START_FACTOR


def test_a_cpu_refuses_it_with_the_remedy(tiny_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"dtype: float16 needs a CUDA device.*uses cpu; set dtype: bfloat16"):
        Trainer(config=tiny_config | {"dtype": "float16", "device": "cpu"}, reward_funcs=parity_reward)


def test_exact_gradient_norms_refuse_it(tiny_config: dict[str, Any]) -> None:
    c = validate(tiny_config | {"dtype": "float16", "advantage": "opob", "policy_loss": "plain"})
    with pytest.raises(ConfigError, match=r"advantage: opob .*float16 rounds to 0; set dtype"):
        build_methods(c, Options.from_config(c), [])
