"""Policy losses: what an update does with a sampled token, its advantage and its importance ratio."""

from .base import PolicyLoss, Sampled
from .cispo import Cispo
from .clip import Clip
from .dppo import Dppo
from .gspo_token import GspoToken
from .plain import Plain
from .sapo import Sapo

POLICY_LOSSES: dict[str, type] = {
    "clip": Clip,
    "plain": Plain,
    "cispo": Cispo,
    "sapo": Sapo,
    "gspo_token": GspoToken,
    "dppo": Dppo,
}
"""Name -> frozen dataclass of options, which is the loss."""

__all__ = ["POLICY_LOSSES", "Clip", "Plain", "PolicyLoss", "Sampled"]
