"""Log-probabilities before temperature, top-k and top-p, for who asks: what a head trained at temperature 1 reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from winnow.engine import LocalEngine, Reached, SamplingParams

from .engine_models import make_model, make_requests, plain_logits, plain_logp, run, word_tokenizer


@pytest.mark.parametrize("name", ["qwen2-tied", "gpt2"])
def test_they_are_those_of_the_model_itself_and_change_nothing(name: str) -> None:
    model, requests = make_model(name), make_requests(6)
    plain = run(LocalEngine(model, word_tokenizer()), requests)
    found = run(LocalEngine(model, word_tokenizer()), [replace(r, raw_logp=i % 2 == 0) for i, r in enumerate(requests)])
    transformed = 0
    for i, request in enumerate(requests):
        before, now = plain[request.id], found[request.id]
        assert np.array_equal(before.token_ids, now.token_ids)
        assert np.array_equal(before.logp, now.logp)
        assert before.raw_logp is None
        if i % 2:
            assert now.raw_logp is None
            continue
        logits = plain_logits(model, request.prompt_ids, now.token_ids)
        expected = plain_logp(logits, SamplingParams(1), now.token_ids)
        np.testing.assert_allclose(now.raw_logp, expected, atol=1e-4)
        transformed += not np.allclose(now.raw_logp, now.logp, atol=1e-3)
    assert transformed > 4


def test_in_reports_they_come_so_far() -> None:
    engine = LocalEngine(make_model("qwen2-tied"), word_tokenizer())
    (request, *_) = make_requests(1, max_tokens=9, temperature=0.6, top_p=0.9, top_k=0)
    engine.submit([replace(request, raw_logp=True, report_at=(3, 6))])
    seen = {}
    while engine.pending:
        for event in engine.step():
            seen[event.n if isinstance(event, Reached) else 9] = event.raw_logp
    assert [len(seen[n]) for n in (3, 6, 9)] == [3, 6, 9]
    assert np.array_equal(seen[9][:6], seen[6])
    assert np.array_equal(seen[6][:3], seen[3])
