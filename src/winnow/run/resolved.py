"""What a run is, decided once: the options of every method, what `auto` becomes, and why."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console

from ..base.errors import ConfigError
from ..base.machine import bfloat16_units, install, main_memory, usable_threads
from ..config import CLIPPING, RunConfig
from ..config.options import method, name_of
from ..engine import ENGINES
from ..engine.base import SamplingParams
from ..engine.initial_model import InitialModel
from ..engine.loading import resolve_device
from ..engine.saving import types_from
from ..engine.vllm.options import why_unusable
from ..learner import LEARNERS, LearnerContext
from ..learner.local.learner import LearnerOptions
from ..learner.step import StepOptions
from ..methods import tables
from ..methods.loss import LossConfig
from ..methods.policy_loss import Clip
from ..methods.size import RolloutBatch
from ..rollout.options import RolloutOptions
from ..sampler import SYNCS, InProcess, Processes, SamplerOptions
from ..tasks import ENVS
from ..types import Purpose
from .budget import Budget, Gpus

PROBE_TOKENS = 16
"""Longest rollouts that compare engine and learner."""
AUTO = "auto"
"""The engine that is chosen by device, model and what is installed."""


@dataclass(frozen=True)
class Options:
    """The options object of every method that a configuration names.

    Specifications are read here alone, and once more in a sampler's process, which builds everything by name.
    """

    methods: Mapping[str, Sequence[Any]]
    """Key -> options, for selector, rollout_batch, group_size, gates, filter, advantage, correction and step_scale."""
    names: Mapping[str, Sequence[str]]
    """Key -> names of the methods, as written."""
    rollout_batch: RolloutBatch
    sync: SamplerOptions
    learner: Any
    engine: Any
    """None while it is `auto`."""

    @classmethod
    def from_config(cls, c: RunConfig) -> Options:
        """Raises ConfigError naming the key, and the nearest valid name or option."""
        methods = tables.options_of(c)
        names = {key: [name_of(spec) for spec in specs] for key, specs in tables.specs_of(c).items()}
        try:
            rollout_batch = methods["rollout_batch"][0].build(c.prompts_per_step)
        except ValueError as error:
            raise ConfigError(f"rollout_batch: {error}") from None
        sync, learner = method(SYNCS, c.sync, "sync"), method(LEARNERS, c.learner, "learner")
        engine = None if name_of(c.engine) == AUTO else method(ENGINES, c.engine, "engine")
        return cls(methods, names, rollout_batch, sync, learner, engine)

    @property
    def gate_names(self) -> list[str]:
        """The names of the run's gates: those of the methods without a path, numbered if repeated."""
        names = [name.rpartition(":")[2] for name in self.names["gates"]]
        numbered = [f"{name}_{names[: i + 1].count(name)}" for i, name in enumerate(names)]
        return [own if names.count(name) > 1 else name for own, name in zip(numbered, names, strict=True)]

    @property
    def asynchronous(self) -> bool:
        """Whether groups are in flight from one step to the next."""
        return "asynchronous" in self.sync.provides or self.continuous

    @property
    def continuous(self) -> bool:
        """Whether rollouts of this process go on across updates."""
        return getattr(self.sync, "continuous", False)

    @property
    def overlap(self) -> bool:
        """Whether the next batch is collected while the learner updates, in one process."""
        return getattr(self.sync, "overlap", False)

    @property
    def own_engines(self) -> bool:
        """Whether samplers build model, task and rewards by name, so that the learner's process needs no engine."""
        return "own_engine" in self.sync.provides

    def engine_of(self, slot: int) -> Any:
        """Return the options of a sampler's engine that come with `sync`; None: samplers have the run's engine."""
        of_slot = getattr(self.sync, "engine_of", None)
        return None if of_slot is None else of_slot(slot)

    @property
    def samples_elsewhere(self) -> bool:
        """Whether samplers have their own devices; sampler processes share the learner's unless given some."""
        return self.own_engines and not (isinstance(self.sync, Processes) and not self.sync.devices)

    @property
    def learns_elsewhere(self) -> bool:
        """Whether the learner's devices are not this process's."""
        return "own_devices" in getattr(self.learner, "provides", ())

    @property
    def gradient_baselines(self) -> bool:
        """Whether the advantage is computed from gradients, for which a learner runs the whole model."""
        return getattr(self.methods["advantage"][0], "weighing", None) == "gradient"

    @property
    def uncorrected(self) -> bool:
        """Whether no ratio of the loss corrects for the engine's rounding of probabilities."""
        return not (self.methods["policy_loss"][0].has_ratio or self.methods["correction"][0].active)

    @property
    def ranks(self) -> int:
        """GPUs that shard weights, gradients and optimizer."""
        ranks: Any = getattr(self.learner, "fsdp_size", None) or getattr(self.learner, "ranks", 1)
        return int(ranks)

    @property
    def cores(self) -> int:
        """CPUs that samplers and ranks ask of a cluster."""
        parts = [(getattr(self.sync, "samplers", 2), self.sync), (getattr(self.learner, "ranks", 2), self.learner)]
        return sum(members * getattr(each, "threads", 1) for members, each in parts)


