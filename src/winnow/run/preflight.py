"""Checks before a run starts, so that what cannot work fails at once: prompts, rewards, agreement, places."""

from __future__ import annotations

import heapq
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..base import cluster
from ..base.errors import ConfigError
from ..base.machine import MIB, main_memory, usable_cores
from ..config import RunConfig, validate
from ..config.options import new_groups
from ..engine.base import Engine, Request
from ..env.base import Task, has_no_environment
from ..env.prompt_store import StoredPrompts
from ..env.prompting import encode_observation, encode_prompt
from ..env.rewards.rewarder import Rewarder
from ..learner import Fsdp, Learner
from ..learner.agreement import Agreement, require_agreement
from ..learner.base import Sizes
from ..rollout.evaluate import RollOut
from ..rollout.options import RolloutOptions, check_length, within
from ..sampler import Ray
from ..sampler.base import PoolOptions
from ..tasks.agents import AgentTask
from ..tasks.prompt_example import warn_of_plain_text
from ..types import Job, Prompt, Visit
from .budget import Shapes, engine_bytes
from .build_methods import Methods
from .resolved import Resolved

PROBED, PROBES_EACH = 4, 2
"""Prompts whose log-probabilities are compared at the start, and rollouts of each."""


def in_steps(c: RunConfig, prompts: int) -> RunConfig:
    """Replace `num_train_epochs` by `max_steps`: a step takes as many training prompts as a full batch has new groups,
    whatever a selector skips or a filter refills. Raises ConfigError."""
    if c.num_train_epochs is None:
        return c
    steps = math.ceil(c.num_train_epochs * prompts / new_groups(c.prompts_per_step, c.reuse))
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
    if not rewarder.names and (getattr(task, "needs_reward_funcs", False) or task.make_env(first) is None):
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


def require_whole_groups(m: Methods, comparing: Mapping[str, bool | None]) -> None:
    """Raise ConfigError where a reward function that compares siblings would not see them all at once.

    `comparing`: the mark of each function. Warn of those without one where groups are scored in parts.
    """
    marked = [name for name, mark in comparing.items() if mark]
    unmarked = [name for name, mark in comparing.items() if mark is None]
    compares = f"reward_funcs: {', '.join(marked)} compares siblings (compares_siblings)"
    (group_size,), (advantage,) = m.options.names["group_size"], m.options.names["advantage"]
    if marked and m.group_size.in_parts:
        raise ConfigError(
            f"{compares}, but group_size: {group_size} scores the first {m.group_size.smallest} of a group "
            "before the others are sampled; use group_size: fixed"
        )
    if marked and m.advantage.greedy_baseline:
        raise ConfigError(
            f"{compares}, but advantage: {advantage} subtracts the reward of a greedy rollout, which is "
            "scored alone; use another advantage"
        )
    if unmarked and m.group_size.in_parts:
        warnings.warn(
            f"group_size: {group_size} scores the first {m.group_size.smallest} of a group before the "
            f"others are sampled. If {' or '.join(unmarked)} compares siblings, use group_size: fixed; if not, set its "
            "attribute compares_siblings = False",
            stacklevel=2,
        )


