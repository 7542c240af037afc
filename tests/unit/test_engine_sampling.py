"""Sampling against the long way round in float64: tokens drawn, log-probabilities, filters, no impossible token."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from winnow.base.noise import noise_key
from winnow.engine import SamplingParams
from winnow.engine.base import Finished, Request
from winnow.engine.local.engine import LocalEngine
from winnow.engine.sampling import BLOCK, CACHED, Transform, draw, sample
from winnow.study.warm_start import word_tokenizer

from .engine_models import plain_logp
from .learner_models import WORDS, llama

LAST = 1 - 2.0**-24


def rows(
    n: int, temperature: float = 1, top_k: int = 0, top_p: float = 1, greedy: bool = False, min_p: float = 0
) -> Transform:
    return Transform(
        torch.full((n,), 1 / temperature),
        torch.ones(n, dtype=torch.bool) if greedy else None,
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
    )


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 7.5]), min_size=1, max_size=12).filter(any),
    u=st.integers(min_value=0, max_value=2**24 - 1),
)
def test_draw_equals_a_loop(weights: list[float], u: int) -> None:
    w = torch.tensor([weights])
    tokens, total = draw(w, torch.tensor([u / 2**24]))
    exact = [float(x) for x in w[0].double()]
    running, expected = 0.0, None
    for token, weight in enumerate(exact):
        running += weight
        if expected is None and running > u / 2**24 * sum(exact):
            expected = token
    assert tokens.item() == expected
    assert total.item() == pytest.approx(sum(exact), rel=1e-12)


@pytest.mark.parametrize("size", [3, 170, BLOCK, BLOCK + 1, 2 * BLOCK, 5000, 150_000])
def test_shares_are_exact_over_a_grid_of_uniform_numbers(size: int) -> None:
    """Over the grid (i + 1/2)/N every token is drawn N * p times, up to one: rare tokens keep their share."""
    n = 2000 if size <= 5000 else 200
    gen = torch.Generator().manual_seed(size)
    weights = torch.rand(size, generator=gen).pow(12)
    weights[: size // 3] = 0
    weights[-1] = 0 if size > 3 else 1
    tokens, _ = draw(weights.expand(n, size), (torch.arange(n, dtype=torch.float64) + 0.5) / n)
    counts = np.bincount(tokens.numpy(), minlength=size)
    expected = n * weights.double().numpy() / weights.double().sum().item()
    assert np.abs(counts - expected).max() <= 1 + 1e-6
    assert counts[weights.numpy() == 0].sum() == 0


@pytest.mark.parametrize("size", [5, 3 * BLOCK + 7])
@pytest.mark.parametrize("u", [0.0, 0.5, LAST])
def test_a_weight_of_zero_is_never_drawn(size: int, u: float) -> None:
    for only in (0, 1, size // 2, size - 1):
        weights = torch.zeros(1, size)
        weights[0, only] = 1e-30
        tokens, _ = draw(weights, torch.tensor([u]))
        assert tokens.item() == only


def test_rare_tokens_of_a_large_vocabulary_keep_their_weight() -> None:
    """100,000 tokens of weight 1e-6 behind one of weight 1: a float32 running sum would round most of them away."""
    weights = torch.full((1, 100_001), 3e-8)
    weights[0, 0] = 1
    mass = 100_000 * 3e-8
    u = torch.tensor([1 - mass / (1 + mass) / 2], dtype=torch.float64)
    tokens, total = draw(weights, u)
    assert total.item() == pytest.approx(1 + mass, rel=1e-6)
    assert tokens.item() == pytest.approx(50_000, abs=5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([2, 9, 60, 1500]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 5000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.5]),
)
def test_logp_is_that_of_the_distribution_drawn_from(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, size, generator=gen) * 3
    tokens, logp = sample(logits, torch.rand(8, generator=gen), rows(8, temperature, top_k, top_p, min_p=min_p))
    params = SamplingParams(1, temperature, top_p, top_k, min_p=min_p)
    expected = plain_logp(logits.double(), params, tokens.numpy())
    # Filters keep ties whole, and `plain_logp` does not.
    alone = ((logits - logits.gather(1, tokens[:, None])).abs() < 1e-5).sum(1).numpy() == 1
    assert alone.sum() >= 6
    np.testing.assert_allclose(logp.numpy()[alone], expected[alone], atol=2e-5)


def test_a_tie_at_the_top_is_kept_whole() -> None:
    gen = torch.Generator().manual_seed(756)
    logits = torch.randn(8, 1500, generator=gen) * 3
    tokens, logp = sample(logits, torch.rand(8, generator=gen), rows(8, 0.3, 0, 1e-6, min_p=0.0))
    first, second = logits[5].topk(2).values
    assert logits[5, tokens[5]] == second == first
    assert logp[5] == pytest.approx(-math.log(2), abs=1e-5)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.7, 0.0), (20, 0.5, 0.0), (0, 1.0, 0.1), (20, 0.9, 0.05)]
)
def test_filters_keep_the_tokens_that_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    gen = torch.Generator().manual_seed(1)
    logits = (torch.randn(1, 50, generator=gen) * 2).expand(4000, 50)
    warped = logits[:1]
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    if min_p:
        warped = MinPLogitsWarper(min_p)(None, warped)
    tokens, logp = sample(logits, torch.arange(4000) / 4000, rows(4000, 1, top_k, top_p, min_p=min_p))
    assert set(tokens.tolist()) == set(torch.isfinite(warped[0]).nonzero()[:, 0].tolist())
    np.testing.assert_allclose(logp, warped[0].log_softmax(-1)[tokens], atol=1e-5)


def test_greedy_takes_the_first_maximum_and_the_plain_logp() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    for u in (0.0, 0.5, LAST):
        tokens, logp = sample(logits, torch.tensor([u]), rows(1, greedy=True))
        assert tokens.item() == 1
        assert logp.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item(), abs=1e-6)


def test_a_row_does_not_depend_on_the_filters_of_others() -> None:
    gen = torch.Generator().manual_seed(2)
    logits, u = torch.randn(6, 200, generator=gen) * 2, torch.rand(6, generator=gen)
    alone = [
        sample(logits[i : i + 1], u[i : i + 1], Transform(torch.ones(1), None, None, None, None)) for i in range(6)
    ]
    mixed = rows(6)._replace(top_k_N=torch.tensor([0, 3, 0, 50, 0, 0]), top_p_N=torch.tensor([1, 1, 1, 1, 1, 0.5]))
    tokens, logp = sample(logits, u, mixed)
    for i in (0, 2, 4):
        assert (tokens[i], logp[i]) == (alone[i][0][0], alone[i][1][0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [10, 3000])
def test_logits_that_are_not_finite_show_in_the_logp(bad: float, size: int) -> None:
    logits = torch.zeros(2, size)
    logits[1, 4] = bad
    tokens, logp = sample(logits, torch.tensor([0.3, 0.3]), rows(2))
    assert torch.isfinite(logp).tolist() == [True, False]
    assert ((tokens >= 0) & (tokens < size)).all()


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("size", [40 * BLOCK, 40 * BLOCK + 1, 41 * BLOCK - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_vocabulary_is_sampled_in_parts_as_if_row_by_row(size: int, dtype: torch.dtype) -> None:
    n = 2 * CACHED // size + 1
    gen = torch.Generator().manual_seed(size)
    logits, u = (torch.randn(n, size, generator=gen) * 3).to(dtype), torch.rand(n, generator=gen)
    logits[::2, -1] = 40  # the last token, in the last, shorter block
    mixed = rows(n)._replace(inverse_temperature_N=torch.linspace(0.5, 2, n), greedy_N=torch.arange(n) % 3 == 1)
    mixed.top_k_N[5], mixed.top_p_N[7] = 3, 0.5
    tokens, logp = sample(logits, u, mixed)
    assert (tokens[::2] == size - 1).all()
    for i in range(n):
        alone = Transform(*(x[i : i + 1] for x in mixed))  # type: ignore[union-attr]
        token, of_token = sample(logits[i : i + 1].float(), u[i : i + 1], alone)
        assert (tokens[i], logp[i]) == (token[0], of_token[0])


FILTERED: list[dict[str, float]] = [
    {},
    {"temperature": 0.6, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("params", FILTERED, ids=["plain", "temperature", "filtered"])
def test_tokens_come_as_often_as_their_log_probabilities_say(params: dict[str, float]) -> None:
    """20,000 sequences of two tokens, each with a key of its own: every pair against its reported probability."""
    n = 20_000
    engine = LocalEngine(llama(), word_tokenizer([f"w{i}" for i in range(WORDS)], max_positions=64), slots=2000)
    engine.submit([Request(i, (5, 9, 3), SamplingParams(2, **params), noise_key(0, i)) for i in range(n)])
    counts: Counter[tuple[int, ...]] = Counter()
    logps: dict[tuple[int, ...], float] = {}
    while engine.pending:
        for event in engine.step():
            if isinstance(event, Finished):
                drawn = tuple(event.token_ids.tolist())
                counts[drawn] += 1
                logp = float(event.logp.sum())
                assert logps.setdefault(drawn, logp) == pytest.approx(logp, abs=1e-4), "as often as it is drawn"
    expected = {drawn: n * math.exp(logp) for drawn, logp in logps.items()}
    common = [drawn for drawn, times in expected.items() if times >= 5]
    assert len(common) > 15
    chi_squared = sum((counts[drawn] - expected[drawn]) ** 2 / expected[drawn] for drawn in common)
    rare, of_rare = n - sum(counts[d] for d in common), n - sum(expected[d] for d in common)
    assert abs(rare - of_rare) < 4 * math.sqrt(of_rare + 1)
    assert abs(chi_squared - len(common)) < 4 * math.sqrt(2 * len(common))
