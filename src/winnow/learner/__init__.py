"""Learners compute gradients and update the policy. A learner is one file and one line of this table."""

from .base import Learner, Policy
from .local.options import Local

LEARNERS: dict[str, type] = {"local": Local}

__all__ = ["LEARNERS", "Learner", "Local", "Policy"]
