"""Winnow: post-train language models with group-relative RL, and spend compute only on rollouts that teach.

from winnow import Trainer
Trainer(model="path/or/hub-name", env="countdown", config={"max_steps": 200}).train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import __version__

if TYPE_CHECKING:
    from .base.errors import ConfigError
    from .config import RunConfig, load_config
    from .engine.local.engine import LocalEngine
    from .env.rewards.reward_model import RewardModel
    from .run.callbacks import TrainerCallback, TrainerControl, TrainerState
    from .run.trainer import Trainer

__all__ = [
    "ConfigError",
    "LocalEngine",
    "RewardModel",
    "RunConfig",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "__version__",
    "load_config",
]

_HOMES = {
    "ConfigError": "base.errors",
    "LocalEngine": "engine.local.engine",
    "RewardModel": "env.rewards.reward_model",
    "RunConfig": "config",
    "Trainer": "run.trainer",
    "TrainerCallback": "run.callbacks",
    "TrainerControl": "run.callbacks",
    "TrainerState": "run.callbacks",
    "load_config": "config",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the worker processes of reward functions need the package, but not torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'winnow' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
