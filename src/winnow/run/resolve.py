"""Decides everything that a run leaves open, in the order of its lines.

A line of `resolve` may read the configuration, the model's names and shapes, and what was read of the machine. It may
not touch disk, network, device or weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from ..base.errors import ConfigError
from ..config import RunConfig
from ..config.options import UNLIMITED, MethodSpec, method, name_of, section_of
from ..engine import ENGINES, LocalOptions, VllmOptions
from ..engine.initial_model import InitialModel
from ..engine.vllm.options import ALONE, SHARED
from ..sampler import Processes
from ..sampler.processes import numbered
from .budget import AT_LEAST, AT_MOST, GIB, HALF, Budget, Shapes, engine_bytes
from .conflicts import require_adapters, require_sync
from .resolved import AUTO, Machine, Options, Resolved

PAYS_FROM = 10_000_000
"""Parameters from which bfloat16, more than one thread and vLLM's start pay off; measured (docs/benchmarks.md)."""
CPU_ACTIVATION_BYTES = 1 << 30
"""Bytes for the activations of a micro-batch on a CPU; more are no faster, measured at 0.6 and 135 million parameters
(docs/benchmarks.md)."""
LONGEST_ROW_SHARE = 1 / 2
"""Share of memory the activations of the longest row may take before layers are recomputed."""
CPU_SLOTS = 1024
"""Slots up to which the embedded engine gains on a CPU; measured at 0.6 million parameters (docs/benchmarks.md)."""
SAMPLER_GPU = "sampler GPU"
KEYS_SHARE = 1 / 8
"""Share of memory that keys and values may take for more slots than the default's."""
MOST_SHARE = 1 / 2
"""Share of memory that they may take at all."""


def resolve(
    c: RunConfig,
    options: Options,
    machine: Machine,
    model: InitialModel,
    *,
    resumed: bool = False,
    alone: bool = False,
    several_turns: bool = False,
) -> Resolved:
    """Return the run that `c` describes on `machine`, with reasons for what was chosen.

    `options`: of `c`. `model`: with its names and shapes read. `resumed`: `auto` was resolved when the run began.
    `alone`: an engine in this process without a learner. `several_turns`: of the task's rollouts. Raises ConfigError
    where settings contradict the model's, and when the run does not fit on a GPU.
    """
    on_gpu, parameters, chosen = machine.device.type == "cuda", model.parameters, options.engine is None
    values, why = model.decides(c)
    why |= dict.fromkeys(("dtype", "threads"), "as the run began" if resumed else "as configured")

    spec, engine, because = _chosen_engine(c, options, machine, parameters, alone)
    why |= {"engine": because} if because else {}
    dtype: str = c.dtype
    preferred, why_preferred = choose_dtype(c, parameters, machine)
    engine_follows = dtype == "auto" or (on_gpu and not resumed)
    if dtype == "auto":
        dtype, why["dtype"] = preferred, why_preferred
    if engine_follows and dtype == "bfloat16" and _may_round(options, engine):
        spec, engine = section_of(spec) | {"dtype": dtype}, replace(engine, dtype=dtype)
    if not resumed and (given := _dtype_given(engine, model)) is not None:
        spec, engine = section_of(spec) | {"dtype": given}, replace(engine, dtype=given)
        why.setdefault("engine", f"the given weights are {given}")
    _save_as_sampled(values, why, options, engine)

    threads = c.threads
    if threads == "auto":
        threads, why["threads"] = choose_threads(options, machine, parameters)

    c = c.model_copy(update=values | {"engine": spec, "dtype": dtype, "threads": threads})
    if on_gpu:
        sizes = _sizes_on_gpu(c, replace(options, engine=engine), machine, model, alone, several_turns)
    else:
        sizes = _sizes_on_cpu(c, options, engine, machine, model, several_turns)
    if sizes.engine:
        spec, engine = section_of(spec) | sizes.engine, replace(engine, **sizes.engine)
    c, options = c.model_copy(update=sizes.values | {"engine": spec}), replace(options, engine=engine)
    engine = engine_for_run(c, options, alone=alone)
    if not (machine.planned_gpus and chosen):  # the planned machine may have vLLM
        require_adapters(c, options, engine, model.adapter if model.resume else None)
    if not alone:
        require_sync(c, options, machine.device.type)
    warnings = _slow_settings(c, machine, preferred, why_preferred)
    return Resolved(c, options, model, engine, machine.device, why | sizes.why, warnings, sizes.budgets)


def resolve_here(c: RunConfig, *, alone: bool = False, several_turns: bool = False) -> Resolved:
    """Resolve a run on this machine; reads the model's files. Raises ConfigError as `resolve` does."""
    machine = Machine.here(c.device, with_vllm=name_of(c.engine) == AUTO)
    model = InitialModel.from_config(c).read(c)
    return resolve(c, Options.from_config(c), machine, model, alone=alone, several_turns=several_turns)


