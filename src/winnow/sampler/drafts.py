"""Drafts: the last rollouts of each prompt, candidate beginnings of its next ones.

An engine reads a draft in one forward pass, accepts the tokens up to the first that it would draw otherwise, and
decodes the rest. So every token is a draw from the current policy. If a prompt's rollouts are drawn with the same noise
for some epochs, a policy that changes little draws the same tokens again.

SPEC-RL (arXiv 2509.23232) takes the last epoch's rollouts as drafts, too, and accepts tokens by their probabilities.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ..base.array_json import Packed
from ..base.state import State
from ..types import Group, Job, Visit

MOST_BYTES = 1 << 28
"""Memory for drafts."""
TURN_BYTES = 128
"""What a turn takes besides its tokens."""
FRESH = 1 << 32
"""Noise of repeated visits, apart from that of all epochs."""


class DraftsState(State):
    """Turns one after the other, those of a rollout in order."""

    ordinal_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="ordinals")
    sibling_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="siblings")
    epoch_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="epochs")
    length_D: Annotated[np.ndarray, Packed("u4", "turns")] = Field(alias="lengths")
    tokens: Annotated[np.ndarray, Packed("i4", None)]


class Drafts:
    """Tokens of each prompt's last rollouts.

    `epochs`: number of epochs in a row with the same noise; None: nothing is remembered.
    """

    def __init__(self, epochs: int | None = None) -> None:
        self.epochs = epochs
        self._last: dict[int, dict[int, tuple[int, list[np.ndarray]]]] = {}
        """Prompt -> sibling -> epoch, and tokens of each turn; the prompt visited last comes last."""
        self._bytes = 0
        self._visited: set[int] = set()
        """Prompts visited in this step. With the same noise the same policy would sample the same again."""

    def job(self, visit: Visit, size: int, first: int) -> Job:
        """Return a job with noise and drafts."""
        if self.epochs is None:
            return Job(visit, size, first=first)
        again = visit.prompt.ordinal in self._visited and self.epochs > 1
        noise = FRESH + visit.epoch if again else visit.epoch // self.epochs
        last = self._last.get(visit.prompt.ordinal, {})
        of_siblings = [last.get(sibling, (0, []))[1] for sibling in range(max(last, default=-1) + 1)]
        drafts = tuple(tuple(tuple(turn.tolist()) for turn in turns) for turns in of_siblings)
        same = bool(last) and max(epoch for epoch, _ in last.values()) // self.epochs == noise
        return Job(visit, size, first=first, drafts=drafts if any(drafts) else (), same_noise=same, noise=noise)

    def observe(self, group: Group) -> None:
        """Take a finished group."""
        self.remember(group)
        self._visited.add(group.prompt.ordinal)

    def remember(self, group: Group) -> None:
        """Remember what rollouts of a group have sampled; beyond `MOST_BYTES` the oldest are forgotten."""
        if self.epochs is None:
            return
        ordinal = group.prompt.ordinal
        last = self._last.pop(ordinal, {})
        for rollout in group.siblings:
            turns = [rollout.token_ids[turn.start : turn.stop].astype(np.int32) for turn in rollout.turns]
            self._bytes += _bytes(turns) - _bytes(last.get(rollout.sibling, (0, []))[1])
            last[rollout.sibling] = group.visit.epoch, turns
        self._last[ordinal] = last
        while self._bytes > MOST_BYTES:
            oldest = self._last.pop(next(iter(self._last)))
            self._bytes -= sum(_bytes(turns) for _, turns in oldest.values())

    def end_step(self) -> None:
        """End an optimizer step."""
        self._visited.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state as JSON values."""
        rollouts = ((o, s, e, turns) for o, of_prompt in self._last.items() for s, (e, turns) in of_prompt.items())
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
        self._last, self._bytes = {}, saved.tokens.nbytes + TURN_BYTES * len(saved.length_D)
        pieces = np.split(saved.tokens, np.cumsum(saved.length_D)[:-1]) if len(saved.length_D) else []
        columns = (c.tolist() for c in (saved.ordinal_D, saved.sibling_D, saved.epoch_D))
        for ordinal, sibling, epoch, tokens in zip(*columns, pieces, strict=True):
            self._last.setdefault(ordinal, {}).setdefault(sibling, (epoch, []))[1].append(tokens)


def _bytes(turns: list[np.ndarray]) -> int:
    return sum(turn.nbytes + TURN_BYTES for turn in turns)