def check_prompts(options: RolloutOptions, task: Task, tokenizer: Any, engine: Engine | None, most: int | None) -> None:
    """Try a few prompts on tokenizer and engine (if local); warn of prompts that will fail.

    `most`: tokens of a sequence that the engine takes, prompt and completion together; None: any number.
    Raises ConfigError when all of them fail.
    """
    causes, limit, params, whole = [], options.max_prompt_length, options.params, math.inf
    warn_of_plain_text(task, tokenizer)
    if most is not None and most < (options.context_length or math.inf):
        check_length(options, task, most)
        options, whole = within(options, most), most - params.max_tokens
    warn_of_failing_prompts(options.longest_prompt, task, tokenizer, whole)
    for prompt in [*task.train[:16], *task.test[:16]]:
        try:
            ids = encode_prompt(tokenizer, prompt)
            if isinstance(task, AgentTask):  # its requests are the prompts
                ids = ids[-options.longest_prompt :]
            if len(ids) > limit:
                raise ConfigError(f"prompt '{prompt.id}' has {len(ids)} tokens, over max_prompt_length={limit}")
            if task.max_turns > 1 and prompt.messages is not None:
                encode_observation(tokenizer, prompt, "?", np.array([], np.int64))
            if engine is None:
                return
            longest = options.context_length or len(ids) + params.max_tokens
            room = max(1, min(params.max_tokens, longest - len(ids)))
            engine.submit([Request("trial", ids, replace(params, max_tokens=room), key=0)])
            engine.cancel(["trial"])
            return
        except ValueError as error:
            causes.append(str(error).removeprefix("request 'trial': "))
    raise ConfigError(f"none of the first {len(causes)} prompts can be used; {causes[0]}")


LONGEST = 8
"""Longest prompts, by characters, that are tried."""
TRIED = 256
"""Other prompts that are tried, plus one of each sequence of roles."""
COUNTED = 10_000
"""Most prompts that are counted, if one that was tried fails."""


