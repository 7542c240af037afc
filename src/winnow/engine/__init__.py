"""Generation engines by name: each entry is an options class whose `build(ModelReference, tokenizer)` makes it."""

from .base import CAPABILITIES, Engine, Event, Finished, Reached, Request, SamplingParams
from .facts import Facts
from .loading import ModelReference
from .local.engine import LocalEngine, LocalOptions
from .sequences import SequenceEngine, Sequences
from .vllm.options import VllmOptions

ENGINES: dict[str, type] = {"local": LocalOptions, "vllm": VllmOptions}

__all__ = [
    "CAPABILITIES",
    "ENGINES",
    "Engine",
    "Event",
    "Facts",
    "Finished",
    "LocalEngine",
    "LocalOptions",
    "ModelReference",
    "Reached",
    "Request",
    "SamplingParams",
    "SequenceEngine",
    "Sequences",
    "VllmOptions",
]