# ---------------------------------------------------------------- engine


def _chosen_engine(
    c: RunConfig, options: Options, machine: Machine, parameters: int, alone: bool
) -> tuple[MethodSpec, Any, str]:
    """Return the engine, its options, and why; empty: nothing to tell."""
    serves = None if alone else options.engine_of(0)
    if serves is not None:
        if name_of(c.engine) != AUTO:
            raise ConfigError(f"engine: {name_of(c.engine)} has no effect with sync: {name_of(c.sync)}; remove it")
        return c.engine, serves, f"sync: {name_of(c.sync)} samples"
    if name_of(c.engine) != AUTO:
        return c.engine, options.engine, ""
    where = machine.device.type if alone else _sampler_device(options, machine.device.type)
    spec, because = choose_engine(c, options, parameters, where, machine.no_vllm)
    return spec, method(ENGINES, spec, "engine"), because if machine.device.type == "cuda" else ""


def choose_engine(
    c: RunConfig, options: Options, parameters: int, device: str, no_vllm: str = ""
) -> tuple[MethodSpec, str]:
    """Return what `engine: auto` becomes, and why.

    `device`: device type of samplers. `no_vllm`: why it cannot be used; empty where it can. Options given
    with `name: auto` are kept; one that vLLM does not have selects the embedded engine.
    """
    given = section_of(c.engine)
    del given["name"]
    unknown = set(given) - {option.name for option in dataclasses.fields(VllmOptions)}
    name, why = "local", ""
    if device != "cuda":
        why = f"samplers are on {device}"
    elif unknown:
        why = f"vLLM has no option {min(unknown)}"
    elif options.uncorrected:
        why = "policy_loss: plain without a correction needs an engine that rounds as the learner does"
    elif c.speculative:
        why = "speculative needs an engine that reads drafts"
    elif parameters < PAYS_FROM:
        why = f"vLLM pays off from {PAYS_FROM / 1e6:g} million parameters, the model has {parameters:,}"
    elif no_vllm:
        why = f"vLLM is faster on a GPU, but {no_vllm}"
    else:
        name, why = "vllm", "samplers are on a GPU, and vLLM is installed"
    return ({"name": name} | given if given else name), why


def engine_for_run(c: RunConfig, options: Options, *, alone: bool = False, slot: int = 0) -> Any:
    """Return the engine's options with this run's lengths and share of the GPU.

    `alone`: on a GPU without a learner. `slot`: of the sampler, where each has an engine of its own.
    """
    engine: Any = None if alone else options.engine_of(slot)
    if engine is None:
        engine = options.engine if options.engine is not None else LocalOptions()  # `auto` without a whole run
    if not hasattr(engine, "for_run"):
        return engine
    share = ALONE if alone or options.samples_elsewhere else SHARED
    if isinstance(options.sync, Processes) and not alone:
        mine = (places := options.sync.places(c.device))[slot]
        share = (SHARED if mine == numbered(c.device) else ALONE) / places.count(mine)
    elif not alone:
        share *= min(1.0, getattr(options.sync, "num_gpus", None) or 1.0)
    longest = None if c.max_prompt_length >= UNLIMITED else c.longest
    return engine.for_run(longest, share, sleep=not alone and not options.own_engines)


def _sampler_device(options: Options, learner: str) -> str:
    """Return the samplers' device type; `learner`: the learner's."""
    if isinstance(options.sync, Processes) and options.sync.devices:
        return options.sync.devices[0].partition(":")[0]
    return "cuda" if getattr(options.sync, "num_gpus", None) else learner


def _may_round(options: Options, engine: Any) -> bool:
    """Whether the embedded engine may compute in bfloat16: its type is not set, and the loss weights tokens by the
    ratio of the learner's probability to the engine's. vLLM uses the saved model's dtype by default."""
    return isinstance(engine, LocalOptions) and engine.dtype is None and not options.uncorrected


def _save_as_sampled(values: dict[str, Any], why: dict[str, str], options: Options, engine: Any) -> None:
    """Let `save_dtype: auto` be float32 where rollouts are sampled in it, whatever type the given model has."""
    dtype = getattr(engine, "dtype", "")
    in_float32 = dtype == "float32" or (isinstance(engine, LocalOptions) and dtype is None)
    rounds = values.get("save_dtype", "float32") != "float32" and options.engine_of(0) is None
    if rounds and in_float32:
        values["save_dtype"], why["save_dtype"] = "float32", "as rollouts are sampled; rounding loses small updates"


