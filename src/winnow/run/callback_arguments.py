"""`Trainer.args` and the `args` of callbacks: the configuration, also under transformers' and TRL's names."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ..config import RunConfig, as_saved


class CallbackArguments:
    """The keys of a RunConfig; TRL's names for what a run has; transformers' defaults for its other settings.

    Read-only: a run keeps the configuration that it started with.
    """

    def __init__(self, config: RunConfig) -> None:
        vars(self).update(config=config, _named=_named(config))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "config":  # also while a copy is made
            raise AttributeError(name)
        if name in self._named:
            return self._named[name]
        if hasattr(self.config, name):
            return getattr(self.config, name)
        from transformers import TrainingArguments

        for field in dataclasses.fields(TrainingArguments):
            if field.name == name:
                return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        raise AttributeError(f"args: neither Winnow nor transformers has a setting '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args.{name}: a run keeps the configuration that it started with; start another run")

    def __repr__(self) -> str:
        return repr(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as it is saved, without secrets."""
        return as_saved(self.config)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return it with values that every tracker takes."""
        return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in self.to_dict().items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def _named(c: RunConfig) -> dict[str, Any]:
    """Return the values of transformers' settings that follow from a run's keys."""
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    rollouts = c.prompts_per_step * c.num_generations
    return {
        "eval_strategy": IntervalStrategy.STEPS if c.eval_steps else IntervalStrategy.NO,
        "do_train": True,
        "do_eval": c.eval_steps is not None,
        "save_strategy": SaveStrategy.STEPS,
        "logging_strategy": IntervalStrategy.STEPS,
        "logging_steps": 1,
        "num_train_epochs": c.num_train_epochs or 0.0,
        "per_device_train_batch_size": rollouts,
        "per_device_eval_batch_size": c.eval_generations,
        "train_batch_size": rollouts,
        "generation_batch_size": rollouts,
        "steps_per_generation": 1,
        "bf16": c.dtype == "bfloat16",
        "fp16": c.dtype == "float16",
        "greater_is_better": better_if_greater(c),
        "world_size": 1,
        "process_index": 0,
        "local_process_index": 0,
        "n_gpu": 1,
        "should_log": True,
        "should_save": True,
    }


def better_if_greater(c: RunConfig) -> bool:
    """Return `greater_is_better` or, if it is not set, transformers' default: False for a name that ends in `loss`."""
    if c.greater_is_better is not None:
        return c.greater_is_better
    return not (c.metric_for_best_model or "").endswith("loss")