@dataclass(frozen=True)
class Machine:
    """What a run asks of a machine, read once."""

    device: torch.device
    threads: int
    """CPU threads that this process may use."""
    memory: int
    """Bytes of main memory."""
    bfloat16_units: Sequence[str] = ()
    """Units of the processor that multiply bfloat16 fast."""
    gpu_total: int = 0
    """Bytes of the GPU; 0: as `gpu_memory`."""
    gpu_memory: int = 0
    """Bytes that other processes leave of the GPU."""
    gpu_bfloat16: bool = False
    no_vllm: str = ""
    """Why vLLM cannot be used, and the remedy; empty where it can."""
    planned_gpus: int = 0
    """GPUs of a machine that is planned for; 0: this machine."""

    @classmethod
    def here(cls, device: str, *, with_vllm: bool = False) -> Machine:
        """Read this machine. `with_vllm`: try to import it, where there is a GPU. Raises ConfigError if it has no such
        device."""
        on = resolve_device(device)
        no_vllm = "" if find_spec("vllm") else f"vLLM is not installed; {install('vllm')}"
        if with_vllm and torch.cuda.is_available():
            no_vllm = why_unusable()
        here = cls(on, usable_threads(), main_memory(), bfloat16_units(), no_vllm=no_vllm)
        if on.type != "cuda":
            return here
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        free, total = torch.cuda.mem_get_info(on)
        return replace(here, gpu_memory=free, gpu_total=total, gpu_bfloat16=bfloat16)

    @classmethod
    def with_gpus(cls, gpus: Gpus) -> Machine:
        """Return a machine like this one, but with these GPUs."""
        here = cls.here("cpu")
        return replace(
            here, device=torch.device("cuda"), gpu_memory=gpus.memory, gpu_bfloat16=True, planned_gpus=gpus.count
        )


@dataclass(frozen=True)
class Resolved:
    """A run with every choice made; nothing is loaded or built."""

    config: RunConfig
    """What the run saves: a value for every `auto` but `device`, for which each resume looks again."""
    options: Options
    model: InitialModel
    engine: Any
    """Options of the engine for this run."""
    device: torch.device
    why: Mapping[str, str]
    """Reasons, by config key."""
    warnings: Sequence[str] = ()
    """A line for each setting that is slow on the machine."""
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    """Memory by GPU; empty on a CPU."""

    @cached_property
    def rollout_options(self) -> Mapping[Purpose, RolloutOptions]:
        """What the runner gets."""
        greedy_baseline = self.options.methods["advantage"][0].greedy_baseline
        return rollout_options(self.config, greedy_baseline=greedy_baseline)

    @cached_property
    def learner_context(self) -> LearnerContext:
        """What the learner is built from."""
        return learner_context(self.config, self.options)

    @cached_property
    def loss(self) -> LossConfig:
        return loss_config(self.config, self.options)

    @cached_property
    def step_options(self) -> StepOptions:
        """What the optimizer step gets."""
        return step_options(self.config, self.options)

    @property
    def behind(self) -> int:
        """Steps that the weights of an in-process sampler are older than the learner's; 0: it has the newest.

        Groups that are carried or collected ahead use up one step of `max_lag` each.
        """
        c, options = self.config, self.options
        if not isinstance(options.sync, InProcess) or options.continuous:
            return 0
        return c.max_lag - options.rollout_batch.carry - options.overlap

    def set_threads(self) -> None:
        if isinstance(self.config.threads, int):
            torch.set_num_threads(self.config.threads)

    def say(self, console: Console) -> None:
        for key, reason in self.why.items():
            console.print(f"{key}: {getattr(self.config, key)} ({reason})", highlight=False, markup=False)
        for warning in self.warnings:
            console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)


