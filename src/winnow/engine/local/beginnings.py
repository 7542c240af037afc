"""What waiting prompts have in common at their start, such as a system prompt, tools or examples.

It goes through the model once, for all of them. Kept while the engine has work and the weights stay: an idle engine
remembers nothing that could change what comes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from .backend import Backend, Kept, Tokens, common, passes

SAVED_TOKENS = {"cpu": 256, "cuda": 4096}
"""Tokens that a new beginning has to save, by device: one more pass costs about so many."""
MOST = 8
"""Beginnings that are kept; the oldest makes room."""


class Beginnings:
    """Beginnings of prompts that have been through the model."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._least = SAVED_TOKENS.get(backend.device.type, SAVED_TOKENS["cpu"])
        self._kept: dict[Tokens, Kept] = {}

    def clear(self) -> None:
        self._kept.clear()

    def read(self, prompts: Sequence[Tokens]) -> tuple[dict[Tokens, Kept], dict[Tokens, int]]:
        """Return the beginnings of those that have one, and how much was computed, under the first that has it."""
        left = [prompt for prompt in prompts if self._of(prompt) is None]
        new = shared_beginnings(left, self._least)[:MOST]
        for some in passes(new, lambda tokens: tokens, self._backend.mixed_lengths):
            done = self._backend.prefill(some)
            for row, tokens in enumerate(some):
                keys, values = ([t[row, :, : len(tokens)] for t in layers] for layers in (done.keys, done.values))
                self._kept[tokens] = Kept(tokens, keys, values)
        while len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]
        found = {prompt: kept for prompt in prompts if (kept := self._of(prompt))}
        return found, {next(p for p in left if _serves(tokens, p)): len(tokens) for tokens in new}

    def _of(self, prompt: Tokens) -> Kept | None:
        found = [kept for tokens, kept in self._kept.items() if _serves(tokens, prompt)]
        return max(found, key=lambda kept: len(kept.tokens), default=None)


def _serves(tokens: Tokens, prompt: Tokens) -> bool:
    n = len(tokens)
    return n < len(prompt) <= 2 * n and prompt[:n] == tokens


def shared_beginnings(prompts: Iterable[Tokens], least: int) -> list[Tokens]:
    """Return beginnings, each of several prompts, that save at least so many tokens.

    One is at least half of each of its prompts, and less than all of it: the last token has to be computed. The
    shortest that does is taken, so that as many prompts as possible have it.
    """
    found, open_ = [], [sorted(set(prompts))]
    while open_:
        some = open_.pop()
        others, longest = len(some) - 1, max(map(len, some), default=0)
        if longest * others < least:
            continue
        same = common(some[0], some[-1])  # in order, so of all
        n = min(same, min(map(len, some)) - 1)
        if n * others >= least and 2 * n >= longest:
            found.append(some[0][:n])
        else:
            open_ += [list(part) for _, part in groupby(some, key=lambda prompt: prompt[same : same + 1])]
    return found
