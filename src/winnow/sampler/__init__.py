"""Samplers: places where rollouts are made, and ways that new weights get there. `max_lag` bounds their age."""

from .base import Sampler, SamplerContext, SamplersLostError
from .in_process import InProcess
from .processes import Processes
from .ray import Ray

SYNCS: dict[str, type] = {"in_process": InProcess, "processes": Processes, "ray": Ray}
"""Name -> frozen dataclass of options with `provides` and `build(context) -> Sampler`."""

__all__ = ["SYNCS", "Sampler", "SamplerContext", "SamplersLostError"]
