"""Generation engines by name: the options of each, whose `build(ModelReference, tokenizer)` makes the engine."""

from .base import Engine, Event, Finished, Reached, Request, SamplingParams
from .loading import ModelReference
from .local.backend import check_state
from .local.engine import LocalEngine, LocalOptions
from .local.requests import check_request

ENGINES: dict[str, type] = {"local": LocalOptions}

__all__ = [
    "ENGINES",
    "Engine",
    "Event",
    "Finished",
    "LocalEngine",
    "LocalOptions",
    "ModelReference",
    "Reached",
    "Request",
    "SamplingParams",
    "check_request",
    "check_state",
]
