"""Uses a model or a run outside training, for `winnow eval` and `winnow pass-rates`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..base.errors import ConfigError
from ..config import REFERENCE, RunConfig, validate
from ..engine.base import close_engine
from ..env.base import Task
from ..env.rewards.rewarder import Rewarder
from ..learner import Policy
from ..methods.success import Success
from ..record.records import LEDGER, fingerprints_of, read_config
from ..rollout.evaluate import RollOut, evaluate, require_judged, run_jobs
from ..rollout.runner import RolloutRunner
from ..types import Prompt
from . import checkpoint
from .build import build_policy, build_rewarder
from .build_methods import build_success
from .inputs import build_task
from .preflight import check_rewards
from .resolve import resolve_here


def evaluate_model(model: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return pass@k, avg@n, greedy and costs on held-out prompts.

    `model` is a run directory (its configuration is the default for `values`), a Hugging Face directory or a hub name.
    Raises ConfigError when there is no task or no held-out prompt.
    """
    with model_config(model, values) as (c, name, saved):
        task = build_task(c.env)
        prompts = task.test[: c.eval_prompts]
        if not prompts:
            raise ConfigError(f"env: task {task.name} has no held-out prompts")
        with opened(c, task, prompts, saved) as (_, roll_out, _, success):
            evaluation = evaluate(roll_out, prompts, n=c.eval_generations, success=success, greedy=c.eval_greedy)
            require_judged(evaluation.groups)
    return {
        "model": name,
        "right": str(success),
        **evaluation.metrics,
        "prompts": len(prompts),
        "n": c.eval_generations,
        "temperature": c.eval_temperature,
        "tokens": evaluation.tokens,
        "seconds": round(evaluation.seconds, 3),
    }


@contextmanager
def model_config(model: str, values: Mapping[str, Any]) -> Iterator[tuple[RunConfig, str, dict[str, str]]]:
    """Yield the configuration to use a model under, the model's name (its directory, or that on a hub), and what
    `opened` compares: a run's fingerprints of what `values` do not replace.

    The configuration's `model` stays until the block ends, though a running run may delete its checkpoint. A run's
    configuration is the default for `values`. Raises ConfigError without a task or a whole model, CheckpointError when
    the newest checkpoint is damaged.
    """
    with ExitStack() as stack:
        settings, source, name = _settings(stack, model, values)
        if "env" not in settings:
            raise ConfigError(f"env: missing, as '{model}' is not a run; name the task, e.g. env=countdown")
        no_reference = {key: RunConfig.model_fields[key].default for key in REFERENCE}
        yield validate(settings | {"model": source, "lora": None} | no_reference, model), name, _saved(model, values)


@contextmanager
def opened(
    config: RunConfig,
    task: Task,
    prompts: Sequence[Prompt],
    saved: Mapping[str, str] = MappingProxyType({}),
    report: frozenset[str] = frozenset(),
) -> Iterator[tuple[Policy, RollOut, Rewarder, Success]]:
    """Yield policy, roll-out function, rewarder and success rule; engine and rewarder are closed when the block ends.

    `prompts`: those that will be rolled out. `saved`: fingerprints of a run's task and reward functions. `report`:
    extra values of evaluation rollouts; see `RolloutOptions`. Raises ConfigError where the configuration does not make
    the same task and functions, e.g. as they were objects, and ValueError where these give no reward.
    """
    resolved = resolve_here(config, alone=True, several_turns=task.max_turns > 1)
    resolved.set_threads()
    config = resolved.config
    policy, engine = build_policy(resolved)
    rewarder = build_rewarder(config, task)
    rewarder.trainer_state.global_step = config.max_steps if saved else 0  # of a run its end
    rewarder.trainer_state.max_steps = config.max_steps
    assert engine is not None
    options = dict(resolved.rollout_options)
    options["train"] = replace(options["train"], greedy_baseline=False)
    options["eval"] = replace(options["eval"], report=report)
    runner = RolloutRunner(engine, task, policy.tokenizer, rewarder, options)
    try:
        sources = (("env", "task", task), ("reward_funcs", "reward functions", rewarder))
        for key, name, source in sources:
            if name in saved and saved[name] != source.fingerprint():
                raise ConfigError(
                    f"{key}: the configuration of the run does not make its {name} again (they were objects, or files "
                    f"have changed); name them, {key}=..."
                )
        check_rewards(task, prompts[0], rewarder)
        success = build_success(config, task, rewarder.aliases, config.reward_weights)
        yield policy, lambda jobs: run_jobs(runner, jobs), rewarder, success
    finally:
        rewarder.close()
        close_engine(engine)


def _settings(stack: ExitStack, model: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Return configuration values, the directory or name to load the policy from, and its display name."""
    path = Path(model)
    if not (path / LEDGER).exists():
        return dict(values), model, model
    settings = _merged(read_config(path), values)
    source, shown = stack.enter_context(checkpoint.newest_model(path))
    return settings, str(source), str(shown)


def _saved(model: str, values: Mapping[str, Any]) -> dict[str, str]:
    saved = fingerprints_of(Path(model))
    if "env" in values:
        saved.pop("task", None)
    if {"env", "reward_funcs"} & set(values):
        saved.pop("reward functions", None)
    return saved


def _merged(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` updated with `values`; a section without a `name` is merged into that of the run."""
    merged = dict(settings)
    for key, value in values.items():
        before = {"name": merged[key]} if isinstance(merged.get(key), str) else merged.get(key)
        into = isinstance(value, Mapping) and isinstance(before, Mapping) and "name" not in value
        merged[key] = _merged(before, value) if into else value  # type: ignore[arg-type]
    return merged
