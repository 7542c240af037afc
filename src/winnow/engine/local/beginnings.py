"""What prompts that start together have in common, such as a system prompt, tools or examples.

It goes through the model once for all of them. Kept while the engine has work and the weights stay: an idle engine
remembers nothing that could change what comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from .backend import Kept, Tokens, common, passes
from .hf import HFBackend
from .llama import LlamaBackend

SAVED_TOKENS = {"cpu": 256, "cuda": 4096}
"""Tokens that a new beginning has to save, by device: one more pass costs about so many."""
MOST_KEPT = 8
"""Beginnings that are kept; the one that was not used for longest makes room."""


class Beginnings:
    """Beginnings of prompts that have been through the model."""

    def __init__(self, backend: HFBackend | LlamaBackend) -> None:
        self._backend = backend
        self._least = SAVED_TOKENS.get(backend.device.type, SAVED_TOKENS["cpu"])
        self._kept: dict[Tokens, Kept] = {}

    def clear(self) -> None:
        self._kept.clear()

    def read(self, prompts: Sequence[Tokens]) -> tuple[dict[Tokens, Kept], Counter[Tokens]]:
        """Return the beginning of each prompt that has one, and the tokens that went through the model now.

        These are counted for the first prompt of each new beginning.
        """
        left = [prompt for prompt in prompts if self._of(prompt) is None]
        new = shared_beginnings(left, self._least)[:MOST_KEPT]
        for some in passes(new, lambda tokens: (len(tokens), 0), self._backend.mixed_lengths):
            done = self._backend.prefill(some)
            for row, tokens in enumerate(some):  # copies: a view would keep what was read beside it
                keys, values = ([t[row, :, : len(tokens)].clone() for t in k] for k in (done.keys, done.values))
                self._kept[tokens] = Kept(tokens, keys, values)
        computed: Counter[Tokens] = Counter()
        for tokens in new:
            computed[next(prompt for prompt in left if _serves(tokens, prompt))] += len(tokens)
        found = {prompt: kept for prompt in prompts if (kept := self._of(prompt))}
        for kept in found.values():
            self._kept[kept.tokens] = self._kept.pop(kept.tokens)
        while len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return found, computed

    def _of(self, prompt: Tokens) -> Kept | None:
        found = [kept for tokens, kept in self._kept.items() if _serves(tokens, prompt)]
        return max(found, key=lambda kept: len(kept.tokens), default=None)


def _serves(tokens: Tokens, prompt: Tokens) -> bool:
    """Whether a prompt begins so, goes on (its last token has to be computed), and not for longer than that."""
    n = len(tokens)
    return n < len(prompt) <= 2 * n and prompt[:n] == tokens


def shared_beginnings(prompts: Iterable[Tokens], least: int) -> list[Tokens]:
    """Return beginnings that save at least so many tokens, those that save most first.

    Of several for the same prompts the shortest is taken, so that as many as possible have it.
    """
    found: dict[Tokens, int] = {}
    open_ = [sorted(set(prompts))]
    while open_:
        some = open_.pop()
        if max(map(len, some), default=0) * (len(some) - 1) < least:
            continue
        n = common(some[0], some[-1])  # in order, so of all
        tokens = some[0][:n]
        served = [prompt for prompt in some if _serves(tokens, prompt)]
        if (saved := n * (len(served) - 1)) >= least:
            found[tokens] = saved
            some = [prompt for prompt in some if not _serves(tokens, prompt)]
        open_ += [list(part) for _, part in groupby(some, key=lambda prompt: prompt[n : n + 1])]
    return sorted(found, key=lambda tokens: (-found[tokens], tokens))
