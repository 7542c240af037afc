"""The learner on several ranks: FSDP2 in Ray actors."""
