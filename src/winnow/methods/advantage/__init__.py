"""Advantages: how much better than expected each rollout was; NaN where a member is absent.

Most are pure functions of one group's rewards. Others need the whole batch or a greedy rollout, and some
have a baseline that only the update can compute (`InUpdate`).
"""

from __future__ import annotations

from ._base import Advantage
from .dr_grpo import DrGrpo, dr_grpo
from .grpo import Grpo, grpo
from .in_update import InUpdate
from .max_at_k import MaxAtK, max_at_k
from .opo import Opo, opo
from .opob import Opob, optimal_baseline
from .otb import Otb
from .reinforce_pp import ReinforcePP, reinforce_pp
from .remax import ReMax
from .rloo import Rloo, rloo

ADVANTAGES: dict[str, type] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "dr_grpo": DrGrpo,
    "max_at_k": MaxAtK,
    "reinforce_pp": ReinforcePP,
    "remax": ReMax,
    "opob": Opob,
    "otb": Otb,
    "opo": Opo,
}

__all__ = [
    "ADVANTAGES",
    "Advantage",
    "InUpdate",
    "dr_grpo",
    "grpo",
    "max_at_k",
    "opo",
    "optimal_baseline",
    "reinforce_pp",
    "rloo",
]
