"""Checks before a run starts or resumes, so that what cannot work fails at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import (
    ConfigError,
    RunConfig,
    name_of,
    validate,
)
from ..engine.base import Engine, Request
from ..env.base import Task
from ..env.prompt_store import StoredPrompts
from ..env.prompting import encode_observation, encode_prompt
from ..env.rewards.rewarder import Rewarder
from ..learner import Learner
from ..learner.agreement import Agreement, require_agreement
from ..rollout.evaluate import RollOut
from ..sampler import SamplerOptions
from ..types import Job, Prompt, Visit
from .build_methods import Methods
from .prompt_example import warn_of_plain_text
from .resolved import sampling_params

PROBED, PROBES_EACH = 4, 2
"""Prompts whose log-probabilities are compared at the start, and rollouts of each."""


def in_steps(c: RunConfig, prompts: int) -> RunConfig:
    """Replace `num_train_epochs` by `max_steps`: an epoch has a step per `prompts_per_step` training prompts, whatever
    a selector skips or a filter refills. Raises ConfigError."""
    if c.num_train_epochs is None:
        return c
    steps = math.ceil(c.num_train_epochs * prompts / c.prompts_per_step)
    return validate(c.model_dump() | {"max_steps": steps, "num_train_epochs": None})


def check_rewards(task: Task, first: Prompt, rewarder: Rewarder) -> None:
    """Raise ConfigError where rollouts would have no reward or functions are never asked, ValueError where a function
    needs a column that the data lack."""
    rewarder.check(first.columns, first.messages is not None)
    for column, where in getattr(task, "unshown_columns", {}).items():
        if column not in rewarder.parameters:
            raise ConfigError(
                f"env: {where}: the model would not be given column '{column}', which is usually part of the "
                "prompt. If it is, write it into the messages, or use preset: alpaca or sharegpt. If a reward "
                "function reads it, name it among the function's arguments. Else remove the column"
            )
    if not rewarder.names and task.make_env(first) is None:
        raise ConfigError("reward_funcs: missing, and the task has no reward; give e.g. 'my_reward.py:my_reward'")
    if rewarder.names and getattr(task, "rewards_itself", False):
        raise ConfigError(
            f"reward_funcs: {', '.join(rewarder.names)} would never be asked: the environment gives the reward; remove "
            "them, or get_reward if you wrote it (TRL adds both: let get_reward do that)"
        )


def warn_of_sizes(c: RunConfig, task: Task) -> None:
    """Warn of held-out prompts beyond the default of `eval_prompts`, and of fewer prompts than a step takes."""
    left_out = not c.changed(("eval_prompts",)) and len(task.test) > c.eval_prompts
    if c.eval_steps and left_out:
        warnings.warn(
            f"eval_prompts: {c.eval_prompts} of {len(task.test)} held-out prompts are evaluated, the first ones; set "
            f"eval_prompts={len(task.test)} to evaluate all",
            stacklevel=2,
        )
    if len(task.train) < c.prompts_per_step:
        warnings.warn(
            f"prompts_per_step: {c.prompts_per_step}, but there are {len(task.train)} training prompts, so a step "
            "rolls out the same prompt several times; lower prompts_per_step, or give more prompts",
            stacklevel=2,
        )


def require_whole_groups(c: RunConfig, m: Methods, comparing: Mapping[str, bool | None]) -> None:
    """Raise ConfigError where a reward function that compares siblings would not see them all at once.

    `comparing`: the mark of each function. Warn of those without one where groups are scored in parts.
    """
    marked = [name for name, mark in comparing.items() if mark]
    unmarked = [name for name, mark in comparing.items() if mark is None]
    compares = f"reward_funcs: {', '.join(marked)} compares siblings (compares_siblings)"
    if marked and m.group_size.in_parts:
        raise ConfigError(
            f"{compares}, but group_size: {name_of(c.group_size)} scores the first {m.group_size.smallest} of a group "
            "before the others are sampled; use group_size: fixed"
        )
    if marked and m.advantage.greedy_baseline:
        raise ConfigError(
            f"{compares}, but advantage: {name_of(c.advantage)} subtracts the reward of a greedy rollout, which is "
            "scored alone; use another advantage"
        )
    if unmarked and m.group_size.in_parts:
        warnings.warn(
            f"group_size: {name_of(c.group_size)} scores the first {m.group_size.smallest} of a group before the "
            f"others are sampled. If {' or '.join(unmarked)} compares siblings, use group_size: fixed; if not, set its "
            "attribute compares_siblings = False",
            stacklevel=2,
        )


def require_reuse(c: RunConfig, sync: SamplerOptions, carry: bool) -> None:
    """Raise ConfigError for a `reuse` under which no group can be trained again. `carry`: a batch may wait a step."""
    if c.reuse is None:
        return
    if c.prompts_per_step == 1:
        raise ConfigError(
            "reuse: has no effect with prompts_per_step: 1, as one group of a batch is new; raise prompts_per_step, or "
            "remove reuse"
        )
    exact = getattr(sync, "lag", None) == "exact" and not carry
    if exact and c.reuse.max_age <= c.max_lag:
        raise ConfigError(
            f"reuse: max_age: {c.reuse.max_age} must be above max_lag: {c.max_lag}, the age at which every group is "
            "trained first here"
        )


def check_prompts(c: RunConfig, task: Task, rewarder: Rewarder, tokenizer: Any, engine: Engine | None) -> None:
    """Try a few prompts on reward functions, tokenizer and engine (if local); warn of prompts that will fail.

    Raises ConfigError when all of them fail.
    """
    check_rewards(task, task.train[0], rewarder)
    warn_of_plain_text(task, tokenizer)
    warn_of_failing_prompts(c.max_prompt_length, task, tokenizer)
    causes, limit = [], c.max_prompt_length
    for prompt in [*task.train[:16], *task.test[:16]]:
        try:
            ids = encode_prompt(tokenizer, prompt)
            if len(ids) > limit:
                raise ConfigError(f"prompt '{prompt.id}' has {len(ids)} tokens, over max_prompt_length={limit}")
            if task.max_turns > 1 and prompt.messages is not None:
                encode_observation(tokenizer, prompt, "?", np.array([], np.int64))
            if engine is None:
                return
            params = sampling_params(c)
            room = min(params.max_tokens, c.longest - len(ids))
            engine.submit([Request("trial", ids, replace(params, max_tokens=room), key=0)])
            engine.cancel(["trial"])
            return
        except ValueError as error:
            cause = str(error).removeprefix("request 'trial': ")
            causes.append(cause.replace("max_tokens", "max_completion_length"))
    raise ConfigError(f"none of the first {len(causes)} prompts can be used; {causes[0]}")


LONGEST = 8
"""Longest prompts, by characters, that are tried."""
TRIED = 256
"""Other prompts that are tried, plus one of each sequence of roles."""
COUNTED = 10_000
"""Most prompts that are counted, if one that was tried fails."""


def warn_of_failing_prompts(limit: int, task: Task, tokenizer: Any) -> None:
    """Warn how many prompts fail whenever drawn: those of over `limit` tokens, which are never cut, and those that the
    chat template refuses or the tokenizer cannot encode."""
    if task.max_turns > 1:  # what is encoded begins with the environment's first observation
        return
    for part, prompts in (("training", task.train), ("held-out", task.test)):
        some = prompts[:: -(-len(prompts) // COUNTED) or 1]
        one_of_each = {_shape(prompt): prompt for prompt in some}
        tried = [*_longest(prompts), *one_of_each.values(), *some[:: -(-len(some) // TRIED) or 1]]
        longest, refusal = _encoded(tokenizer, tried)
        if max(longest, default=0) <= limit and not refusal:
            continue
        lengths, refusals = _encoded(tokenizer, some)
        if max(longest, default=0) > limit:
            over = sum(n > limit for n in lengths)
            warnings.warn(
                f"{over} of {len(some)} {part} prompts have over {limit} tokens (the longest "
                f"{max([*longest, *lengths])}) and fail; raise max_prompt_length, or leave them out of the data",
                stacklevel=2,
            )
        if refusals:
            warnings.warn(
                f"{len(refusals)} of {len(some)} {part} prompts cannot be encoded and fail, the first: {refusals[0]}. "
                "Change these rows, leave them out of the data, or use another chat template",
                stacklevel=2,
            )


def _shape(prompt: Prompt) -> tuple[Any, ...]:
    """Return what chat templates usually refuse messages by: roles, kinds of content, other keys."""
    return tuple((m.get("role"), type(m.get("content")), *sorted(m.keys())) for m in prompt.messages or ())


def _longest(prompts: Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, StoredPrompts):
        return prompts.longest(LONGEST)
    return sorted(prompts, key=_characters, reverse=True)[:LONGEST]


def _characters(prompt: Prompt) -> int:
    return len(prompt.text or "") + sum(len(str(message.get("content"))) for message in prompt.messages or ())


def _encoded(tokenizer: Any, prompts: Sequence[Prompt]) -> tuple[list[int], list[str]]:
    """Return the tokens of each prompt that can be encoded, and why the others cannot."""
    lengths, refusals = [], []
    for prompt in prompts:
        try:
            lengths.append(len(encode_prompt(tokenizer, prompt)))
        except ValueError as error:
            refusals.append(str(error))
    return lengths, refusals


class NothingSampledError(ConfigError):
    """No probe could be sampled: no usable prompt, or environments or rewards are down."""


def check_agreement(
    prompts: Sequence[Prompt], roll_out: RollOut, learner: Learner, engine_dtype: Callable[[], str]
) -> Agreement:
    """Sample a few tokens with the learner's weights and compare the log-probabilities of sampler and learner.

    `roll_out` samples with these weights; `engine_dtype` returns its type afterwards. Environments, rewards and random
    states are untouched. Raises ConfigError with the likely cause when they differ, NothingSampledError when there is
    nothing to compare.
    """
    jobs = [Job(Visit(i, 0, prompt), PROBES_EACH, "probe") for i, prompt in enumerate(prompts[:PROBED])]
    rollouts = [rollout for group in roll_out(jobs) for rollout in group.rollouts]
    sampled = [rollout for rollout in rollouts if rollout.action_mask.any()]
    if not sampled:
        reason = next((rollout.reason for rollout in rollouts if rollout.reason), "no token was sampled")
        raise NothingSampledError(f"none of the first {len(jobs)} prompts can be used; {reason}")
    return require_agreement(sampled, learner, engine_dtype())
