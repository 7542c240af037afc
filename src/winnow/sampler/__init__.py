"""Samplers run rollouts and receive published weights; `max_lag` bounds how old these may be."""

from ..config import MethodSpec, method
from .base import Sampler, SamplerContext, SamplerOptions, SamplersLostError
from .in_process import InProcess
from .processes import Processes
from .ray import Ray

SYNCS: dict[str, type] = {"in_process": InProcess, "processes": Processes, "ray": Ray}
"""Name -> frozen dataclass of options with `provides` and `build(context) -> Sampler`."""

__all__ = ["SYNCS", "Sampler", "SamplerContext", "SamplersLostError", "sampler_options"]


def sampler_options(spec: MethodSpec) -> SamplerOptions:
    """Return the options that `sync` names."""
    options: SamplerOptions = method(SYNCS, spec, "sync")
    return options
