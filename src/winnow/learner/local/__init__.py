"""The learner in this process."""
