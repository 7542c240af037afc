"""The quality head, and the figures that say how well it predicts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from winnow.base.array_json import pack
from winnow.methods.gate.arrol.gate import Arrol
from winnow.methods.gate.arrol.head import FILE, HeadWeights, QualityHead
from winnow.methods.gate.arrol.stats import Realised
from winnow.methods.posterior import auroc

from ..builders.arrol import H, built, play


def test_a_head_that_diverges_is_thrown_away() -> None:
    head = QualityHead(0)
    for i in range(50):
        head.observe(np.ones(H, np.float32), -0.5, i % 2 == 0, 1.0)
    head.fit()
    assert head._net is not None
    with torch.no_grad():
        head._net[0].weight[:] = float("nan")
    head.fit()
    assert (head.resets, head._net, head.weights.score(np.ones(H, np.float32), -0.5)) == (1, None, 0.0)
    head.fit()
    assert np.isfinite(head.weights.score(np.ones(H, np.float32), -0.5))


def test_the_head_loads_alone(tmp_path: Path) -> None:
    gate = built(Arrol(at=4))
    gate.save(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is learned yet"
    with pytest.raises(ValueError, match=r"quality_head\.safetensors: is no quality head"):
        HeadWeights.load(tmp_path)
    play(gate, 3)
    gate.save(tmp_path)
    alone = HeadWeights.load(tmp_path)
    hidden = np.random.default_rng(0).normal(size=H).astype(np.float32)
    assert alone.score(hidden, -0.3) == gate.head.weights.score(hidden, -0.3)
    (tmp_path / "other.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is no quality head"):
        HeadWeights.load(tmp_path / "other.safetensors")


def test_the_head_learns_what_the_hidden_state_and_the_logp_tell() -> None:
    rng, head, scores, labels = np.random.default_rng(0), QualityHead(0), [], []
    for step in range(60):
        for _ in range(64):
            hidden, logp = rng.normal(size=H).astype(np.float32), float(-rng.random())
            label = bool(rng.random() < 1 / (1 + np.exp(-2 * hidden[0] - 4 * (logp + 0.5))))
            if step >= 40:
                scores.append(head.weights.score(hidden, logp))
                labels.append(label)
            head.observe(hidden, logp, label, 1.0)
        head.fit()
    assert auroc(np.array(scores), np.array(labels), np.ones(len(labels))) > 0.8


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"moments": torch.tensor(1.0)}, "is no quality head"),
        ({"moments": torch.tensor([0.0, 0.0], dtype=torch.float64)}, "not finite"),
        ({"second.bias": torch.zeros(3)}, "do not fit together"),
        ({"first.weight": torch.zeros(5)}, "is no quality head"),
        ({"first.bias": torch.full((128,), float("nan"))}, "not finite"),
    ],
)
def test_a_damaged_head_is_refused(tmp_path: Path, changes: dict[str, torch.Tensor], problem: str) -> None:
    gate = built(Arrol(at=4))
    play(gate, 3)
    gate.save(tmp_path)
    tensors = load_file(tmp_path / FILE)
    save_file(tensors | changes, tmp_path / FILE)
    with pytest.raises(ValueError, match=problem):
        HeadWeights.load(tmp_path)


def test_huge_hidden_states_teach_nothing_and_reset_nothing() -> None:
    head = QualityHead(0)
    head.observe(np.full(H, 1e38, np.float32), -0.5, True, 1.0)
    for i in range(50):
        head.observe(np.full(H, i, np.float32), -0.5, i % 2 == 0, 1.0)
    head.fit()
    assert head.resets == 0


@pytest.mark.parametrize("size", [1, 6, 129, 896, 9001])
def test_scores_do_not_depend_on_what_else_is_scored(size: int) -> None:
    rng, head = np.random.default_rng(0), QualityHead(0)
    hidden = rng.normal(size=(70, size)).astype(np.float32)
    hidden[5] = 1e38
    logp = -rng.random(70)
    for i in range(70):
        head.observe(hidden[i], float(logp[i]), i % 3 == 0, 1.0)
    head.fit()
    alone = [head.weights.score(hidden[i].copy(), float(logp[i])) for i in range(70)]
    assert np.isnan(alone[5])
    for rows in (slice(None), slice(3, 40), slice(None, None, -2)):
        np.testing.assert_array_equal(head.weights.scores(hidden[rows], logp[rows]), alone[rows])


def test_gradients_are_those_of_autograd() -> None:
    rng, head = np.random.default_rng(1), QualityHead(0)
    head._build(H)
    assert head._net is not None
    inputs = torch.from_numpy(rng.normal(size=(40, H + 1)).astype(np.float32))
    labels, weights = (
        torch.from_numpy(rng.integers(0, 2, 40).astype(np.float32)),
        torch.from_numpy(rng.random(40)).float(),
    )
    head._set_gradients(inputs, labels, weights)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(head._net(inputs)[:, 0], labels, reduction="none")
    expected = torch.autograd.grad(losses @ weights / weights.sum(), list(head._net.parameters()))
    for parameter, gradient in zip(head._net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_auroc_against_pairs() -> None:
    rng = np.random.default_rng(0)
    score, label, weight = rng.integers(0, 5, 40), rng.random(40) < 0.4, rng.random(40)
    pairs = list(itertools.product(np.flatnonzero(label), np.flatnonzero(~label)))
    won = sum(weight[i] * weight[j] * ((score[i] > score[j]) + 0.5 * (score[i] == score[j])) for i, j in pairs)
    assert auroc(score, label, weight) == pytest.approx(won / sum(weight[i] * weight[j] for i, j in pairs))


def test_reliability_sums_add_up_to_what_was_seen() -> None:
    seen = Realised()
    for q, label, weight in ((0.05, False, 1.0), (0.05, True, 2.0), (0.97, True, 1.0), (1.0, True, 3.0)):
        seen.outcomes.append((q, label, weight, 5))
    found = seen.metrics()
    assert [found[f"reliability/0/{k}"] for k in ("rollouts", "predicted", "right")] == pytest.approx([3, 0.15, 2])
    assert [found[f"reliability/9/{k}"] for k in ("rollouts", "predicted", "right")] == pytest.approx([4, 3.97, 4])
    assert not any(key.startswith("reliability/5") for key in found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda net: net.pop(5), r"not a finite array of \[128, 7\]"),
        (lambda net: net.pop(), "zip"),
        (lambda net: net.__setitem__(5, pack(np.zeros(3, np.float32))), r"not a finite array of \[128, 7\]"),
        (lambda net: net.__setitem__(1, pack(np.zeros(128))), r"not a finite array of \[128\] torch.float32"),
        (lambda net: net.__setitem__(1, pack(np.full(128, np.nan, np.float32))), "not a finite array"),
        (lambda net: net.__setitem__(0, pack(np.zeros((128, 1), np.float32))), "not a finite array"),
        (lambda net: net.__setitem__(1, pack(np.zeros(127, np.float32))), "not a finite array"),
    ],
)
def test_a_state_whose_shapes_do_not_fit_is_refused(change: Any, said: str) -> None:
    """The fused AdamW does not look at them, and would write beyond the end."""
    rng, head = np.random.default_rng(0), QualityHead(0)
    for i in range(20):
        head.observe(rng.normal(size=H).astype(np.float32), -0.5, i % 2 == 0, 1.0)
    head.fit()
    state = json.loads(json.dumps(head.state_dict()))
    QualityHead(0).load_state_dict(state)
    with pytest.raises(ValueError, match="as a head of 64 has"):
        QualityHead(0, 64).load_state_dict(state)
    change(state["net"])
    with pytest.raises(ValueError, match=said):
        QualityHead(0).load_state_dict(state)


@pytest.mark.parametrize(("width", "rate"), [(16, 3e-4), (200, 1e-2)])
def test_width_and_learning_rate_are_those_of_the_options(width: int, rate: float) -> None:
    gate = built(Arrol(at=4, cold_start=1, head_width=width, head_lr=rate))
    play(gate, 2)
    assert gate.head.weights.layers[0].shape == (width, H + 1)
    assert gate.head._optimizer is not None
    assert gate.head._optimizer.param_groups[0]["lr"] == rate
