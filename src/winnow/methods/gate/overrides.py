"""Overrides of removals: drawn at random next to the rule, accounted for by `audit.py`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...base.noise import noise_key, uniform_array
from ...types import Decision, GroupView, Verdict

AUDIT_STREAM = 4
"""Separates the draws of audits from other noise."""


@dataclass(frozen=True)
class Overrides:
    """Random overrides of one rule's stops; travels with the rule to its sampler.

    A sibling (or, at environment steps, a group) has one draw for all its gate points, and counts as one removal.
    """

    name: str
    seed: int
    probability: float

    def draws(self, last_N: np.ndarray, *key: int) -> np.ndarray:
        """Return bool [N]: which of the removals (*key, last) are overridden.

        A function of seed, name, key and probability only: order and batching do not change it.
        """
        noise = noise_key(self.seed, AUDIT_STREAM, zlib.crc32(self.name.encode()), *key)
        return uniform_array(noise, last_N) < self.probability

    def apply(self, view: GroupView, verdict: Verdict, earlier: Sequence[Decision]) -> Verdict:
        """Return the rule's verdict, or its override; `earlier` are this rule's decisions about the same rollout.

        A rollout passes all decisions with `survival(p, epsilon)`, p its chance to pass the rule alone. The verdict's
        probability is the factor of this decision on that chance.
        """
        override = first_override(earlier)
        overridden = None if override is None else override.verdict.override_probability
        if not verdict.keep and overridden is None:
            key = [view.visit.prompt.ordinal, view.visit.epoch]
            *before, last = key if view.sibling is None else [*key, view.sibling]
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
            override_probability=None if verdict.keep else overridden,
            evidence={**verdict.evidence, ALONE: p, OVERRIDE: epsilon},
        )


def first_override(decisions: Sequence[Decision]) -> Decision | None:
    """Return the first decision that an audit overrode."""
    return next((d for d in decisions if d.verdict.override_probability is not None), None)


ALONE, OVERRIDE = "kept_alone", "override_probability"
"""Keys in the evidence: the chance that the rule alone would have kept it this time, and that of an audit."""


def survival(p: float, epsilon: float) -> float:
    """Return p + (1 - p) epsilon: chance to survive when removals are overridden with probability `epsilon`.

    `p` is the chance to survive the rule alone, 0 or 1 if it is not random. For survivors of the rule and of an
    override alike, the inverse of this probability is the Horvitz-Thompson weight: epsilon if a deterministic rule was
    overridden, 1 if it keeps, and in between for a random rule.
    """
    return p + (1 - p) * epsilon


def keep_probability(verdict: Verdict) -> float:
    """Return the chance that the rule of this verdict would keep."""
    return verdict.probability if verdict.keep else 1 - verdict.probability
