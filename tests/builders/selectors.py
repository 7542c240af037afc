"""Selectors that are no stream of visits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unrelated:
    """A selector that does not derive from `StreamSelector`."""

    def build(self, prompts: Any, seed: int, judge: Any) -> Unrelated:
        return self
