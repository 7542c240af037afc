"""Values of all `auto` keys on this machine. A run saves them and keeps them on a resume."""

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
"""Parameters from which bfloat16 and more than one thread pay off; measured (docs/benchmarks.md)."""


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


def settle(c: RunConfig, model: Any = None, *, resumed: bool = False, alone: bool = False) -> Machine:
    """Choose values for `auto` keys and for settings that the model's files decide. `model`: see `Start.of`; weights
    are not loaded. `alone`: an engine in this process without a learner.

    Raises ConfigError when the model or device does not exist.
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
        longest = c.longest
        chosen["gradient_checkpointing"], reason = choose_checkpointing(shell, device, longest)
        if chosen["gradient_checkpointing"]:
            why["gradient_checkpointing"] = reason
    return Machine(c.model_copy(update=chosen), why, preferred, why_preferred, device)


def _settle_on_gpu(
    c: RunConfig, shell: Any, device: torch.device, chosen: dict[str, Any], why: dict[str, str], *, alone: bool
) -> None:
    """Choose sizes by the GPU's memory, less other processes' share. Raises ConfigError if the run cannot fit."""
    memory = torch.cuda.mem_get_info(device)[0]
    shapes, apart = Shapes.of(shell, c), not alone and samples_elsewhere(c)
    roles = {"learner": not alone, "sampler": not apart}
    chosen |= settle_for(c, shapes, memory, **roles)
    if apart:  # assumes that their GPUs have as much
        chosen |= settle_for(c.model_copy(update=chosen), shapes, memory, learner=False)
    settled = c.model_copy(update=chosen)
    phases = device_budget(settled, shapes, memory, **roles)
    require_room(settled, phases, memory)
    largest = max(phases, key=lambda phase: sum(phases[phase].values()))
    need = sum(phases[largest].values()) / 2**30
    for key in chosen:
        why[key] = f"{need:.1f} of {memory / 2**30:.1f} GiB in the {largest} phase"


def choose_dtype(c: RunConfig, parameters: int, device: torch.device, info: str | None = None) -> tuple[str, str]:
    """Return the compute dtype and the reason. `info`: text of /proc/cpuinfo; None: this machine's."""
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
    """Return the threads for the learner's process; sampler processes use theirs at the same time."""
    options = sampler_options(c)
    taken = options.samplers * options.threads if isinstance(options, Processes) else 0
    return max(1, usable_threads() - taken)


def sampler_device(c: RunConfig, learner: str) -> str:
    """Return the samplers' device type; `learner`: the learner's."""
    options = sampler_options(c)
    if isinstance(options, Processes) and options.devices:
        return options.devices[0].partition(":")[0]
    return "cuda" if getattr(options, "num_gpus", None) else learner


def engine_type(c: RunConfig, dtype: str) -> dict[str, Any]:
    """Return the embedded engine's bfloat16 setting, empty if its dtype is set or no ratio corrects its samples.

    Both sides may round if the loss weights tokens by the ratio of the learner's probability to the engine's. vLLM uses
    the saved model's dtype by default.
    """
    options = method(ENGINES, c.engine, "engine")
    if dtype != "bfloat16" or uncorrected(c) or not isinstance(options, LocalOptions) or options.dtype is not None:
        return {}
    return {"engine": ({"name": c.engine} if isinstance(c.engine, str) else c.engine) | {"dtype": dtype}}
