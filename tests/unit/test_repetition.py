"""The repetition penalty: against transformers and the long way; engine and learner alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from winnow import Trainer
from winnow.base.token_filters import penalized, seen
from winnow.engine import SamplingParams
from winnow.engine.base import check_request
from winnow.engine.local.engine import LocalEngine
from winnow.learner.local import logprob
from winnow.learner.local.logprob import Context, TokenDistribution, token_logp

from .. import parity
from ..builders.runs import metrics_of
from .engine_models import VOCAB, make_model, make_requests, plain_logits, run, word_tokenizer


def test_it_is_that_of_transformers() -> None:
    gen = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(6, 50, generator=gen), torch.randint(50, (6, 9), generator=gen)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    assert penalized(logits, seen(ids, 50), 1.3).equal(expected)
    assert penalized(logits, seen(ids, 50), torch.ones(6, 1)).equal(logits)


def by_loop(logits_TV: torch.Tensor, prompt: tuple[int, ...], tokens: list[int], penalty: float) -> np.ndarray:
    """float64 [T, V]."""
    logits = logits_TV.double().numpy().copy()
    for t, row in enumerate(logits):
        for token in {*prompt, *tokens[:t]}:
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    return logits


def test_an_engine_draws_from_what_the_long_way_gives() -> None:
    """More requests than slots, so rows move; some have no penalty; logits of the model itself are told as they are."""
    model = make_model("qwen2")
    requests = make_requests(6, seed=3, top_k=0, top_p=1.0, temperature=0.7)
    penalties = [1.0, 1.5, 0.8, 3.0]
    requests = [
        replace(r, params=replace(r.params, repetition_penalty=penalties[i % 4]), raw_logp=i % 3 == 0)
        for i, r in enumerate(requests)
    ]
    done = run(LocalEngine(model, word_tokenizer(), slots=5), requests)
    for request in requests:
        found = done[request.id]
        raw = plain_logits(model, request.prompt_ids, found.token_ids)
        penalty = request.params.repetition_penalty
        logits = torch.tensor(by_loop(raw, request.prompt_ids, found.token_ids.tolist(), penalty))
        at = torch.arange(len(logits)), torch.tensor(found.token_ids)
        assert np.allclose(found.logp, (logits / 0.7).log_softmax(-1)[at].numpy(), atol=2e-4)
        if found.raw_logp is not None:
            assert np.allclose(found.raw_logp, raw.log_softmax(-1)[at].numpy(), atol=2e-4)


def test_greedy_goes_by_it() -> None:
    """A penalty that no logit stands up to: no token comes twice."""
    requests = make_requests(3, seed=1, temperature=0.0, top_k=0, top_p=1.0, max_tokens=12, repetition_penalty=1e6)
    done = run(LocalEngine(make_model("qwen2"), word_tokenizer(), slots=4), requests)
    for request in requests:
        new = done[request.id].token_ids.tolist()
        assert len(set(new)) == len(new)
        assert not set(new) & set(request.prompt_ids)


@pytest.mark.parametrize("chunk", [1 << 26, 60])
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"min_p": 0.2}])
def test_log_probabilities_and_gradients_of_the_learner(
    monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any], chunk: int
) -> None:
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", chunk)
    gen = torch.Generator().manual_seed(5)
    ids = torch.randint(12, (3, 9), generator=gen)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    mask[0, 3:], mask[1, 5:8], mask[2, 1:4] = True, True, True
    hidden = torch.randn(int(mask.sum()), 6, generator=gen, dtype=torch.float64)
    head = torch.nn.Linear(6, 12, bias=False, dtype=torch.float64)
    distribution = TokenDistribution(12, 0.8, repetition_penalty=1.7, **filters)
    context = distribution.context(ids, mask)
    assert context is not None
    there = hidden.clone().requires_grad_()
    logp, entropy, _ = token_logp(there, head, ids[mask], distribution, context)
    logp.sum().backward()
    weight_grad = head.weight.grad.clone()

    head.weight.grad, here = None, hidden.clone().requires_grad_()
    for n, (row, t) in enumerate(mask.nonzero().tolist()):
        raw = head(here[n])
        scale = torch.ones(12, dtype=torch.float64)
        for token in set(ids[row, :t].tolist()):
            scale[token] = 1 / 1.7 if raw[token] > 0 else 1.7
        scores = raw * scale / 0.8
        kept = torch.ones(12, dtype=torch.bool)
        if "top_k" in filters:
            kept = scores >= scores.sort(descending=True).values[3]
        if "min_p" in filters:
            kept = scores.softmax(-1) >= 0.2 * scores.softmax(-1).max()
        kept[ids[row, t]] = True
        expected = scores.masked_fill(~kept, -torch.inf).log_softmax(-1)
        assert torch.allclose(logp[n], expected[ids[row, t]], atol=1e-12)
        p = expected.exp()
        assert torch.allclose(entropy[n], -(p[kept] * expected[kept]).sum(), atol=1e-12)
        expected[ids[row, t]].backward()
    assert torch.allclose(there.grad, here.grad, atol=1e-12)
    assert torch.allclose(weight_grad, head.weight.grad, atol=1e-12)


def test_without_a_penalty_nothing_is_looked_up() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert TokenDistribution(12).context(ids, ids > 0) is None
    assert isinstance(TokenDistribution(12, repetition_penalty=2.0).context(ids, ids > 0), Context)


@pytest.mark.parametrize(
    "more",
    [{}, {"advantage": "opob", "policy_loss": "plain"}, {"beta": 0.1, "tokens_per_microbatch": 64, "top_k": 20}],
)
def test_engine_and_learner_agree_in_a_run(tiny_config: dict[str, Any], more: dict[str, Any]) -> None:
    own = {"repetition_penalty": 2.0, "reward_funcs": [f"{parity.__file__}:parity_reward"], "eval_steps": None}
    Trainer(config=tiny_config | own | more).train()
    rows = metrics_of(Path(tiny_config["output_dir"]))
    apart = [row["sampling/sampling_logp_difference/max"] for row in rows]
    assert len(apart) == 4
    assert max(apart) < 1e-4


def test_what_it_must_be() -> None:
    request = make_requests(1, 1)[0]
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        params = SamplingParams(4, repetition_penalty=wrong)
        with pytest.raises(ValueError, match="repetition_penalty must be positive"):
            check_request(replace(request, params=params), VOCAB, None)
