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
from ..types import Group, Job, Rollout, Visit

MOST_BYTES = 1 << 28
"""Memory for drafts."""
ROLLOUT_BYTES, TURN_BYTES = 200, 140
"""What a rollout and each of its turns take besides the tokens, about."""
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
        self._visited: dict[int, int] = {}
        """Prompt -> its first visit in this step. With the same noise the same policy would sample the same again."""

    def job(self, visit: Visit, size: int, first: int) -> Job:
        """Return a job with noise and drafts."""
        if self.epochs is None:
            return Job(visit, size, first=first)
        again = self._visited.setdefault(visit.prompt.ordinal, visit.number) != visit.number and self.epochs > 1
        noise = FRESH + visit.epoch if again else visit.epoch // self.epochs
        last = self._last.get(visit.prompt.ordinal, {})
        siblings = [last.get(sibling, (0, [])) for sibling in range(max(last, default=-1) + 1)]
        drafts = tuple(tuple(tuple(turn.tolist()) for turn in turns) for _, turns in siblings)
        same = tuple(self.epochs > 1 and epoch // self.epochs == noise for epoch, _ in siblings)
        return Job(visit, size, first=first, drafts=drafts, same_noise=same, noise=noise)

    def observe(self, group: Group) -> None:
        """Remember what a group has sampled; beyond `MOST_BYTES` the prompts visited least recently are forgotten."""
        if self.epochs is None:
            return
        ordinal, epoch = group.prompt.ordinal, group.visit.epoch
        sampled = {rollout.sibling: (epoch, _turns(rollout)) for rollout in group.siblings if rollout.turns}
        last = self._last.pop(ordinal, {})
        self._bytes -= _bytes(last)
        if self.epochs == 1 and sampled:  # siblings with new noise are no nearer to their own earlier rollouts
            last = {sibling: of for sibling, of in last.items() if of[0] == epoch}
        last |= sampled
        if last:
            self._last[ordinal] = last
            self._bytes += _bytes(last)
        while self._bytes > MOST_BYTES:
            self._bytes -= _bytes(self._last.pop(next(iter(self._last))))

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
        self._last = {}
        pieces = np.split(saved.tokens, np.cumsum(saved.length_D)[:-1]) if len(saved.length_D) else []
        columns = (c.tolist() for c in (saved.ordinal_D, saved.sibling_D, saved.epoch_D))
        for ordinal, sibling, epoch, tokens in zip(*columns, pieces, strict=True):
            self._last.setdefault(ordinal, {}).setdefault(sibling, (epoch, []))[1].append(tokens.copy())
        self._bytes = sum(map(_bytes, self._last.values()))


def _turns(rollout: Rollout) -> list[np.ndarray]:
    return [rollout.token_ids[turn.start : turn.stop].astype(np.int32) for turn in rollout.turns]


def _bytes(siblings: dict[int, tuple[int, list[np.ndarray]]]) -> int:
    return sum(ROLLOUT_BYTES + sum(turn.nbytes + TURN_BYTES for turn in turns) for _, turns in siblings.values())
