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

MOST_BYTES = 1 << 28
"""Memory for drafts."""
ROLLOUT_BYTES, TURN_BYTES = 200, 140
"""What a rollout and each of its turns take besides the tokens, about."""
Siblings = dict[int, list[np.ndarray]]
"""Sibling -> tokens of each turn."""


class DraftsState(State):
    """Turns one after the other, those of a rollout in order."""

    ordinal_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="ordinals")
    sibling_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="siblings")
    epoch_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="epochs")
    length_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="lengths")
    tokens: Annotated[np.ndarray, Packed("i4", None)]


class Drafts:
    """Tokens of each prompt's last rollouts. `on`: whether anything is remembered."""

    def __init__(self, on: bool = False) -> None:
        self.on = on
        self._last: dict[int, tuple[int, Siblings]] = {}
        """Prompt -> epoch of its last visit, and its siblings then; the prompt visited last comes last."""
        self._bytes = 0

    def job(self, visit: Visit, size: int, first: int) -> Job:
        """Return a job with drafts."""
        _, siblings = self._last.get(visit.prompt.ordinal, (0, {}))
        drafts = tuple(tuple(tuple(turn.tolist()) for turn in turns) for turns in siblings.values())
        return Job(visit, size, first=first, drafts=drafts)

    def observe(self, group: Group) -> None:
        """Remember what a group has sampled; beyond `MOST_BYTES` the prompts visited least recently are forgotten."""
        sampled = {rollout.sibling: _turns(rollout) for rollout in group.siblings if rollout.turns}
        if not (self.on and sampled):
            return
        ordinal, epoch = group.prompt.ordinal, group.visit.epoch
        before, siblings = self._last.pop(ordinal, (epoch, {}))
        self._bytes -= _bytes(siblings)
        if before == epoch:  # those that joined a probe
            sampled = siblings | sampled
        self._last[ordinal] = epoch, sampled
        self._bytes += _bytes(sampled)
        while self._bytes > MOST_BYTES:
            _, siblings = self._last.pop(next(iter(self._last)))
            self._bytes -= _bytes(siblings)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state as JSON values."""
        rollouts = ((o, s, e, turns) for o, (e, siblings) in self._last.items() for s, turns in siblings.items())
        drafts = [(o, s, e, turn) for o, s, e, turns in rollouts for turn in turns]
        columns = np.array([(o, s, e, len(turn)) for o, s, e, turn in drafts], np.uint32).reshape(-1, 4).T.copy()
        tokens = np.concatenate([np.empty(0, np.int32), *(turn for *_, turn in drafts)])
        names = ("ordinals", "siblings", "epochs", "lengths")
        return DraftsState(**dict(zip(names, columns, strict=True)), tokens=tokens).model_dump(
            mode="json", by_alias=True
        )

    def load(self, saved: DraftsState) -> None:
        """Load a state. Raises ValueError if its lengths do not match its tokens."""
        if saved.length_D.sum() != len(saved.tokens):
            raise ValueError(f"drafts: lengths add up to {saved.length_D.sum()}, not to {len(saved.tokens)} tokens")
        self._last = {}
        pieces = np.split(saved.tokens, np.cumsum(saved.length_D)[:-1]) if len(saved.length_D) else []
        columns = (c.tolist() for c in (saved.ordinal_D, saved.sibling_D, saved.epoch_D))
        for ordinal, sibling, epoch, tokens in zip(*columns, pieces, strict=True):
            self._last.setdefault(ordinal, (epoch, {}))[1].setdefault(sibling, []).append(tokens.copy())
        self._bytes = sum(_bytes(siblings) for _, siblings in self._last.values())


def _turns(rollout: Rollout) -> list[np.ndarray]:
    return [rollout.token_ids[turn.start : turn.stop].astype(np.int32) for turn in rollout.turns]


def _bytes(siblings: Siblings) -> int:
    return sum(ROLLOUT_BYTES + sum(turn.nbytes + TURN_BYTES for turn in turns) for turns in siblings.values())
