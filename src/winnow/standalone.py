"""Evaluation of a model or a run outside training: `winnow eval`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import checkpoint
from .build import build_policy, build_task, sampling_params
from .config import ConfigError, validate
from .evaluate import Evaluator
from .records import CONFIG, LEDGER
from .reward import Rewarder


def evaluate_model(model: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """pass@k, avg@n, greedy and costs on held-out prompts.

    `model` is a run directory (its configuration is the default for `values`), a Hugging Face directory or a hub name.
    Raises ConfigError when there is no task or no held-out prompt.
    """
    settings, source = _settings(model, values)
    if "env" not in settings:
        raise ConfigError(f"'{model}' is not a run, so the task must be named: --env countdown")
    c = validate(settings | {"model": source, "lora": None, "beta": 0.0}, model)
    task = build_task(c.env)
    prompts = task.test[: c.eval_prompts]
    if not prompts:
        raise ConfigError(f"task {task.name} has no held-out prompts")
    policy, engine = build_policy(c, None, None, None)
    rewarder = Rewarder(c.reward_funcs or task.reward_funcs, c.reward_weights, c.reward_timeout_s)
    try:
        found = Evaluator(engine, task, policy.tokenizer, rewarder, seed=c.seed).run(
            prompts,
            sampling_params(c, evaluation=True),
            n=c.eval_generations,
            max_prompt_length=c.max_prompt_length,
            success_reward=c.success_reward,
            greedy=c.eval_greedy,
        )
    finally:
        rewarder.close()
    return {
        "model": source,
        **found.metrics,
        "prompts": len(prompts),
        "n": c.eval_generations,
        "temperature": c.eval_temperature,
        "tokens": found.tokens,
        "seconds": round(found.seconds, 3),
    }


def _settings(model: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Configuration values and the directory or name to load the policy from."""
    path = Path(model)
    if not (path / LEDGER).exists():
        return dict(values), model
    settings = json.loads((path / CONFIG).read_text(encoding="utf-8")) | dict(values)
    if (path / "model").is_dir():
        return settings, str(path / "model")
    saved = checkpoint.latest(path)
    if saved is None:
        raise ConfigError(f"{path}: has neither a finished model nor a checkpoint yet")
    if settings.get("lora"):
        raise ConfigError(f"{path}: has adapters only so far; finish it with `winnow resume {path}`, then evaluate")
    return settings, str(saved / "model")
