"""Rewards: functions, scores, and where they run."""
