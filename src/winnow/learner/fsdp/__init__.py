"""The learner over several ranks: FSDP2 in Ray actors."""
