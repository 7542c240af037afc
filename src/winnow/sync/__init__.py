"""Where rollouts are made, and how new weights get there. `max_lag` bounds how old a trained token may be."""

from .base import Sampler
from .in_process import InProcess

SYNCS: dict[str, type] = {"in_process": InProcess}
"""Name -> frozen dataclass of options."""

__all__ = ["SYNCS", "Sampler"]
