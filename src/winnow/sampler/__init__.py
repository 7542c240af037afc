"""Samplers run rollouts and receive published weights; `max_lag` bounds how old these may be."""

from .base import Sampler, SamplerContext, SamplerOptions, SamplersLostError
from .in_process import InProcess
from .processes import Processes
from .ray import Ray
from .server import Server

SYNCS: dict[str, type] = {"in_process": InProcess, "processes": Processes, "ray": Ray, "server": Server}
"""Name -> frozen dataclass of options with `provides` and `build(context) -> Sampler`."""

__all__ = [
    "SYNCS",
    "InProcess",
    "Processes",
    "Ray",
    "Sampler",
    "SamplerContext",
    "SamplerOptions",
    "SamplersLostError",
    "Server",
]
