"""The learner in one process."""
