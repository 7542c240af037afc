"""Keys that may change on a resume; checked before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..config import RunConfig, read_settings, validate
from .records import CONFIG, read_config

MAY_CHANGE_ON_RESUME = frozenset(
    {"max_steps", "max_skipped_steps", "save_steps", "save_total_limit", "eval_steps", "log_completions", "report_to"}
    | {"save_dtype", "max_failed_share", "reward_timeout_s", "reward_memory_mb", "reward_env", "reward_sandbox"}
    | {"resume"}
    | {"sync", "learner", "threads", "metric_for_best_model", "greater_is_better"}
    | {"engine", "tokens_per_microbatch", "gradient_checkpointing", "torch_compile"}
    | {"push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo"}
)
"""Keys a resume may override; others would change what the rest of the run computes. Of `sync` only options of sampler
processes, whose runs are not repeatable anyway; of `learner` where it runs; of `engine` what bounds its memory;
`save_steps` and `eval_steps` not with `lag: continuous`. These, `tokens_per_microbatch`, `gradient_checkpointing`,
`torch_compile` and `threads` change how sums are rounded."""
MEMORY_OPTIONS = frozenset({"slots", "gpu_memory_utilization", "sleep"})
"""Options of `engine` that bound its memory. `max_length` is not one of them: rollouts end there."""


def resumed_config(run_dir: Path, overrides: Mapping[str, Any]) -> RunConfig:
    """Return a run's saved configuration with `overrides`. Raises ConfigError naming a key that may not change."""
    for key in overrides:
        if key not in MAY_CHANGE_ON_RESUME:
            allowed = ", ".join(sorted(MAY_CHANGE_ON_RESUME))
            raise ConfigError(f"{key}: cannot change on a resume (only these can: {allowed}); start a new run")
    values = read_config(run_dir) | dict(overrides) | {"output_dir": str(run_dir)}
    return validate(values, str(run_dir / CONFIG))


def changes_of(run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the keys that `key=value` overrides of a run change; dots reach into its own sections."""
    keys = {override.partition("=")[0].partition(".")[0] for override in overrides}
    values = read_settings(None, overrides, read_config(run_dir)) if keys else {}
    return {key: values[key] for key in values if key in keys}
