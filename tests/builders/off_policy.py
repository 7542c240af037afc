"""Build options of an update."""

from __future__ import annotations

from typing import Any

STEP: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": 9, "num_iterations": 1}


STEP |= {"max_completion_length": 16, "mask_truncated_completions": False, "seed": 0}