def sampling_params(c: RunConfig, *, evaluation: bool = False) -> SamplingParams:
    if evaluation:
        return SamplingParams(c.max_completion_length, c.eval_temperature, c.eval_top_p, c.eval_top_k, tuple(c.stop))
    drawn = {"min_p": c.min_p, "repetition_penalty": c.repetition_penalty}
    return SamplingParams(c.max_completion_length, c.temperature, c.top_p, c.top_k, tuple(c.stop), **drawn)


def rollout_options(c: RunConfig, *, greedy_baseline: bool = False) -> dict[Purpose, RolloutOptions]:
    """Return the sampling options of every purpose; `greedy_baseline` concerns training."""
    train = sampling_params(c)
    base = RolloutOptions(
        train, c.max_prompt_length, c.seed, context_length=c.longest, history=c.history, max_segments=c.max_segments
    )
    greedy = SamplingParams(c.max_completion_length, temperature=0.0, stop=tuple(c.stop))
    short = replace(train, max_tokens=min(PROBE_TOKENS, train.max_tokens))
    return {
        "train": replace(base, greedy_baseline=greedy_baseline, drafts=c.speculative),
        "eval": replace(base, params=sampling_params(c, evaluation=True)),
        "greedy": replace(base, params=greedy),
        "profile": base,
        "probe": replace(base, params=short),
    }


def learner_context(c: RunConfig, options: Options) -> LearnerContext:
    """Return what the learner is built from. Outside a whole run `auto` means the learner's default."""
    tokens = c.tokens_per_microbatch
    own = {
        "compute_dtype": torch.float32 if c.dtype == "auto" else getattr(torch, c.dtype),
        "gradient_checkpointing": c.gradient_checkpointing is True,
        "tokens_per_microbatch": LearnerOptions.tokens_per_microbatch if tokens == "auto" else tokens,
        "merge_adapters": c.adapters_alone is None,
        "save_types": types_from(c.save_dtype),
    }
    return LearnerContext(
        LearnerOptions(**c.same_keys(LearnerOptions) | own),
        device=c.device,
        lora=c.lora is not None,
        gradient_baselines=options.gradient_baselines,
        reward_env=c.reward_env,
        own_classes=[name for key in ("policy_loss", "correction") for name in options.names[key] if ":" in name],
        sampling=sampling_params(c),
    )


def loss_config(c: RunConfig, options: Options) -> LossConfig:
    own = {
        "beta": 0.0 if c.kl_in_reward else c.beta,
        "correction": options.methods["correction"][0],
        "policy_loss": options.methods["policy_loss"][0],
    }
    if c.teacher is not None:
        own |= {"teacher_weight": c.teacher.weight, "reward_weight": c.teacher.reward_weight}
    if isinstance(own["policy_loss"], Clip):
        given = {key: getattr(c, key) for key in CLIPPING if c.changed([key])}
        own["policy_loss"] = replace(own["policy_loss"], **given)
    return LossConfig(**c.same_keys(LossConfig) | own)


def step_options(c: RunConfig, options: Options) -> StepOptions:
    methods = options.methods
    own = {
        "warmup_steps": c.warmup,
        "kl_in_reward": c.beta if c.kl_in_reward else 0.0,
        "ref_model_sync_steps": c.ref_model_sync_steps if c.sync_ref_model else None,
        "unbiased": getattr(methods["group_size"][0], "unbiased", False),
    }
    return StepOptions(**c.same_keys(StepOptions) | own)


# ---------------------------------------------------------------- catalogue

TABLES: dict[str, Mapping[str, type]]
TABLES = {"env": ENVS, **tables.TABLES, "sync": SYNCS, "engine": ENGINES, "learner": LEARNERS}
"""Config field -> its table."""


def all_methods() -> list[dict[str, Any]]:
    """Return an entry per method: `field, name, summary, file, options` (option -> default), maybe `provides`."""
    entries = []
    for key, table in TABLES.items():
        for name in table:
            cls = table[name]
            summary = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
            file = cls.__module__.replace(".", "/") + ".py"
            entry = {"field": key, "name": name, "summary": summary, "file": file, "options": defaults_of(cls)}
            provides = getattr(cls, "provides", None)
            entries.append(entry | ({"provides": sorted(provides)} if provides else {}))
    return entries


def defaults_of(cls: type) -> dict[str, Any]:
    """Return the defaults of a dataclass's options; `required` for those without."""
    defaults: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            defaults[f.name] = f.default
        elif f.default_factory is not dataclasses.MISSING:
            defaults[f.name] = f.default_factory()
        else:
            defaults[f.name] = "required"
    return defaults
