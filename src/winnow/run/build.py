"""Builds objects from configuration values: model, tokenizer, task, engine, learner, methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from ..base.weights import weights_digest
from ..config import CLIPPING, AuditConfig, ConfigError, MethodSpec, RunConfig, method, name_of, suggestion
from ..engine.base import Engine, SamplingParams
from ..engine.loading import CPU, ModelReference, load_tokenizer, load_whole, require_finite
from ..engine.pretrained import located
from ..engine.skeleton import as_zeros, in_files, unloaded
from ..engine.template import with_template
from ..env.base import Demonstrator, Task
from ..env.rewards.rewarder import Rewarder, RewardSpec
from ..env.rewards.workers import RewardWorkers
from ..learner import LEARNERS, Learner, Policy
from ..learner.local.reference import frozen_copy
from ..learner.step import StepOptions
from ..methods.advantage import ADVANTAGES, Advantage
from ..methods.base import Chart, RunFacts
from ..methods.correct import CORRECTIONS, StepScale
from ..methods.filter import AllOf, Filter
from ..methods.gate import GATES, Gate, GateContext, NamedRule, RuleError, check_rule
from ..methods.gate.audit import AuditedGate, RuleAudit
from ..methods.group_kind import GroupJudge
from ..methods.loss import LossConfig
from ..methods.select import Selector
from ..methods.select.audit import AuditedSelector
from ..methods.size import GroupSize, RolloutBatch
from ..methods.success import Success, default_success
from ..rollout.options import RolloutOptions
from ..sampler import Sampler, SamplerContext, sampler_options
from ..sampler.base import PoolOptions
from ..tasks import ENVS
from ..types import Prompt, Purpose
from .build_adapters import check_adapters, with_lora
from .catalogue import METHOD_TABLES
from .engine_choice import engine_options
from .start import Start, require_embeddings

PROBE_TOKENS = 16
"""Longest rollouts that compare engine and learner."""


@dataclass(frozen=True)
class Methods:
    selector: Selector
    rollout_batch: RolloutBatch
    group_size: GroupSize
    gates: dict[str, Gate]
    filter: Filter
    judge: GroupJudge
    advantage: Advantage
    loss: LossConfig
    step_scale: StepScale

    def save(self, directory: Path) -> None:
        """Write what gates store with the weights."""
        for gate in self.gates.values():
            gate.save(directory)


def build_success(c: RunConfig, functions: Mapping[str, str], weights: Sequence[float] | None) -> Success:
    """Return what counts as a right answer.

    `functions`: alias -> name of each reward function. `weights`: theirs, if given. Raises ConfigError when `success`
    names an unknown function.
    """
    names = list(dict.fromkeys(functions.values()))
    if c.success is None:
        return default_success(names, weights)
    decides = c.success.function
    known = {"env": "env", **functions}
    if decides is not None and decides not in known:
        raise ConfigError(f"success: function: unknown reward function '{decides}'.{suggestion(decides, list(known))}")
    return Success(decides and known[decides], c.success.at_least)


def build_methods(c: RunConfig, prompts: Sequence[Prompt], success: Success | None = None) -> Methods:
    """Build the methods of a run. `success`: what counts as right; default: a reward of 1.

    Raises ConfigError naming the field and the nearest valid name.
    """
    loss, options = build_loss(c), method_options(c)
    with _errors_of("group_size"):
        group_size: GroupSize = options["group_size"][0].build(c.num_generations)
    advantage: Advantage = options["advantage"][0]
    if advantage.smallest_group > group_size.smallest:
        raise ConfigError(
            f"advantage: {c.advantage} needs groups of at least {advantage.smallest_group} rollouts, but they may have "
            f"only {group_size.smallest}; lower its k, or raise num_generations"
        )
    filters = _filters(c, options["filter"])
    filter_ = filters[0] if len(filters) == 1 else _all_of(c, filters)
    judge = GroupJudge(success or Success(), filter_.atol, advantage)
    facts = RunFacts(c, prompts, options, filters, advantage.group_relative, group_size.smallest, judge.least)
    for problem in facts.problems():
        raise ConfigError(problem)
    with _errors_of("selector"):
        selector: Selector = options["selector"][0].build(prompts, c.seed, judge)
    return Methods(
        selector=selector if c.audit is None else _audited(c, c.audit, selector, judge),
        rollout_batch=options["rollout_batch"][0].build(c.prompts_per_step),
        group_size=group_size,
        gates=build_gates(c, judge),
        filter=filter_,
        judge=judge,
        advantage=advantage,
        loss=loss,
        step_scale=options["step_scale"][0].build(),
    )


@contextmanager
def _errors_of(key: str) -> Iterator[None]:
    """Turn a ValueError of a method into a ConfigError that names its key."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def method_options(c: RunConfig) -> dict[str, list[Any]]:
    """Return the options of every method that the configuration names, by key."""
    options = {}
    for key, table in METHOD_TABLES.items():
        value = getattr(c, key)
        specs = value if isinstance(value, list) else [value]
        options[key] = [method(table, spec, key) for spec in specs]
    return options


def method_charts(c: RunConfig) -> list[dict[str, Any]]:
    """Return the charts that the methods of a run define, as JSON values."""
    charts: list[Chart] = []
    for key, options in method_options(c).items():
        names = gate_names(c) if key == "gates" else [key] * len(options)
        for name, each in zip(names, options, strict=True):
            if hasattr(each, "charts"):
                charts += each.charts(name)
    return [asdict(chart) for chart in charts]


