"""How rollouts of each purpose are sampled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..base.errors import ConfigError
from ..config import History
from ..engine.base import SamplingParams
from ..types import Purpose

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
    """Arrays that rollouts carry on top of those for rules: a subset of {"confidence", "last_hidden", "raw_logp"}."""
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


def check_drafts(options: Iterable[RolloutOptions], provides: frozenset[str]) -> None:
    """Raise ConfigError where drafts (`speculative`) would save nothing. `provides`: the engine's capabilities."""
    drafted = [o for o in options if o.drafts]
    if drafted and "drafts" not in provides:
        raise ConfigError(
            "speculative: this engine decodes every token; use engine: local with a model of the Llama, Mistral, Qwen2 "
            "or Qwen3 classes, or remove it"
        )
    if any(o.params.repetition_penalty != 1 for o in drafted):
        raise ConfigError(
            "speculative: with repetition_penalty a token depends on those before it, but a draft is read in one pass; "
            "remove one of the two"
        )
