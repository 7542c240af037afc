"""Importance ratios and effective sample size against direct computation."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.methods.correct import effective_sample_size, log_ratio, lr_scale
from winnow.methods.correct.ess import Ess


def test_ratios_of_every_level() -> None:
    logp = torch.tensor([[-1.0, -2.0, 5.0], [-0.5, float("nan"), -1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    sampler = torch.tensor([[-1.5, -1.0, -9.0], [-1.5, 1.0, -3.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    assert log_ratio(logp, sampler, mask, "token").tolist() == [[0.5, -1.0, 0.0], [1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
    assert log_ratio(logp, sampler, mask, "sequence").tolist() == [[-0.5], [3.0], [0.0]]
    assert log_ratio(logp, sampler, mask, "geometric").tolist() == [[-0.25], [1.5], [0.0]]
    with pytest.raises(ValueError, match="level must be"):
        log_ratio(logp, sampler, mask, "word")  # type: ignore[arg-type]


def test_a_ratio_has_no_gradient() -> None:
    logp = torch.zeros(1, 2, requires_grad=True)
    assert not log_ratio(logp, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), "sequence").requires_grad


@given(st.lists(st.floats(-600, 600), min_size=1, max_size=30))
def test_ess_agrees_with_exact_arithmetic_over_a_huge_range(log_weights: list[float]) -> None:
    found = effective_sample_size(torch.tensor(log_weights, dtype=torch.float64))
    top = max(log_weights)
    exact = [Fraction(math.exp(w - top)) for w in log_weights]
    expected = sum(exact) ** 2 / sum(w**2 for w in exact)
    assert found == pytest.approx(float(expected), rel=1e-9)
    assert 1 - 1e-9 <= found <= len(log_weights) + 1e-9


def test_ess_of_known_batches() -> None:
    assert effective_sample_size(torch.zeros(7)) == pytest.approx(7)
    assert effective_sample_size(torch.tensor([600.0, -600.0, -600.0])) == pytest.approx(1)
    assert effective_sample_size(torch.tensor([0.0, 0.0, -math.inf])) == pytest.approx(2)
    for bad in ([], [math.nan], [math.inf, 0.0], [-math.inf, -math.inf]):
        with pytest.raises(ValueError, match="log weights below infinity"):
            effective_sample_size(torch.tensor(bad))


def test_the_learning_rate_shrinks_with_the_root_of_the_ess_ratio_and_never_grows() -> None:
    assert lr_scale(0.25) == 0.5
    assert lr_scale(0.2, reference=0.8) == 0.5
    assert lr_scale(0.9, reference=0.8) == 1.0


def test_the_reference_is_fixed_or_measured_and_resumes() -> None:
    fixed = Ess(reference=0.8).build()
    assert fixed(0.2) == pytest.approx(0.5)
    assert fixed.metrics() == {"ess_ratio/reference": 0.8}
    measured = Ess(reference="measured", measured_steps=2).build()
    assert measured.reference is None
    assert [measured(0.9), measured(0.7)] == [1.0, 1.0]
    assert measured.reference == pytest.approx(0.8)
    resumed = Ess(reference="measured", measured_steps=2).build()
    resumed.load_state_dict(measured.state_dict())
    assert resumed(0.2) == measured(0.2) == pytest.approx(0.5)
    for bad in ({"reference": 0.0}, {"reference": "guessed"}, {"measured_steps": 0}):
        with pytest.raises(ValueError, match=r"must lie in|greater than 0"):
            Ess(**bad)
