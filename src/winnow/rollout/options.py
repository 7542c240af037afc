"""How rollouts of each purpose are sampled, and the engine's request for each of their turns."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..base.errors import ConfigError
from ..base.noise import noise_key
from ..config import History
from ..engine.base import Request, SamplingParams
from ..env.base import Task
from ..types import Purpose
from .in_flight import Flight, Sibling

STREAMS: dict[Purpose, int] = {"train": 0, "eval": 1, "greedy": 1, "profile": 2, "probe": 9}
"""Noise stream of each purpose."""


@dataclass(frozen=True)
class RolloutOptions:
    """How the rollouts of one purpose are sampled.

    `params.max_tokens` bounds a whole completion: sampled tokens and observations of all turns and segments together.
    """

    params: SamplingParams
    max_prompt_length: int
    seed: int
    report: frozenset[str] = frozenset()
    """Arrays that rollouts carry on top of those for rules: a subset of {"last_hidden", "raw_logp"}."""
    greedy_baseline: bool = False
    """Launch one more rollout a group, at temperature 0. No rule decides about it, waits for it or sees it."""
    context_length: int | None = None
    """Most tokens of a segment, its prompt included; None: no limit."""
    history: History = "exact"
    """Between turns, keep what was sampled (`exact`) or let the chat template render all turns again (`template`)."""
    max_segments: int | None = None
    """Most segments of a rollout; None: no limit."""
    drafts: bool = False
    """Whether jobs may have drafts."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt that leave room for another one."""
        return min(self.max_prompt_length, (self.context_length or sys.maxsize) - 1)


def within(options: RolloutOptions, max_length: int | None) -> RolloutOptions:
    """Return options for an engine that takes at most `max_length` tokens of a sequence; None: any number."""
    if max_length is None:
        return options
    return replace(options, context_length=min(options.context_length or max_length, max_length))


def check_length(options: RolloutOptions, task: Task, most: int) -> None:
    """Warn that segments of several turns end at the `most` tokens that the engine takes, before `context_length`.

    Raises ConfigError if a completion of one turn may have as many alone.
    """
    tokens = options.params.max_tokens
    if task.max_turns == 1 and tokens >= most:
        raise ConfigError(
            f"max_completion_length: {tokens}, but the engine takes {most} tokens, the prompt included; lower it"
        )
    if task.max_turns > 1:
        warnings.warn(
            f"context_length: the engine takes {most} tokens, so turns end there, not at {options.context_length}; "
            "lower max_prompt_length or max_completion_length to avoid that",
            stacklevel=2,
        )


def check_drafts(options: Iterable[RolloutOptions], provides: frozenset[str], why: str = "") -> None:
    """Raise ConfigError where drafts (`speculative`) would save nothing. `provides`: the engine's capabilities; `why`:
    it has no drafts, if it tells."""
    drafted = [o for o in options if o.drafts]
    if drafted and "drafts" not in provides:
        raise ConfigError(
            f"speculative: this engine decodes every token{f' ({why})' if why else ''}; use engine: local with a model "
            "of the Llama, Mistral, Qwen2 or Qwen3 classes, or remove it"
        )
    if any(o.params.repetition_penalty != 1 for o in drafted):
        raise ConfigError(
            "speculative: with repetition_penalty a token depends on those before it, but a draft is read in one pass; "
            "remove one of the two"
        )


def turn_length_of(task: Task) -> int | None:
    """Return the most tokens that a task allows in one turn. Raises ValueError on a useless number."""
    length: int | None = getattr(task, "max_turn_length", None)
    if length is not None and not (isinstance(length, int) and length > 0):
        raise ValueError(f"task {task.name}: max_turn_length must be at least 1 or None ({length!r})")
    return length


def used_up(sibling: Sibling, options: RolloutOptions) -> str:
    """Return the stop reason if the tokens of the rollout or of its current segment are used up, else empty."""
    if sibling.length >= options.params.max_tokens:
        return "length"
    full = options.context_length is not None and sibling.context_length >= options.context_length
    return "context" if full else ""


def room_of(sibling: Sibling, options: RolloutOptions) -> int:
    """Return the number of tokens beyond which an observation exceeds both the rollout's and the context's limit."""
    left = options.params.max_tokens - sibling.length
    return left if options.context_length is None else max(left, options.context_length - sibling.context_length)


AskedTurn = tuple[Sibling, tuple[str, ...], bool]
"""A sibling that begins a turn, its stop strings, and whether the engine keeps its keys and values for another one."""


def turn_requests(
    flight: Flight,
    turns: Sequence[AskedTurn],
    options: RolloutOptions,
    *,
    turn_length: int | None,
    report: frozenset[str],
) -> list[Request]:
    """Return the requests of turns that begin together, within the limits of turn, rollout and context.

    The noise is keyed by the rollout and the number of the turn, or by what an agent asks, whenever that arrives.
    """
    visit, purpose = flight.visit, flight.job.purpose
    group_key = noise_key(options.seed, STREAMS[purpose], visit.prompt.ordinal, visit.epoch)
    report_at = tuple(sorted(flight.token_gates))
    drafts: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}
    requests = []
    for sibling, stop, keep in turns:
        rollout, context = sibling.rollout, sibling.context()
        turn = len(rollout.turns) if sibling.settings.key is None else sibling.settings.key
        left = options.params.max_tokens - sibling.length
        if options.context_length is not None:
            left = min(left, options.context_length - len(context))
        if turn_length is not None:
            left = min(left, turn_length)
        if options.drafts and (before := tuple(sibling.turn_tokens)) not in drafts:
            drafts[before] = flight.draft(sibling)
        left = max(left, 1)  # a prompt without room behind it is refused by the engine, with both lengths
        length = left if sibling.settings.max_tokens is None else min(left, sibling.settings.max_tokens)
        requests.append(
            Request(
                id=(*flight.key, rollout.sibling),
                prompt_ids=context,
                params=_sampling(options.params, length, stop, rollout.greedy),
                key=noise_key(rollout.sibling, turn, key=group_key),
                report_at=() if rollout.greedy else report_at,
                keep=keep,
                raw_logp="raw_logp" in report,
                last_hidden="last_hidden" in report,
                draft=drafts[before][:length] if options.drafts else (),
            )
        )
    return requests


@lru_cache(64)
def _sampling(params: SamplingParams, length: int, stop: tuple[str, ...], greedy: bool) -> SamplingParams:
    params = replace(params, max_tokens=length, stop=stop)
    return replace(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0) if greedy else params
