"""What is checked before a run starts or goes on, so that what cannot work fails at once."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base.noise import noise_key
from ..config import ConfigError, MethodSpec, RunConfig, validate
from ..engine.base import Engine, Finished, Request
from ..env.base import Task
from ..env.prompting import encode_prompt
from ..env.rewards.rewarder import Rewarder
from ..learner import Learner
from ..learner.agreement import require_agreement
from ..types import Prompt, Rollout
from .build import sampling_params

PROBE_STREAM = 9
"""Keeps these draws apart from other noise."""
PROBES, PROBE_TOKENS = 8, 16
"""Sequences whose log-probabilities are compared at the start, and their tokens."""

MAY_CHANGE_ON_RESUME = frozenset(
    {"max_steps", "max_skipped_steps", "save_steps", "save_total_limit", "eval_steps", "log_completions", "report_to"}
    | {"max_failed_share", "reward_timeout_s", "sync"}
)
"""Keys that a resume may override; any other would make the rest of the run something else. Of `sync` the options of
sampler processes alone: runs with them cannot be repeated anyway."""


def refuse_changes(run_dir: Path, saved: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ConfigError with the difference when `config` would make the rest of the run something else."""
    before, now = (c.model_dump(mode="json") for c in (validate(saved), config))
    free = MAY_CHANGE_ON_RESUME | {"output_dir"}
    if before["sync"] != now["sync"] and {_name(before["sync"]), _name(now["sync"])} != {"processes"}:
        free -= {"sync"}
    if config.lr_scheduler_type != "constant":
        free -= {"max_steps"}  # it shapes every later learning rate
    changed = [k for k in now if before.get(k) != now[k] and k not in free]
    if changed:
        shown = "; ".join(f"{k}: {before.get(k)!r} then, {now[k]!r} now" for k in changed)
        raise ConfigError(f"{run_dir}: the configuration has changed since the checkpoint: {shown}")


def _name(spec: MethodSpec) -> Any:
    return spec if isinstance(spec, str) else spec.get("name")


def check_by_name(c: RunConfig, **given: Any) -> None:
    """Raises ConfigError when something that samplers must build themselves was given as an object."""
    if _name(c.sync) != "processes":
        return
    for name, value in given.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(part, str | dict | None) for part in parts):
            remedy = "a reward as 'file.py:function'" if name == "reward_funcs" else "by its name or path"
            raise ConfigError(
                f"sync: processes starts samplers that build everything by name, so {name} cannot be an object; give "
                f"it {remedy}, or train with sync: in_process"
            )


def check_evaluation(c: RunConfig, task: Task) -> None:
    """Raises ConfigError when there is nothing to evaluate on."""
    if c.eval_steps and not task.test:
        raise ConfigError("eval_steps is set, but the task has no held-out prompts; give it some, or remove eval_steps")


def check_prompts(c: RunConfig, task: Task, rewarder: Rewarder, tokenizer: Any, engine: Engine) -> None:
    """Try a few prompts on reward functions, tokenizer and engine: what fails for all of them fails here."""
    first = task.train[0]
    rewarder.check(first.columns)
    if not rewarder.names and task.make_env(first) is None:
        raise ConfigError("there is no reward: give reward_funcs, e.g. 'my_reward.py:my_reward'")
    causes = []
    for prompt in [*task.train[:16], *task.test[:16]]:
        try:
            ids = encode_prompt(tokenizer, prompt)
            if len(ids) > (limit := c.max_prompt_length):
                raise ConfigError(f"prompt '{prompt.id}' has {len(ids)} tokens, over max_prompt_length={limit}")
            engine.submit([Request("trial", ids, sampling_params(c), key=0)])
            engine.cancel(["trial"])
            return
        except ValueError as error:
            causes.append(str(error).removeprefix("request 'trial': "))
    raise ConfigError(f"none of the first {len(causes)} prompts can be used; {causes[0]}")


def check_agreement(c: RunConfig, prompts: Sequence[Prompt], tokenizer: Any, engine: Engine, learner: Learner) -> None:
    """Sample a few tokens with the learner's weights and compare both sides' log-probabilities of them.

    Raises ConfigError with the likely cause when they differ. Environments, rewards and every random state stay as
    they are; the engine is left idle, with the learner's weights as version 0.
    """
    if "logp" not in engine.provides:
        return
    engine.load_weights(learner.weights(), 0)
    params = replace(sampling_params(c), max_tokens=min(PROBE_TOKENS, c.max_completion_length), stop=())
    requests: dict[Hashable, Request] = {}
    for prompt in prompts[:16]:
        with contextlib.suppress(ValueError):  # some prompts may be unusable; `check_prompts` has found one that is not
            ids = encode_prompt(tokenizer, prompt)
            if len(ids) <= c.max_prompt_length:
                new = [Request((prompt.id, i), ids, params, noise_key(c.seed, PROBE_STREAM, i)) for i in range(2)]
                engine.submit(new)
                requests |= {request.id: request for request in new}
        if len(requests) >= PROBES:
            break
    rollouts = []
    while engine.pending:
        for event in engine.step():
            if isinstance(event, Finished):
                ids, everything = requests[event.id].prompt_ids, np.ones(len(event.token_ids), bool)
                rollouts.append(Rollout(0, ids, event.token_ids, everything, event.logp, event.versions))
    if rollouts:
        require_agreement(rollouts, learner, str(getattr(engine, "dtype", "unknown")))
