"""Values of all `auto` keys on this machine. A run saves them and keeps them on a resume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from transformers.modeling_layers import GradientCheckpointingLayer

from ..base.processor import bfloat16_units, usable_threads
from ..config import RunConfig, method, name_of, section_of
from ..engine import ENGINES, LocalOptions
from ..engine.loading import resolve_device
from ..sampler import Processes, sampler_options
from .budget import AT_LEAST, AT_MOST, GIB, Budget, Gpus, Shapes
from .engine_choice import AUTO, choose_engine, samples_elsewhere, uncorrected
from .start import Start

PAYS_FROM = 10_000_000
"""Parameters from which bfloat16 and more than one thread pay off; measured (docs/benchmarks.md)."""

ON_CPU = 1 << 30
"""Bytes for the activations of a micro-batch on a CPU; more are no faster, measured at 0.6 and 135 million parameters
(docs/benchmarks.md)."""
LONGEST = 1 / 2
"""Share of memory the activations of the longest row may take before layers are recomputed."""


@dataclass(frozen=True)
class Machine:
    """Settings that a run uses on this machine, and the reasons."""

    config: RunConfig
    """The config with a value for every `auto`."""
    why: Mapping[str, str]
    """Reasons, by config key."""
    preferred: str
    """Choice of `dtype: auto` on this machine."""
    why_preferred: str
    device: torch.device
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    """Memory by GPU; empty on a CPU."""

    def set_threads(self) -> None:
        if isinstance(self.config.threads, int):
            torch.set_num_threads(self.config.threads)

    def say(self, console: Console) -> None:
        for key, reason in self.why.items():
            console.print(f"{key}: {getattr(self.config, key)} ({reason})", highlight=False)
        for warning in self.warnings():
            console.print(f"warning: {warning}", style="yellow", highlight=False)

    def warnings(self) -> list[str]:
        """Return a line for each setting that is slow here, by the rules of `auto`; nothing is timed."""
        found = []
        c, cores = self.config, usable_threads()
        if isinstance(c.threads, int) and c.threads > cores:
            found.append(f"threads: {c.threads}, but this process may use {cores} here; set threads=auto")
        by_type = c.matmul_precision == "highest" and c.dtype != "float16"  # float16 is as fast on a GPU
        if by_type and c.dtype != self.preferred:
            found.append(
                f"dtype: {c.dtype} is probably slower here than {self.preferred} ({self.why_preferred}); set dtype=auto"
            )
        return found


def settle(
    c: RunConfig, start: Start, *, resumed: bool = False, alone: bool = False, gpus: Gpus | None = None
) -> Machine:
    """Choose values for `auto` keys and for settings that the model's files decide; weights are not loaded.
    `alone`: an engine in this process without a learner. `gpus`: GPUs to plan for instead of this machine.

    Raises ConfigError when the model or device does not exist, or the run does not fit on a GPU.
    """
    device = resolve_device(c.device) if gpus is None else torch.device("cuda")
    if gpus is not None and c.dtype == "auto":
        c = c.model_copy(update={"dtype": "bfloat16"})
    shell = start.shell()
    parameters = sum(p.numel() for p in shell.parameters())
    preferred, why_preferred = choose_dtype(c, parameters, device)
    given = "as the run began" if resumed else "as configured"
    chosen, why = start.settled(c)
    why |= {"dtype": given, "threads": given}
    if name_of(c.engine) == AUTO:
        where = device.type if alone else sampler_device(c, device.type)
        chosen["engine"], because = choose_engine(c, parameters, where)
        why |= {"engine": because} if device.type == "cuda" else {}
    c = c.model_copy(update=chosen)
    rounds = c.dtype == "auto" or (device.type == "cuda" and not resumed)
    if c.dtype == "auto":
        why["dtype"] = why_preferred
        c = c.model_copy(update={"dtype": preferred})
    if rounds:
        c = c.model_copy(update=engine_type(c))
    if c.threads == "auto":
        sampling, threads, why["threads"] = sampler_options(c.sync), None, f"torch's; {device.type} does the work"
        if device.type == "cpu":  # sampler processes use theirs at the same time
            taken = sampling.samplers * sampling.threads if isinstance(sampling, Processes) else 0
            threads = choose_threads(parameters, max(1, usable_threads() - taken))
            why["threads"] = "the size of the model and the cores"
        c = c.model_copy(update={"threads": threads})
    if device.type == "cuda":
        budgets = _on_gpu(c, Shapes.of(shell, c), device, why, gpus, alone=alone)
        c = list(budgets.values())[-1].config
        return Machine(c, why, preferred, why_preferred, device, budgets)
    if c.tokens_per_microbatch == "auto":
        tokens, why["tokens_per_microbatch"] = choose_tokens(shell)
        c = c.model_copy(update={"tokens_per_microbatch": tokens})
    if c.gradient_checkpointing == "auto":
        recomputed, reason = choose_checkpointing(shell, c.longest)
        c = c.model_copy(update={"gradient_checkpointing": recomputed})
        why |= {"gradient_checkpointing": reason} if recomputed else {}
    return Machine(c, why, preferred, why_preferred, device)


def _on_gpu(
    c: RunConfig, shapes: Shapes, device: torch.device, why: dict[str, str], gpus: Gpus | None, *, alone: bool
) -> dict[str, Budget]:
    """Choose sizes by the memory that other processes leave; return the budgets by GPU, the last with all choices.

    Samplers with GPUs of their own are assumed to have as much each. Raises ConfigError if the run cannot fit.
    """
    memory = torch.cuda.mem_get_info(device)[0] if gpus is None else gpus.memory
    apart = not alone and (samples_elsewhere(c) or (gpus is not None and gpus.count > 1))
    roles = {"learner GPU": (True, False), "sampler GPU": (False, True)} if apart else {"GPU": (not alone, True)}
    budgets: dict[str, Budget] = {}
    for name, (learner, sampler) in roles.items():
        budget = Budget(c, shapes, memory, learner, sampler)
        chosen = budget.fitted()
        c = c.model_copy(update=chosen)
        budgets[name] = budget = replace(budget, config=c)
        phases = budget.phases() if sampler and apart and gpus is None else budget.require_room()
        need = max(sum(held.values()) for held in phases.values())
        largest = next(phase for phase, held in phases.items() if sum(held.values()) == need)
        for key in chosen:
            if key == "engine" and gpus is not None:
                continue  # the plan says why this engine
            why[key] = f"{need / GIB:.1f} of {memory / GIB:.1f} GiB in the {largest} phase"
    return budgets


def choose_dtype(c: RunConfig, parameters: int, device: torch.device) -> tuple[str, str]:
    """Return the compute dtype and the reason."""
    if c.matmul_precision != "highest":
        return "float32", f"matmul_precision: {c.matmul_precision} says how it is multiplied"
    if parameters < PAYS_FROM:
        return "float32", f"bfloat16 pays from {PAYS_FROM / 1e6:g} million parameters, the model has {parameters:,}"
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bfloat16", "the GPU has it") if fast else ("float32", "the GPU has no bfloat16")
    units = bfloat16_units() if device.type == "cpu" else []
    if not units:
        return "float32", f"{device.type} without amx_bf16 or avx512_bf16"
    return "bfloat16", f"the processor multiplies it fast ({units[0]})"


def choose_threads(parameters: int, usable: int) -> int:
    """Return the number of CPU threads: all `usable` cores, or 1 for a model too small to share its products.

    A rule, not a measurement: another number rounds sums in another order, so equal runs need equal numbers.
    """
    return usable if parameters >= PAYS_FROM else 1


def sampler_device(c: RunConfig, learner: str) -> str:
    """Return the samplers' device type; `learner`: the learner's."""
    options = sampler_options(c.sync)
    if isinstance(options, Processes) and options.devices:
        return options.devices[0].partition(":")[0]
    return "cuda" if getattr(options, "num_gpus", None) else learner


def engine_type(c: RunConfig) -> dict[str, Any]:
    """Return the embedded engine's bfloat16 setting, empty if its dtype is set or no ratio corrects its samples.

    Both sides may round if the loss weights tokens by the ratio of the learner's probability to the engine's. vLLM uses
    the saved model's dtype by default.
    """
    options = method(ENGINES, c.engine, "engine")
    if c.dtype != "bfloat16" or uncorrected(c) or not isinstance(options, LocalOptions) or options.dtype is not None:
        return {}
    return {"engine": section_of(c.engine) | {"dtype": c.dtype}}


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
    tokens = max(AT_LEAST, min(AT_MOST, ON_CPU // each))
    why = f"activations of a token take about {each / 1e6:.2g} MB, those of a micro-batch {tokens * each / GIB:.2g} GiB"
    return tokens, why


def choose_checkpointing(model: Any, longest: int) -> tuple[bool, str]:
    """Return whether to recompute layers on a CPU, and why. `longest`: tokens of the longest possible row."""
    needed, memory = longest * bytes_per_token(model), main_memory()
    why = f"{longest:,} tokens need about {needed / GIB:.2g} GiB of {memory / GIB:.2g} GiB without it"
    layers = any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    return layers and needed > LONGEST * memory, why


def main_memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
