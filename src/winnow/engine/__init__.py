"""Generation engines by name: the options of each, whose `build(model, tokenizer)` makes the engine."""

from .base import Engine, Event, Finished, Reached, Request, SamplingParams
from .local.engine import LocalEngine, LocalOptions

ENGINES: dict[str, type[LocalOptions]] = {"local": LocalOptions}

__all__ = [
    "ENGINES",
    "Engine",
    "Event",
    "Finished",
    "LocalEngine",
    "LocalOptions",
    "Reached",
    "Request",
    "SamplingParams",
]
