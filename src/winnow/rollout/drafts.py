"""Drafts, guesses of a turn that the engine reads in one pass (`speculative`): which are likely enough."""

from __future__ import annotations

from collections.abc import Sequence

WORTH_READING = 0.5
"""Chance of being sampled from which on a token of a draft is read. On a CPU a token of a longer prefill took 0.6 to
0.9 of the time of a row of a decode step, without that row's share of the step's fixed cost."""
WORTH_STEPS = 2.0
"""Decode steps that a draft must be expected to save; chosen, not tuned."""
SLACK = 1e-9
"""Bound of the rounding error of a sum of chances."""


def likeliest(drafts: Sequence[tuple[int, ...]], readers: int) -> tuple[int, ...]:
    """Return the likeliest beginning of some drafts, as far as it pays to read it.

    Each token is the most frequent after those before it. If `k` of `n` drafts have it, a sibling samples it with a
    chance of (k - 1/2) / n. It is worth reading if one of the `readers` does with `WORTH_READING`, and the draft if all
    of them follow it for `WORTH_STEPS`, as only that saves steps. The last token of a draft is not read.
    """
    draft: list[int] = []
    left, worth, steps = list(drafts), True, 0.0
    longest = max(map(len, drafts), default=0)
    while worth and (nexts := [d[len(draft)] for d in left if len(d) > len(draft)]):
        token = max(dict.fromkeys(nexts), key=nexts.count)  # of several, the first
        chance = (nexts.count(token) - 0.5) / len(drafts)
        saved = chance**readers
        if steps + saved * (longest - len(draft)) < WORTH_STEPS - SLACK:
            return ()  # no later token is likelier than this one
        left = [d for d in left if len(d) > len(draft) and d[len(draft)] == token]
        draft.append(token)
        steps += saved
        worth = 1 - (1 - chance) ** readers >= WORTH_READING
    return tuple(draft) if steps >= WORTH_STEPS else ()
