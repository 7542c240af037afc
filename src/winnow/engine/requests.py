"""Checks of requests; each error names the problem."""

from __future__ import annotations

import math

from .base import Request

LOWEST_TEMPERATURE = 1e-4
"""Lower temperatures may overflow float32 logits, and can only mean greedy sampling."""


def check_request(request: Request, vocab_size: int, max_length: int | None) -> None:
    """Raise ValueError if prompt, draft, sampling parameters or `report_at` cannot be run."""
    params, prompt, who = request.params, request.prompt_ids, f"request {request.id!r}"
    if not prompt:
        raise ValueError(f"{who}: the prompt is empty; it needs at least one token")
    wrong = next((i for i in prompt if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"{who}: prompt token {wrong} is outside the vocabulary of {vocab_size}")
    if params.max_tokens < 1:
        raise ValueError(f"{who}: max_tokens must be at least 1, not {params.max_tokens}")
    total = len(prompt) + params.max_tokens
    if max_length is not None and total > max_length:
        raise ValueError(
            f"{who}: {len(prompt)} prompt tokens + max_tokens {params.max_tokens} = {total} exceed the maximum "
            f"length {max_length}; shorten the prompt or lower max_tokens"
        )
    wrong = next((i for i in request.draft if not 0 <= i < vocab_size), None)
    if wrong is not None or len(request.draft) > params.max_tokens:
        what = f"token {wrong}" if wrong is not None else f"{len(request.draft)} tokens"
        raise ValueError(f"{who}: the draft has {what}, outside the vocabulary of {vocab_size} or over max_tokens")
    if params.temperature != 0 and not LOWEST_TEMPERATURE <= params.temperature < math.inf:
        raise ValueError(
            f"{who}: temperature must be 0 (greedy) or a number from {LOWEST_TEMPERATURE} on, not {params.temperature}"
        )
    if not 0 < params.top_p <= 1:
        raise ValueError(f"{who}: top_p must be in (0, 1], not {params.top_p}")
    if not 0 <= params.min_p < 1:
        raise ValueError(f"{who}: min_p must be in [0, 1), not {params.min_p}")
    if not 0 < params.repetition_penalty < math.inf:
        raise ValueError(f"{who}: repetition_penalty must be positive, not {params.repetition_penalty}")
    if params.top_k < 0:
        raise ValueError(f"{who}: top_k must be >= 0 (0 turns it off), not {params.top_k}")
    if not all(params.stop):
        raise ValueError(f"{who}: a stop string is empty")
    counts = request.report_at
    if any(a >= b for a, b in zip((0, *counts), counts, strict=False)):
        raise ValueError(f"{who}: report_at must be positive and ascending, not {counts}")
