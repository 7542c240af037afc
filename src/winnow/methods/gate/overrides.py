"""Overrides of what a rule removes: drawn at random where the rule is asked, accounted for by `audit.py`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...base.noise import as_tensor, noise_key, uniform
from ...types import Decision, GroupView, Verdict

AUDIT_STREAM = 4
"""Keeps the draws of audits apart from other noise."""


@dataclass(frozen=True)
class Overrides:
    """Stops of one rule that are overridden at random; travels with the rule to where it is asked.

    A sibling (or, at environment steps, a group) has one draw for all its gate points, and counts as one removal.
    """

    name: str
    seed: int
    probability: float

    def draws(self, last_N: np.ndarray, *key: int) -> np.ndarray:
        """bool [N]: which of the removals (*key, last) are overridden.

        A function of seed, name, key and probability only: neither order nor batching changes it.
        """
        noise = as_tensor([noise_key(self.seed, AUDIT_STREAM, zlib.crc32(self.name.encode()), *key)])
        drawn: np.ndarray = uniform(noise, torch.from_numpy(last_N.astype(np.int64))).numpy()
        return drawn < self.probability

    def apply(self, view: GroupView, verdict: Verdict, earlier: Sequence[Decision]) -> Verdict:
        """The rule's verdict, or its override; `earlier` are the decisions under this rule about the same rollout.

        What comes through all of them does so with `survival(p, epsilon)` if p is its chance to come through the rule
        alone; the verdict's probability is the factor by which this decision changed that.
        """
        overridden = next((d.verdict.overridden for d in earlier if d.verdict.overridden is not None), None)
        if not verdict.keep and overridden is None:
            *before, last = view.visit.prompt.ordinal, view.visit.epoch, *_only(view.sibling)
            if bool(self.draws(np.array([last]), *before)[0]):
                overridden = self.probability
        epsilon = self.probability if overridden is None else overridden
        alone = math.prod((d.verdict.evidence[ALONE] for d in earlier), start=1.0)
        p = keep_probability(verdict)
        survives = survival(alone * p, epsilon) / survival(alone, epsilon)
        goes_on = verdict.keep or overridden is not None
        return replace(
            verdict,
            keep=goes_on,
            reason=verdict.reason if verdict.keep or not goes_on else f"audit: {verdict.reason}",
            probability=survives if goes_on else 1 - survives,
            overridden=None if verdict.keep else overridden,
            evidence={**verdict.evidence, ALONE: p, OVERRIDE: epsilon},
        )


ALONE, OVERRIDE = "kept_alone", "override_probability"
"""Among the evidence: the chances with which the rule by itself would have let it pass this time, and an audit."""


def _only(sibling: int | None) -> tuple[int, ...]:
    return () if sibling is None else (sibling,)


def survival(p: float, epsilon: float) -> float:
    """p + (1 - p) epsilon: chance to come through when what a rule removes is overridden with probability `epsilon`.

    `p` is the chance to come through the rule alone, 0 or 1 if it is not random. Whichever way a survivor came, through
    the rule or an override, this is the probability whose inverse is its Horvitz-Thompson weight: epsilon where a
    deterministic rule was overridden, 1 where it keeps, and in between where the rule itself is random.
    """
    return p + (1 - p) * epsilon


def keep_probability(verdict: Verdict) -> float:
    """The chance with which the rule that gave this verdict would keep."""
    return verdict.probability if verdict.keep else 1 - verdict.probability
