"""Build options of a gate that prunes."""

from __future__ import annotations

PRUNING = {"name": "arrol", "at": 2, "cold_start": 1}
