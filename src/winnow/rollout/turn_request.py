"""The engine's request for the next turn of a rollout."""

from __future__ import annotations

from dataclasses import replace

from ..base.noise import noise_key
from ..engine.base import Request
from ..env.base import Task
from .in_flight import Flight, Sibling
from .options import STREAMS, RolloutOptions


def turn_length_of(task: Task) -> int | None:
    """Return the most tokens that a task allows in one turn. Raises ValueError on a useless number."""
    length: int | None = getattr(task, "max_turn_length", None)
    if length is not None and not (isinstance(length, int) and length > 0):
        raise ValueError(f"task {task.name}: max_turn_length must be at least 1 or None ({length!r})")
    return length


def turn_request(
    flight: Flight,
    sibling: Sibling,
    options: RolloutOptions,
    *,
    stop: tuple[str, ...],
    turn_length: int | None,
    report: frozenset[str],
    keep: bool,
) -> Request:
    """Return the request, within the limits of turn, rollout and context.

    Its noise is keyed by the rollout and the number of the turn, or by what an agent asks, whenever that arrives.
    """
    visit, rollout, purpose = flight.visit, sibling.rollout, flight.job.purpose
    turn = len(rollout.turns) if sibling.settings.key is None else sibling.settings.key
    key = noise_key(options.seed, STREAMS[purpose], visit.prompt.ordinal, visit.epoch, rollout.sibling, turn)
    context = sibling.context()
    left = options.params.max_tokens - sibling.length
    if options.context_length is not None:
        left = min(left, options.context_length - len(context))
    length = min(limit for limit in (left, turn_length, sibling.settings.max_tokens) if limit is not None)
    params = replace(options.params, max_tokens=length, stop=stop)
    if rollout.greedy:
        params = replace(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    return Request(
        id=(*flight.key, rollout.sibling),
        prompt_ids=context,
        params=params,
        key=key,
        report_at=() if rollout.greedy else tuple(sorted(flight.token_gates)),
        keep=keep,
        confidence="confidence" in report,
        raw_logp="raw_logp" in report,
        last_hidden="last_hidden" in report,
        draft=flight.draft(sibling)[:length] if options.drafts else (),
    )
