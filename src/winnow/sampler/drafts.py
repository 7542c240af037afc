"""Drafts: the last rollouts of each prompt, candidate beginnings of its next ones.

An engine reads a draft in one forward pass, accepts the tokens up to the first that it would draw otherwise, and
decodes the rest. So a rollout is the one that would be sampled without drafts.

SPEC-RL (arXiv 2509.23232) takes the last epoch's rollouts as drafts, too, and accepts tokens by their probabilities.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ..base.array_json import Packed
from ..base.state import State
from ..types import Group, Job, Rollout, Visit

MAX_DRAFT_BYTES = 1 << 28
ROLLOUT_BYTES, TURN_BYTES = 200, 140
"""What a rollout and each of its turns take besides the tokens, about."""


class DraftsState(State):
    """Turns one after the other, those of a rollout in order."""

    ordinal_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="ordinals")
    rollout_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="rollouts")
    """Number of its rollout among those of the prompt."""
    length_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="lengths")
    tokens: Annotated[np.ndarray, Packed("i4", None)]


class Drafts:
    """Tokens of each prompt's last rollouts. `on`: whether anything is remembered."""

    def __init__(self, on: bool = False) -> None:
        self.on = on
        self._last: dict[int, list[list[np.ndarray]]] = {}
        """Prompt -> tokens of each turn of each rollout; the prompt visited last comes last."""
        self._bytes = 0

    def job(self, visit: Visit, size: int, first: int) -> Job:
        """Return a job with drafts."""
        rollouts = self._last.get(visit.prompt.ordinal, [])
        drafts = tuple(tuple(tuple(turn.tolist()) for turn in turns) for turns in rollouts)
        return Job(visit, size, first=first, drafts=drafts)

    def observe(self, group: Group) -> None:
        """Remember what a group has sampled; beyond `MAX_DRAFT_BYTES`, forget the prompts visited longest ago."""
        sampled = [_turns(rollout) for rollout in group.siblings if rollout.turns] if self.on else []
        if not sampled:
            return
        self._bytes += _bytes(sampled) - _bytes(self._last.pop(group.prompt.ordinal, []))
        self._last[group.prompt.ordinal] = sampled
        while self._bytes > MAX_DRAFT_BYTES:
            self._bytes -= _bytes(self._last.pop(next(iter(self._last))))

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state as JSON values."""
        drafts = [(o, i, turn) for o, last in self._last.items() for i, turns in enumerate(last) for turn in turns]
        columns = np.array([(o, i, len(turn)) for o, i, turn in drafts], np.uint32).reshape(-1, 3).T.copy()
        tokens = np.concatenate([np.empty(0, np.int32), *(turn for *_, turn in drafts)])
        names = ("ordinals", "rollouts", "lengths")
        return DraftsState(**dict(zip(names, columns, strict=True)), tokens=tokens).model_dump(
            mode="json", by_alias=True
        )

    def load(self, saved: DraftsState) -> None:
        """Load a state. Raises ValueError if its lengths do not match its tokens, or rollouts are missing."""
        if saved.length_D.sum() != len(saved.tokens):
            raise ValueError(f"drafts: lengths add up to {saved.length_D.sum()}, not to {len(saved.tokens)} tokens")
        self._last = {}
        pieces = np.split(saved.tokens, np.cumsum(saved.length_D)[:-1]) if len(saved.length_D) else []
        for ordinal, number, tokens in zip(saved.ordinal_D.tolist(), saved.rollout_D.tolist(), pieces, strict=True):
            rollouts = self._last.setdefault(ordinal, [])
            if number > len(rollouts):
                raise ValueError(f"drafts: prompt {ordinal} has a rollout {number}, but none before it")
            if number == len(rollouts):
                rollouts.append([])
            rollouts[number].append(tokens.copy())
        self._bytes = sum(map(_bytes, self._last.values()))


def _turns(rollout: Rollout) -> list[np.ndarray]:
    return [rollout.token_ids[turn.start : turn.stop].astype(np.int32) for turn in rollout.turns]


def _bytes(rollouts: list[list[np.ndarray]]) -> int:
    return sum(ROLLOUT_BYTES + sum(turn.nbytes + TURN_BYTES for turn in turns) for turns in rollouts)
