"""Selectors: choose the prompts to roll out next."""

from __future__ import annotations

from .backoff import Backoff
from .bayes import Bayes
from .greso import Greso
from .ordered import Ordered
from .pass_rate import PassRateBand
from .stream import StreamSelector
from .thompson import Thompson
from .uniform import Uniform

__all__ = ["SELECTORS", "StreamSelector"]

SELECTORS: dict[str, type] = {
    "uniform": Uniform,
    "ordered": Ordered,
    "greso": Greso,
    "backoff": Backoff,
    "pass_rate": PassRateBand,
    "bayes": Bayes,
    "thompson": Thompson,
}
"""Name -> frozen dataclass of options with `build(prompts, seed, judge) -> StreamSelector`."""
