"""Builds objects from configuration values: model, tokenizer, task, engine, learner. Methods: `build_methods.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.weights import weights_digest
from ..config import ConfigError, MethodSpec, RunConfig, method, name_of
from ..engine.base import Engine, SamplingParams
from ..engine.facts import end_where_rollouts_do
from ..engine.loading import CPU, ModelReference, load_tokenizer, load_whole, require_finite
from ..engine.pretrained import located
from ..engine.skeleton import as_zeros, in_files, unloaded
from ..engine.template import with_template
from ..env.base import Demonstrator, Task
from ..env.rewards.rewarder import Rewarder, RewardSpec
from ..env.rewards.workers import RewardWorkers
from ..learner import LEARNERS, Learner, Policy
from ..learner.local.reference import frozen_copy
from ..methods.advantage import ADVANTAGES
from ..methods.tables import task_options
from ..rollout.options import RolloutOptions
from ..sampler import Sampler, SamplerContext, sampler_options
from ..sampler.base import PoolOptions
from ..types import Purpose
from .build_adapters import check_adapters, with_lora
from .engine_choice import engine_options
from .start import Start, require_embeddings

PROBE_TOKENS = 16
"""Longest rollouts that compare engine and learner."""


def build_sampler(context: SamplerContext) -> Sampler:
    """Build the sampler. Raises ConfigError when options do nothing, or contradict others."""
    c = context.config
    options = sampler_options(c.sync)
    if "asynchronous" in options.provides and c.changed(("rollout_batch",)):
        raise ConfigError(
            f"rollout_batch: has no effect with sync: {name_of(c.sync)}, which starts groups as soon as they can "
            "still be trained within max_lag; remove it"
        )
    if "asynchronous" not in options.provides and not context.behind and c.changed(("sync",)):
        raise ConfigError("sync: options of in_process have no effect without a lag (max_lag); remove them")
    if isinstance(options, PoolOptions) and options.timeout_s <= c.reward_timeout_s:
        raise ConfigError(
            f"sync: timeout_s={options.timeout_s:g} must be above reward_timeout_s={c.reward_timeout_s:g}, or a "
            "sampler that waits for a reward counts as stuck; raise it"
        )
    return options.build(context)


def build_task(spec: MethodSpec | Task) -> Task:
    """Return a task by name, or the object itself. Raises ConfigError if unknown or without training prompts."""
    task: Task = spec if isinstance(spec, Task) else task_options(spec).build()
    if not task.train:
        raise ConfigError(f"env: task {task.name} has no training prompts")
    return task


def build_rewarder(c: RunConfig, task: Task, given: Sequence[RewardSpec] | None = None) -> Rewarder:
    """Build the rewarder from the objects `given`, else `reward_funcs`, else the task's own functions."""
    workers = RewardWorkers(2, c.reward_memory_mb, tuple(c.reward_env), c.reward_sandbox)
    functions = given or c.reward_funcs or task.reward_funcs
    return Rewarder(functions, c.reward_weights, c.reward_timeout_s, workers=workers, device=c.device)


def build_demonstrator(spec: MethodSpec) -> Demonstrator:
    """Return a task with demonstrations for a warm start. Raises ConfigError if it has none."""
    task = build_task(spec)
    if not isinstance(task, Demonstrator):
        raise ConfigError(f"env: task {task.name} has no demonstrations; start from a pretrained model instead")
    return task


def sampling_params(c: RunConfig, *, evaluation: bool = False) -> SamplingParams:
    if evaluation:
        return SamplingParams(c.max_completion_length, c.eval_temperature, c.eval_top_p, c.eval_top_k, tuple(c.stop))
    drawn = {"min_p": c.min_p, "repetition_penalty": c.repetition_penalty}
    return SamplingParams(c.max_completion_length, c.temperature, c.top_p, c.top_k, tuple(c.stop), **drawn)


