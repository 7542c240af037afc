"""M2PO: drop the tokens furthest from the sampler until the second moment of the log ratios is small.

Zheng et al. 2025, "Prosperity before collapse", with the candidates of the authors' code. Two differences from that
code. It clips at the last ratio kept, never closer than 0.7 and 1.5; here tokens are dropped, as in the paper's
algorithm. It chooses per micro-batch; here the optimizer batch decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...base.token_filters import running_sum
from ...config.options import CHECKED
from .ratios import Evidence, log_ratio, weight

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, config=CHECKED)
class M2PO:
    """Weight 0 for the tokens furthest from the sampler, until the mean squared log ratio is under `threshold`.

    Only tokens that clipping could affect are candidates: ratio > 1 with a positive advantage, or ratio < 1 with a
    negative one. The update would move those further away. All other tokens have their ratio as weight.
    """

    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.04
    weigh: bool = True
    """False: kept tokens have weight 1, and the clipped loss takes its ratio to the sampler, which holds the weight."""
    active = True

    def __call__(self, on: Evidence) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.over_batch([on])(on)

    def over_batch(self, parts: Iterable[Evidence]) -> Cut:
        """Return the cut over the tokens of all micro-batches together, so that their borders do not matter."""
        import torch

        squared = [log_w[biting] ** 2 for log_w, biting in map(_judged, parts)]
        return Cut(cutoff(torch.cat(squared), self.threshold), self.weigh)


@dataclass(frozen=True)
class Cut:
    """A decided `M2PO`: tokens whose squared log ratio is `cutoff` or more are dropped."""

    cutoff: float
    weigh: bool
    active = True

    def __call__(self, on: Evidence) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        import torch

        log_w, biting = _judged(on)
        dropped = biting & (log_w**2 >= self.cutoff)
        kept = weight(log_w) if self.weigh else torch.ones_like(log_w)
        return torch.where(dropped, 0.0, kept), {"clipped": dropped.sum(), "clipped_of": on.mask_BT.sum()}


def _judged(on: Evidence) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log ratios of tokens and which of them clipping could affect, both [B, T]."""
    log_w = log_ratio(on.logp_BT, on.sampler_logp_BT, on.mask_BT, "token")
    return log_w, log_w * on.advantages_B[:, None].sign() > 0


def cutoff(squared_N: torch.Tensor, threshold: float) -> float:
    """Return the smallest squared log ratio to drop for a mean of those below under `threshold`; else infinity.

    Tokens are dropped from the largest down. Equal ones go together, so token order does not matter.
    """
    import torch

    squared_N = squared_N.sort().values
    means_N = running_sum(squared_N.double()) / torch.arange(1, len(squared_N) + 1, device=squared_N.device)
    kept = int((means_N < threshold).sum())  # the mean of ascending numbers never falls
    return float(squared_N[kept]) if kept < len(squared_N) else math.inf