def warn_of_failing_prompts(limit: float, task: Task, tokenizer: Any, whole: float = math.inf) -> None:
    """Warn how many prompts fail whenever drawn: those of over `limit` tokens, which are never cut, and those that the
    chat template refuses or the tokenizer cannot encode. Also, how many of over `whole` tokens leave a completion less
    room than it may have."""
    if task.max_turns > 1 or isinstance(task, AgentTask):  # an environment or agent adds to the prompt, or writes it
        return
    for part, prompts in (("training", task.train), ("held-out", task.test)):
        some = prompts[:: -(-len(prompts) // COUNTED) or 1]
        one_of_each = {_shape(prompt): prompt for prompt in some}
        tried = [*_longest(prompts, LONGEST), *one_of_each.values(), *some[:: -(-len(some) // TRIED) or 1]]
        longest, refusal = _encoded(tokenizer, tried)
        if max(longest, default=0) <= min(limit, whole) and not refusal:
            continue
        lengths, refusals = _encoded(tokenizer, some)
        if max(longest, default=0) > limit:
            over = sum(n > limit for n in lengths)
            warnings.warn(
                f"{over} of {len(some)} {part} prompts have over {limit} tokens (the longest "
                f"{max([*longest, *lengths])}) and fail; raise max_prompt_length if the model takes more, or leave "
                "them out of the data",
                stacklevel=2,
            )
        if any(whole < n <= limit for n in [*longest, *lengths]):
            cut = sum(whole < n <= limit for n in lengths)
            warnings.warn(
                f"{cut} of {len(some)} {part} prompts have over {whole} tokens and leave completions less room than "
                "max_completion_length, so that these end earlier; lower it to avoid that",
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


def longest_prompt(task: Task, tokenizer: Any) -> int | None:
    """Return the tokens of the task's longest training prompt, of the `COUNTED` with most characters; None if an
    environment asks more than that, or none can be encoded."""
    if not has_no_environment(task):
        return None
    lengths, _ = _encoded(tokenizer, _longest(task.train, COUNTED))
    return max(lengths, default=None)


def _longest(prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """Return the n prompts with most characters."""
    if isinstance(prompts, StoredPrompts):
        return prompts.longest(n)
    return heapq.nlargest(n, prompts, key=_characters)


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
    prompts: Sequence[Prompt], roll_out: RollOut, learner: Learner, engine_dtype: Callable[[], str], samplers: int = 1
) -> Agreement:
    """Sample a few tokens with the learner's weights and compare the log-probabilities of sampler and learner.

    `roll_out` samples with these weights; `engine_dtype` returns its type afterwards. Each of `samplers` gets a prompt.
    Environments, rewards and random states are untouched. Raises ConfigError with the likely cause when they differ,
    NothingSampledError when there is nothing to compare.
    """
    jobs = [Job(Visit(i, 0, prompt), PROBES_EACH, "probe") for i, prompt in enumerate(prompts[: max(PROBED, samplers)])]
    rollouts = [rollout for group in roll_out(jobs) for rollout in group.rollouts]
    sampled = [rollout for rollout in rollouts if rollout.action_mask.any()]
    if not sampled:
        reason = next((rollout.reason for rollout in rollouts if rollout.reason), "no token was sampled")
        raise NothingSampledError(f"none of the first {len(jobs)} prompts can be used; {reason}")
    return require_agreement(sampled, learner, engine_dtype())


# ---------------------------------------------------------------- places on a cluster

FREE_S = 30.0
"""Longest wait for resources that other jobs hold: an earlier run may just have ended."""
FEWER = "set fewer samplers, ranks, threads or num_gpus, or add nodes"
STARTS = "the run starts without them"
PROCESS_MIB = 500
"""MiB of a process without a model; measured: 390 for a sampler, 470 for a rank."""


def placement(r: Resolved, sizes: Sizes, rollouts: int, *, sent: bool = True) -> dict[str, Any]:
    """Return `samplers`, `ranks`, `nodes` and `does_not_fit`; nothing for a run of one process.

    `rollouts`: of one step. `sent`: ranks are sent the whole model instead of reading their shards from files.
    """
    c, engine = r.config, r.engine
    places: dict[str, Any] = {**_places(r)}
    if "samplers" in places:
        processes = getattr(engine, "tensor_parallel_size", 1)
        at_once = min(max(rollouts // places["samplers"]["count"], 1), getattr(engine, "slots", rollouts))
        positions = at_once * c.longest
        bytes_ = (
            4 * sizes.total
            + positions * engine_bytes(engine) * Shapes.from_model(r.model.meta_model, c.lora).kv_elements
        )
        holds_model = r.options.engine_of(0) is None  # else a server of the user's holds it
        places["samplers"]["mib"] = round(processes * PROCESS_MIB + holds_model * bytes_ / MIB)
    if "ranks" in places:
        cut_among = r.options.learner.fsdp_size or places["ranks"]["count"]
        reference = 4 * sizes.total if c.keeps_reference and c.lora is None else 0
        kept = reference + (4 * sizes.total + 12 * sizes.trained) / cut_among
        at_start = reference + 4 * sizes.total if sent else 0
        places["ranks"]["mib"] = round(PROCESS_MIB + max(at_start, kept) / MIB)
        places["ranks"]["mib_once_cut"] = round(PROCESS_MIB + kept / MIB)
    if places:
        if isinstance(r.options.sync, Ray) or "ranks" in places:
            places["nodes"] = nodes = _nodes()
        else:  # processes of this machine, which share its cores
            here = {"node": "this machine", "cpus": usable_cores(), "gpus": 0.0, "mib": round(main_memory() / MIB)}
            places["nodes"], nodes = [here], [here | {"cpus": math.inf}]
        places["does_not_fit"] = does_not_fit(places, nodes)
    return places


def _places(r: Resolved) -> dict[str, dict[str, Any]]:
    """Return the count of each kind of process and its needs except memory. Its Ray cluster must be joined."""
    places: dict[str, dict[str, Any]] = {}
    sampling, learner, device = r.options.sync, r.options.learner, r.config.device
    if isinstance(sampling, PoolOptions):
        gpus = sampling.gpus(device, r.engine) if isinstance(sampling, Ray) else 0.0
        places["samplers"] = {"count": sampling.samplers, "to_start": sampling.least}
        places["samplers"] |= {"cpus": sampling.threads, "gpus": gpus}
    if isinstance(learner, Fsdp):
        places["ranks"] = {"count": learner.ranks, "cpus": learner.threads, "gpus": learner.gpus(device)}
    return places


def require_places(r: Resolved) -> None:
    """Raise ConfigError if samplers, ranks and the learner's GPU do not fit on their Ray cluster together.

    Waits up to `FREE_S` for resources that other jobs hold.
    """
    sampling, learner = r.options.sync, r.options.learner
    on_cluster = {"sync": sampling, "learner": learner}
    on_cluster = {key: options for key, options in on_cluster.items() if isinstance(options, Ray | Fsdp)}
    if not on_cluster:
        return
    given = {key: options.ray_address for key, options in on_cluster.items() if options.ray_address}
    if len(set(given.values())) > 1:
        both = " and ".join(f"{key}: {address}" for key, address in given.items())
        raise ConfigError(f"ray_address: {both}; samplers and ranks share one cluster, so give both the same")
    try:
        cluster.join(next(iter(given or on_cluster)), next(iter(given.values()), None), r.options.cores)
        places = _places(r)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(sampling, Ray):
        places.pop("samplers", None)
    elif sampling.min_samplers is not None:
        places["samplers"]["count"] = sampling.min_samplers
    if not isinstance(learner, Fsdp) and r.device.type == "cuda" and cluster.gpus_here():
        places["learner"] = {"count": 1, "cpus": 0, "gpus": 1}
    needs = []
    for kind, each in places.items():
        count = each["count"]
        needs.append(f"{count} {kind} need {_amounts(count * each['cpus'], count * each['gpus'])}")
    need = f"{' and '.join(on_cluster)}: {', '.join(needs)}"
    nodes = [node | {"mib": 0} for node in _nodes()]
    if does_not_fit({kind: each | {"mib": 0} for kind, each in places.items()}, nodes):
        has = "; ".join(_amounts(node["cpus"], node["gpus"]) for node in nodes) or "no nodes"
        raise ConfigError(f"{need}, and the cluster has {has}; {FEWER}")
    deadline = time.monotonic() + FREE_S
    while missing := _not_free(places):
        if time.monotonic() > deadline:
            raise ConfigError(f"{need}, but other jobs of the cluster leave {missing}; {FEWER}")
        time.sleep(0.2)


def _amounts(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPUs and {gpus:g} GPUs"


def _not_free(places: dict[str, dict[str, Any]]) -> str:
    """Return the free resources if they are not enough, else an empty text."""
    import ray

    free, short = ray.available_resources(), False
    for kind, name in (("cpus", "CPU"), ("gpus", "GPU")):
        needed = sum(each["count"] * each[kind] for each in places.values())
        short = short or needed > free.get(name, 0.0)
    return _amounts(free.get("CPU", 0.0), free.get("GPU", 0.0)) if short else ""


def _nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster."""
    nodes = []
    for node in cluster.alive_nodes():
        has = node["Resources"]
        memory = round(has.get("memory", 0.0) / MIB)
        gpus, cpus = has.get("GPU", 0.0), has.get("CPU", 0.0)
        nodes.append({"node": cluster.node_name(node), "cpus": cpus, "gpus": gpus, "mib": memory})
    return nodes


def does_not_fit(places: dict[str, dict[str, Any]], nodes: list[dict[str, Any]]) -> list[str]:
    """Place processes where most memory is left, samplers last; return a sentence for each kind that does not fit."""
    left = [dict(node) for node in nodes]
    problems = []
    for kind in ("learner", "ranks", "samplers"):
        if kind not in places:
            continue
        each, missing = places[kind], 0
        for _ in range(each["count"]):
            room = [node for node in left if all(node[key] >= each[key] for key in ("cpus", "gpus", "mib"))]
            if not room:
                missing += 1
                continue
            best = max(room, key=lambda node: node["mib"])
            for key in ("cpus", "gpus", "mib"):
                best[key] -= each[key]
        if missing:
            need = f"{each['cpus']:g} CPUs, {each['gpus']:g} GPUs and {each['mib']} MiB"
            waits = f"; {STARTS}" if each["count"] - missing >= each.get("to_start", each["count"]) else ""
            problems.append(f"{missing} of {each['count']} {kind}: no node has {need} left for each{waits}")
    return problems