def rollout_options(
    c: RunConfig, *, greedy_baseline: bool = False, report: frozenset[str] = frozenset()
) -> dict[Purpose, RolloutOptions]:
    """Return the sampling options of every purpose; `greedy_baseline` concerns training, `report` evaluations."""
    train, evaluation = sampling_params(c), sampling_params(c, evaluation=True)
    greedy = SamplingParams(c.max_completion_length, temperature=0.0, stop=tuple(c.stop))

    def options(params: SamplingParams, **more: Any) -> RolloutOptions:
        more |= {"context_length": c.longest, "history": c.history, "max_segments": c.max_segments}
        return RolloutOptions(params, c.max_prompt_length, c.seed, **more)

    return {
        "train": options(train, greedy_baseline=greedy_baseline, drafts=c.speculative),
        "eval": options(evaluation, report=report),
        "greedy": options(greedy),
        "profile": options(train),
        "probe": options(replace(train, max_tokens=min(PROBE_TOKENS, train.max_tokens))),
    }


def build_policy(
    c: RunConfig,
    start: Start,
    tokenizer: Any = None,
    checkpoint: Path | None = None,
    *,
    with_engine: bool = True,
    alone: bool = False,
) -> tuple[Policy, Engine | None]:
    """Build the policy of a fresh run or of `checkpoint` on the CPU, and an engine with its weights as version 0.

    `tokenizer`: an object, or None to load it; `alone`: without a learner. The engine is built before adapters are
    added: it holds the plain architecture, and loads merged weights or adds adapters itself.
    """
    if start.model is not None and tokenizer is None:
        raise ConfigError("processing_class: missing; give the tokenizer of the model object")
    tokenizer = with_template(tokenizer or load_tokenizer(c.model), c.chat_template, c.chat_template_kwargs)
    saved = checkpoint / "model" if checkpoint else None
    check_adapters(c, start.adapter if start.resume else None)
    read = None
    if "own_devices" in getattr(method(LEARNERS, c.learner, "learner"), "provides", ()):
        read = _read_by_ranks(c, start, saved, tokenizer)
    if read is not None and not with_engine:
        return read, None
    base, adapter = (load_whole(saved, CPU), None) if saved and not c.lora else start.load()
    require_finite(base, str(saved or c.model))
    require_embeddings(base, tokenizer, start.source, start.adapter)
    end_where_rollouts_do(base, tokenizer)
    engine = build_engine(c, start.reference(c.device, base), tokenizer, alone=alone) if with_engine else None
    if read is not None:
        return read, engine
    if c.lora is not None:
        return with_lora(base, c, adapter, saved, tokenizer), engine
    if not c.keeps_reference:
        return Policy(base, tokenizer, None), engine
    reference = frozen_copy(base if saved is None else start.load()[0])
    return Policy(base, tokenizer, reference, weights_digest(reference.state_dict())), engine


def _read_by_ranks(c: RunConfig, start: Start, saved: Path | None, tokenizer: Any) -> Policy | None:
    """Return the policy without base weights if ranks can read these from files, else None. That takes a directory, no
    adapter to train further, and no method that runs the whole model."""
    first = Path(located(c.model))
    folder = first if saved is None or c.lora is not None else saved
    needs_model = getattr(ADVANTAGES.get(name_of(c.advantage)), "weighing", None) == "gradient"
    if needs_model or start.model is not None or (start.adapter is not None and (folder != saved or c.keeps_reference)):
        return None
    model = unloaded(folder) if folder.is_dir() else None
    if model is None:
        return None
    require_embeddings(model, tokenizer, start.source, start.adapter)
    end_where_rollouts_do(model, tokenizer)
    policy = Policy(model, tokenizer, None, files=folder.absolute())
    if c.lora is None and not c.keeps_reference:
        return policy
    origin = unloaded(first) if first.is_dir() else None
    if origin is None:
        return None
    digest = weights_digest(in_files(origin, first))
    if c.lora is None:
        return replace(policy, reference_files=first.absolute(), origin=digest)
    with as_zeros(model):
        adapted = with_lora(model, c, None, saved, tokenizer).model
    return replace(policy, model=adapted, origin=digest)


def build_engine(c: RunConfig, model: ModelReference, tokenizer: Any, *, alone: bool = False) -> Engine:
    """Build the engine; `alone`: no learner on its GPU. Raises ConfigError if it cannot run the model or adapters."""
    adapters = c.lora if c.lora is not None and not c.lora.merge else None
    engine: Engine = engine_options(c, alone=alone).build(replace(model, adapters=adapters), tokenizer)
    return engine


def build_learner(policy: Policy, c: RunConfig) -> Learner:
    """Build the learner. Raises ConfigError when the policy cannot be trained as configured."""
    options = method(LEARNERS, c.learner, "learner")
    try:
        learner: Learner = options.build(policy, c)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return learner