def _dtype_given(engine: Any, model: InitialModel) -> str | None:
    """Return the 16-bit dtype in which vLLM computes for an object or adapter that has it, else None: these are loaded,
    and handed on, in float32."""
    by_name = model.model is None and model.adapter is None
    if not isinstance(engine, VllmOptions) or engine.dtype is not None or by_name:
        return None
    kind = str(model.meta_model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    return kind if kind in HALF else None


# ---------------------------------------------------------------- type and threads


def choose_dtype(c: RunConfig, parameters: int, machine: Machine) -> tuple[str, str]:
    """Return the compute dtype that suits the machine, and the reason."""
    if c.matmul_precision != "highest":
        return "float32", f"matmul_precision: {c.matmul_precision} says how it is multiplied"
    if parameters < PAYS_FROM:
        return "float32", f"bfloat16 pays from {PAYS_FROM / 1e6:g} million parameters, the model has {parameters:,}"
    if machine.device.type == "cuda":
        fast = machine.gpu_bfloat16
        return ("bfloat16", "the GPU has it") if fast else ("float32", "the GPU has no bfloat16")
    units = machine.bfloat16_units if machine.device.type == "cpu" else []
    if not units:
        return "float32", f"{machine.device.type} without amx_bf16 or avx512_bf16"
    return "bfloat16", f"the processor multiplies it fast ({units[0]})"


def choose_threads(options: Options, machine: Machine, parameters: int) -> tuple[int | None, str]:
    """Return the number of CPU threads, None for torch's, and why. Sampler processes use theirs at the same time."""
    if machine.device.type != "cpu":
        return None, f"torch's; {machine.device.type} does the work"
    taken = options.sync.samplers * options.sync.threads if isinstance(options.sync, Processes) else 0
    share = 2 if options.overlap else 1  # update and generation each have as many
    return threads_for(parameters, max(1, (machine.threads - taken) // share)), "the size of the model and the cores"


def threads_for(parameters: int, usable: int) -> int:
    """Return the number of CPU threads: all `usable` cores, or 1 for a model too small to share its products.

    A rule, not a measurement: another number rounds sums in another order, so equal runs need equal numbers.
    """
    return usable if parameters >= PAYS_FROM else 1


def _slow_settings(c: RunConfig, machine: Machine, preferred: str, why_preferred: str) -> list[str]:
    """Return a line for each setting that is slow here, by the rules of `auto`; nothing is timed."""
    lines = []
    if isinstance(c.threads, int) and c.threads > machine.threads:
        lines.append(f"threads: {c.threads}, but this process may use {machine.threads} here; set threads=auto")
    by_type = c.matmul_precision == "highest" and c.dtype != "float16"  # float16 is as fast on a GPU
    if by_type and c.dtype != preferred:
        lines.append(f"dtype: {c.dtype} is probably slower here than {preferred} ({why_preferred}); set dtype=auto")
    return lines


# ---------------------------------------------------------------- sizes by memory


@dataclass(frozen=True)
class Sizes:
    """What memory decides."""

    values: dict[str, Any]
    why: dict[str, str]
    engine: dict[str, Any]
    """Options of the engine that change."""
    budgets: dict[str, Budget]


def _sizes_on_cpu(
    c: RunConfig, options: Options, engine: Any, machine: Machine, model: InitialModel, several_turns: bool
) -> Sizes:
    values: dict[str, Any] = {}
    why: dict[str, str] = {}
    of_engine: dict[str, Any] = {}
    open_ = isinstance(engine, LocalOptions) and not engine.fixed_slots and "slots" not in section_of(c.engine)
    groups = options.rollout_batch.size * (c.max_lag * options.continuous + 1)
    wanted = min(CPU_SLOTS, groups * c.num_generations)
    if open_ and machine.device.type == "cpu" and not options.samples_elsewhere:
        longest = min(n for n in (c.longest, engine.max_length, model.positions) if n is not None)
        each = longest * Shapes.from_model(model.meta_model, c.lora).kv_elements * engine_bytes(engine)
        samplers = options.sync.samplers if isinstance(options.sync, Processes) else 1
        slots, reason = choose_slots(engine.slots, wanted, each, machine.memory // samplers, several_turns)
        if slots != engine.slots:
            of_engine["slots"], why["engine"] = slots, reason
    if c.tokens_per_microbatch == "auto":
        values["tokens_per_microbatch"], why["tokens_per_microbatch"] = choose_tokens(model.meta_model)
    if c.gradient_checkpointing == "auto":
        recomputed, reason = choose_checkpointing(model.meta_model, c.longest, machine.memory)
        values["gradient_checkpointing"] = recomputed
        why |= {"gradient_checkpointing": reason} if recomputed else {}
    return Sizes(values, why, of_engine, {})


def _sizes_on_gpu(
    c: RunConfig, options: Options, machine: Machine, model: InitialModel, alone: bool, several_turns: bool
) -> Sizes:
    """Choose sizes by the memory that other processes leave.

    Samplers with GPUs of their own are assumed to have as much each. Raises ConfigError if the run cannot fit.
    """
    shapes, sizes = Shapes.from_model(model.meta_model, c.lora), Sizes({}, {}, {}, {})
    places = options.sync.places(c.device) if isinstance(options.sync, Processes) and not alone else []
    for name, (learner, slot) in _roles(c, options, places, alone).items():
        for_run = engine_for_run(c, options, alone=alone, slot=slot or 0)
        more: dict[str, Any] = {"several_turns": several_turns, "total": machine.gpu_total}
        whole = Budget(c, shapes, machine.gpu_memory, for_run, options.ranks, learner, slot is not None, **more)
        if places and slot is not None:
            whole = replace(whole, samplers=places.count(places[slot]))
        given = getattr(options.engine, "gpu_memory_utilization", None) is not None
        budget, chosen = whole.fitted(share_given=given)
        elsewhere = name == SAMPLER_GPU and not machine.planned_gpus
        phases = budget.phases() if elsewhere else budget.require_room()
        need = max(sum(held.values()) for held in phases.values())
        largest = next(phase for phase, held in phases.items() if sum(held.values()) == need)
        reason = f"{need / GIB:.1f} of {machine.gpu_memory / GIB:.1f} GiB in the {largest} phase"
        sizes.budgets[name] = budget
        if of_engine := chosen.pop("engine", {}):  # samplers on the next GPU have the same options
            sizes.engine.update(of_engine)
            options = replace(options, engine=replace(options.engine, **of_engine))
        sizes.values.update(chosen)
        sizes.why.update(dict.fromkeys(chosen, reason))
        if budget.engine != whole.engine and not machine.planned_gpus:  # a plan says why this engine
            sizes.why["engine"] = reason
    return sizes


def _roles(c: RunConfig, options: Options, places: list[str], alone: bool) -> dict[str, tuple[bool, int | None]]:
    """Return for each GPU whether the learner is there, and the slot of a sampler there; None without one.

    `places`: devices of sampler processes.
    """
    if alone or not options.samples_elsewhere:
        return {"GPU": (not alone, 0)}
    mine = numbered(c.device)
    roles: dict[str, tuple[bool, int | None]] = {"learner GPU": (True, places.index(mine) if mine in places else None)}
    others = [slot for slot, place in enumerate(places or [""]) if place not in (mine, "cpu")]
    if others and options.engine_of(0) is None:
        roles[SAMPLER_GPU] = (False, others[0])
    return roles


def choose_slots(default: int, wanted: int, bytes_per_slot: int, memory: int, several_turns: bool) -> tuple[int, str]:
    """Return the embedded engine's slots on a CPU, and why: up to `wanted` if memory is plenty, else the default's or
    fewer.

    Siblings share rows, so a decode step has fewer rows than slots. As many sequences as run may be kept between turns.
    """
    more = min(wanted, int(KEYS_SHARE * memory) // max(1, 2 * bytes_per_slot))
    most = int(MOST_SHARE * memory) // max(1, (1 + several_turns) * bytes_per_slot)
    slots = max(1, min(max(default, more), most))
    taken = slots * bytes_per_slot / GIB
    return slots, f"keys and values of {slots:,} slots take at most {taken:.2g} of {memory / GIB:.2g} GiB"


def bytes_per_token(model: Any) -> int:
    """Estimate what a backward pass needs per token: inputs and outputs of all matrices except the vocabulary's.

    Weights may be on the meta device. At 135 million parameters it gives 1.2 MB; 1.2 to 1.6 were measured.
    """
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    vocabulary = {id(end.weight) for end in ends if end is not None}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in vocabulary]
    return sum(4 * (p.shape[0] + p.shape[1]) for p in matrices)


def choose_tokens(model: Any) -> tuple[int, str]:
    """Return the tokens of a micro-batch on a CPU, and why. Depends on the model only, not on free memory."""
    each = max(1, bytes_per_token(model))
    tokens = max(AT_LEAST, min(AT_MOST, CPU_ACTIVATION_BYTES // each))
    why = f"activations of a token take about {each / 1e6:.2g} MB, those of a micro-batch {tokens * each / GIB:.2g} GiB"
    return tokens, why


def choose_checkpointing(model: Any, longest: int, memory: int) -> tuple[bool, str]:
    """Return whether to recompute layers on a CPU, and why. `longest`: tokens of the longest possible row."""
    needed = longest * bytes_per_token(model)
    why = f"{longest:,} tokens need about {needed / GIB:.2g} GiB of {memory / GIB:.2g} GiB without it"
    layers = any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    return layers and needed > LONGEST_ROW_SHARE * memory, why
