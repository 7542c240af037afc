"""VCPO and its parts at a lag of twelve, fixed and mixed: the step size uses the ESS of the whole minibatch."""

from __future__ import annotations

from families.async_claims import LAG, arm, collect, draw, figures, variants_table
from families.base import Family, Said

VARIANTS = ("tis8", "otb", "ess-only", "vcpo")
MIXED = ("tis8", "m2po", "vcpo")
"""Variants that also run with rollouts of different lags, 0 to `LAG`, which VCPO (E.2) says is harder for M2PO."""
ARMS = (
    arm("tis8", 0),
    *(arm(variant, LAG) for variant in VARIANTS),
    *(arm(variant, LAG, mixed=True) for variant in MIXED),
)


def tables(said: Said) -> dict[str, str]:
    return {"vcpo": variants_table(figures(said), ARMS)}


FAMILY = Family("vcpo-claims", ARMS, collect, tables, draw, may_stop=True)
