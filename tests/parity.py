"""The reward of most whole runs in tests, in a file that is quick to import: workers and samplers do."""

from __future__ import annotations


def parity_reward(completions: list[str], **columns: object) -> list[float]:
    """Varies within almost every group, whatever the model says: makes every step an update."""
    return [float(len(c.split()) % 2) for c in completions]


def checksum_reward(completions: list[str], **columns: object) -> list[float]:
    """Right for half of all texts, whatever their length: for samplers whose noise the test does not choose."""
    return [float(sum(map(ord, c)) % 2) for c in completions]
