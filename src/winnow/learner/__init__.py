"""Learners: compute gradients and update the policy. A new learner needs one file and one line in this table."""

from .base import Learner, LearnerLostError, Policy
from .context import LearnerContext
from .fsdp.learner import Fsdp
from .local.learner import Local

LEARNERS: dict[str, type] = {"local": Local, "fsdp": Fsdp}

__all__ = ["LEARNERS", "Fsdp", "Learner", "LearnerContext", "LearnerLostError", "Local", "Policy"]
