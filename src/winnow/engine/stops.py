"""Tokens that may end a sequence, as a table over the vocabulary: Python checks only few tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

MOST_SETS = 64
"""Sets of stop strings that an idle engine keeps."""
SLACK = 8
"""Extra tokens decoded before the longest stop string, so that no cut character or stripped space is at its edge."""


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Return the text in which stop strings are looked for; special tokens count as text."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def completes(tokenizer: Any, stops: tuple[str, ...], token_ids: np.ndarray) -> bool:
    """Return whether the last of `token_ids` (all sampled so far) completed one of the stop strings."""
    longest = max(len(stop.encode()) for stop in stops)
    text = decode(tokenizer, token_ids[-longest - SLACK :].tolist())
    return any(stop in text for stop in stops)


class StopTable:
    """Row s of `alert` [sets, V] marks tokens that end a sequence of stop set s or may complete a stop string."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._texts: list[tuple[str, str]] | None = None
        self._sets: dict[tuple[str, ...], int] = {}
        self._stops: list[tuple[str, ...]] = []
        self.alert = np.zeros((0, vocab_size), dtype=bool)
        self.add(())

    def add(self, stops: tuple[str, ...]) -> int:
        """Return the index of this set of stop strings."""
        if stops in self._sets:
            return self._sets[stops]
        row = np.zeros(self._vocab_size, dtype=bool)
        row[sorted(self.eos_ids)] = True
        if stops:
            for token, texts in enumerate(self._token_texts()):
                row[token] |= any(_may_complete(stop, text) for stop in stops for text in texts)
        self.alert = np.vstack([self.alert, row])
        self._stops.append(stops)
        self._sets[stops] = len(self._sets)
        return self._sets[stops]

    def forget(self) -> None:
        """Drop sets of stop strings of an idle engine, if there are many: agents may send a new one each time."""
        if len(self._stops) > MOST_SETS:
            self._sets.clear()
            self._stops.clear()
            self.alert = self.alert[:0]
            self.add(())

    def completed(self, stop_set: int, token_ids: np.ndarray) -> bool:
        """Return whether the last of `token_ids` (all sampled so far) completed a stop string."""
        stops = self._stops[stop_set]
        return bool(stops) and completes(self._tokenizer, stops, token_ids)

    def _token_texts(self) -> list[tuple[str, str]]:
        """Return each token's text alone and after another token (some decoders add or drop a space)."""
        if self._texts is None:
            alone = [decode(self._tokenizer, [i]) for i in range(self._vocab_size)]
            anchor = next((i for i, text in enumerate(alone) if text.strip() and "\ufffd" not in text), 0)
            before = alone[anchor]
            after = [decode(self._tokenizer, [anchor, i]) for i in range(self._vocab_size)]
            self._texts = [
                (one, two[len(before) :] if two.startswith(before) else two)
                for one, two in zip(alone, after, strict=True)
            ]
        return self._texts


def _may_complete(stop: str, text: str) -> bool:
    """Return whether appending `text` can complete `stop`. Part of a character may complete it."""
    if "\ufffd" in text and not stop.isascii():
        return True
    return stop in text or any(text.startswith(stop[-k:]) for k in range(1, min(len(stop), len(text)) + 1))