def gate_names(c: RunConfig) -> list[str]:
    """Return the names of the run's gates: those of the methods without a path, numbered if repeated."""
    names = [name_of(spec).rpartition(":")[2] for spec in c.gates]
    return [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def rule_types(c: RunConfig) -> dict[str, type]:
    """Return the classes of the rules that gates publish, by gate."""
    contexts = [GateContext(name) for name in gate_names(c)]
    gates = [method(GATES, spec, "gates").build(context) for spec, context in zip(c.gates, contexts, strict=True)]
    return {context.name: type(gate.rule()) for context, gate in zip(contexts, gates, strict=True)}


def build_gates(c: RunConfig, judge: GroupJudge) -> dict[str, Gate]:
    """Build the gates of a run, by name. Raises ConfigError naming the option."""
    gates: dict[str, Gate] = {}
    for spec, name in zip(c.gates, gate_names(c), strict=True):
        gate = method(GATES, spec, "gates").build(GateContext(name, c.seed, judge))
        if not isinstance(gate, Gate):
            raise ConfigError(
                f"gates: {name_of(spec)} builds a {type(gate).__name__}, not a Gate; derive from "
                "winnow.methods.gate.Gate, which has defaults for all but `rule`"
            )
        try:
            check_rule(NamedRule(name, gate.rule()))
        except RuleError as error:
            raise ConfigError(f"gates: {error}") from None
        if c.audit is not None:
            audit = RuleAudit(name, c.audit.epsilon, c.audit.max_signal_loss, seed=c.seed)
            gate = AuditedGate(gate, audit, judge)
        gates[name] = gate
    return gates


def _filters(c: RunConfig, options: Sequence[Any]) -> list[Filter]:
    if not options:
        raise ConfigError("filter: the list is empty; name a filter, or leave filter out")
    filters = [each.build(c.seed) if hasattr(each, "build") else each for each in options]
    for each, filter_ in zip(options, filters, strict=True):
        if not isinstance(filter_, Filter):
            raise ConfigError(
                f"filter: {type(each).__name__} makes a {type(filter_).__name__}, not a Filter; derive from "
                "winnow.methods.filter.Filter, which has defaults for all but `admit`"
            )
    return filters


def _all_of(c: RunConfig, filters: Sequence[Filter]) -> Filter:
    specs = c.filter if isinstance(c.filter, list) else [c.filter]
    names = [name_of(spec).rpartition(":")[2] for spec in specs]
    with _errors_of("filter"):
        return AllOf(list(zip(names, filters, strict=True)))


def _audited(c: RunConfig, audit: AuditConfig, selector: Any, judge: GroupJudge) -> Selector:
    if getattr(selector, "skips", True):
        rule = RuleAudit(name_of(c.selector), audit.epsilon, audit.max_signal_loss, seed=c.seed)
        return AuditedSelector(selector, rule, judge)
    if not c.gates:
        raise ConfigError(
            f"audit: nothing to audit (selector: {name_of(c.selector)} skips nothing, no gates); remove audit, or "
            "choose e.g. selector: greso"
        )
    return cast(Selector, selector)


def build_sampler(context: SamplerContext) -> Sampler:
    """Build the sampler. Raises ConfigError when stale samples would be trained uncorrected, or options do nothing."""
    c = context.config
    if c.max_lag and c.policy_loss == "plain" and name_of(c.correction) == "none":
        raise ConfigError(
            f"max_lag: {c.max_lag} trains on tokens of older policies, and policy_loss: plain does not correct for it; "
            "set correction: truncate, or policy_loss: clip"
        )
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


def _same_keys(cls: type, c: RunConfig) -> dict[str, Any]:
    """Return the fields of `cls` that are keys of the configuration."""
    return {field.name: getattr(c, field.name) for field in fields(cls) if field.name in RunConfig.model_fields}


def step_options(c: RunConfig) -> StepOptions:
    own = {
        "warmup_steps": c.warmup,
        "kl_in_reward": c.beta if c.kl_in_reward else 0.0,
        "ref_model_sync_steps": c.ref_model_sync_steps if c.sync_ref_model else None,
        "unbiased": any(getattr(gate, "unbiased", False) for gate in method_options(c)["gates"]),
    }
    return StepOptions(**_same_keys(StepOptions, c) | own)


def build_loss(c: RunConfig) -> LossConfig:
    """Build the loss. Raises ConfigError on an unknown correction, or a ratio that is always 1 or is missing."""
    own = {
        "beta": 0.0 if c.kl_in_reward else c.beta,
        "correction": method(CORRECTIONS, c.correction, "correction"),
    }
    loss = LossConfig(**_same_keys(LossConfig, c) | own)
    clipping = c.changed(CLIPPING)
    if loss.ratio_to_learner and c.num_iterations == 1 and clipping:
        raise ConfigError(
            f"{clipping} has no effect with correction: {name_of(c.correction)} and num_iterations: 1, as only the "
            "change since the first iteration is clipped; remove it, or use correction: none, or more iterations"
        )
    if c.num_iterations > 1 and c.policy_loss == "plain" and not loss.correction.active:
        raise ConfigError(
            f"num_iterations: {c.num_iterations} trains on tokens of the policy before the first update, and "
            "policy_loss: plain does not correct for it; set correction: truncate, or policy_loss: clip"
        )
    return loss


def build_task(spec: MethodSpec | Task) -> Task:
    """Return a task by name, or the object itself. Raises ConfigError if unknown or without training prompts."""
    if isinstance(spec, str | dict) and name_of(spec) == "dataset" and "path" not in spec:
        raise ConfigError(
            "env: dataset: no path; give one, or in Python train_dataset, which a run does not keep: give it to "
            "Trainer.resume too"
        )
    task: Task = spec if isinstance(spec, Task) else method(ENVS, spec, "env").build()
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
        "train": options(train, greedy_baseline=greedy_baseline),
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
    require_embeddings(base, tokenizer, start)
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
    require_embeddings(model, tokenizer, start)
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
