"""What `auto` is on this machine, of every key that has it; a run saves what was chosen and keeps it on a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from ..base.processor import bfloat16_units, usable_threads
from ..config import RunConfig, method, name_of
from ..engine import ENGINES, LocalOptions
from ..engine.loading import resolve_device
from ..sampler import Processes
from .activations import choose_checkpointing, choose_tokens
from .budget import Shapes, device_budget, require_room, settle_for
from .build import sampler_options
from .engine_choice import AUTO, choose_engine, samples_elsewhere, uncorrected
from .start import Start

PAYS_FROM = 10_000_000
"""Parameters of a model from which bfloat16 and more than one thread pay; measured (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Machine:
    """What a run computes with here, and why."""

    config: RunConfig
    """The configuration with a value in the place of every `auto`."""
    why: Mapping[str, str]
    """Reasons, by key of the configuration."""
    preferred: str
    """What `dtype: auto` chooses here."""
    why_preferred: str
    device: torch.device

    def set_threads(self) -> None:
        if isinstance(self.config.threads, int):
            torch.set_num_threads(self.config.threads)

    def say(self, console: Console) -> None:
        for key, reason in self.why.items():
            console.print(f"{key}: {getattr(self.config, key)} ({reason})", highlight=False)
        for warning in self.warnings():
            console.print(f"warning: {warning}", style="yellow", highlight=False)

    def warnings(self) -> list[str]:
        """Return a line for each setting that is slow here, by the rules of `auto`: nothing is timed."""
        found = []
        c, cores = self.config, usable_threads()
        if isinstance(c.threads, int) and c.threads > cores:
            found.append(f"threads: {c.threads}, but this process may use {cores} here; set threads=auto")
        by_type = c.matmul_precision == "highest" and c.dtype != "float16"  # a GPU multiplies float16 as fast, too
        if by_type and c.dtype != self.preferred:
            found.append(
                f"dtype: {c.dtype} is probably slower here than {self.preferred} ({self.why_preferred}); set dtype=auto"
            )
        return found


def settle(c: RunConfig, model: Any = None, *, resumed: bool = False, alone: bool = False) -> Machine:
    """Chooses what is `auto`, and what the model's own files decide. `model`: see `Start.of`; weights are not loaded.
    `alone`: an engine of this process without a learner.

    Raises ConfigError when there is no such model or device.
    """
    device = resolve_device(c.device)
    start = Start.of(c, model)
    shell = start.shell(c)
    parameters = sum(p.numel() for p in shell.parameters())
    preferred, why_preferred = choose_dtype(c, parameters, device)
    given = "as the run began" if resumed else "as configured"
    chosen, why = start.settled(c)
    why |= {"dtype": given, "threads": given}
    if name_of(c.engine) == AUTO:
        where = device.type if alone else sampler_device(c, device.type)
        engine, because = choose_engine(c, parameters, where)
        c = c.model_copy(update={"engine": engine})
        why |= {"engine": because} if device.type == "cuda" else {}
    if c.dtype == "auto":
        why["dtype"], chosen = why_preferred, chosen | {"dtype": preferred} | engine_type(c, preferred)
    elif device.type == "cuda" and not resumed:
        chosen |= engine_type(c, c.dtype)
    if c.threads == "auto":
        on_cpu = device.type == "cpu"
        chosen["threads"] = choose_threads(parameters, _usable(c)) if on_cpu else None
        why["threads"] = "the size of the model and the cores" if on_cpu else f"torch's; {device.type} does the work"
    if device.type == "cuda":
        c, chosen = c.model_copy(update=chosen), {}
        _settle_on_gpu(c, shell, device, chosen, why, alone=alone)
        return Machine(c.model_copy(update=chosen), why, preferred, why_preferred, device)
    if c.tokens_per_microbatch == "auto":
        chosen["tokens_per_microbatch"], why["tokens_per_microbatch"] = choose_tokens(shell)
    if c.gradient_checkpointing == "auto":
        longest = c.max_prompt_length + c.max_completion_length
        chosen["gradient_checkpointing"], reason = choose_checkpointing(shell, device, longest)
        if chosen["gradient_checkpointing"]:
            why["gradient_checkpointing"] = reason
    return Machine(c.model_copy(update=chosen), why, preferred, why_preferred, device)


def _settle_on_gpu(
    c: RunConfig, shell: Any, device: torch.device, chosen: dict[str, Any], why: dict[str, str], *, alone: bool
) -> None:
    """Sizes by the GPU's memory, less what other processes hold. Raises ConfigError when the run cannot fit."""
    memory = torch.cuda.mem_get_info(device)[0]
    shapes, apart = Shapes.of(shell, c), not alone and samples_elsewhere(c)
    roles = {"learner": not alone, "sampler": not apart}
    chosen |= settle_for(c, shapes, memory, **roles)
    if apart:  # as if their GPUs had as much
        chosen |= settle_for(c.model_copy(update=chosen), shapes, memory, learner=False)
    settled = c.model_copy(update=chosen)
    phases = device_budget(settled, shapes, memory, **roles)
    require_room(settled, phases, memory)
    largest = max(phases, key=lambda phase: sum(phases[phase].values()))
    need = sum(phases[largest].values()) / 2**30
    for key in chosen:
        why[key] = f"{need:.1f} of {memory / 2**30:.1f} GiB in the {largest} phase"


def choose_dtype(c: RunConfig, parameters: int, device: torch.device, info: str | None = None) -> tuple[str, str]:
    """The type to compute with, and why. `info`: text of /proc/cpuinfo; None is this machine's."""
    if c.matmul_precision != "highest":
        return "float32", f"matmul_precision: {c.matmul_precision} says how it is multiplied"
    if parameters < PAYS_FROM:
        return "float32", f"bfloat16 pays from {PAYS_FROM / 1e6:g} million parameters, the model has {parameters:,}"
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bfloat16", "the GPU has it") if fast else ("float32", "the GPU has no bfloat16")
    units = bfloat16_units(info) if device.type == "cpu" else []
    if not units:
        return "float32", f"{device.type} without amx_bf16 or avx512_bf16"
    return "bfloat16", f"the processor multiplies it fast ({units[0]})"


def choose_threads(parameters: int, usable: int) -> int:
    """Return the number of CPU threads: all `usable` cores, or 1 for a model too small to share its products.

    A rule, not a measurement: another number rounds sums in another order, so equal runs need equal numbers.
    """
    return usable if parameters >= PAYS_FROM else 1


def _usable(c: RunConfig) -> int:
    """Threads for the learner's process: sampler processes have theirs at the same time."""
    options = sampler_options(c)
    taken = options.samplers * options.threads if isinstance(options, Processes) else 0
    return max(1, usable_threads() - taken)


def sampler_device(c: RunConfig, learner: str) -> str:
    """Type of the samplers' device; `learner`: that of the learner's."""
    options = sampler_options(c)
    if isinstance(options, Processes) and options.devices:
        return options.devices[0].partition(":")[0]
    return "cuda" if getattr(options, "num_gpus", None) else learner


def engine_type(c: RunConfig, dtype: str) -> dict[str, Any]:
    """The embedded engine computes in bfloat16, too, unless it was told what to, or nothing weighs what it samples.

    Both sides may round where the loss weighs tokens by the ratio of the learner's probability to the engine's own.
    vLLM takes the type of the saved model by itself.
    """
    options = method(ENGINES, c.engine, "engine")
    if dtype != "bfloat16" or uncorrected(c) or not isinstance(options, LocalOptions) or options.dtype is not None:
        return {}
    return {"engine": ({"name": c.engine} if isinstance(c.engine, str) else c.engine) | {"dtype": dtype}}
