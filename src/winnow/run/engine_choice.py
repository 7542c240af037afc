"""Resolves `engine: auto`: vLLM on a GPU where it is installed and pays off, else the embedded engine."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

from ..base.install import install
from ..config import MethodSpec, RunConfig, method, name_of, section_of
from ..engine import ENGINES, VllmOptions
from ..engine.vllm.options import ALONE, SHARED
from ..sampler import Processes, sampler_options

AUTO = "auto"
PAYS_FROM = 10_000_000
"""Model parameters from which vLLM's start, up to a minute, pays off."""


def choose_engine(c: RunConfig, parameters: int, device: str) -> tuple[MethodSpec, str]:
    """Return the engine that `c.engine` names or `auto` becomes, and why. `device`: device type of samplers.

    Options given with `name: auto` are kept; one that vLLM does not have selects the embedded engine.
    """
    if name_of(c.engine) != AUTO:
        return c.engine, "as configured"
    options = section_of(c.engine)
    del options["name"]
    unknown = set(options) - {field.name for field in dataclasses.fields(VllmOptions)}
    name, why = "local", ""
    if device != "cuda":
        why = f"samplers are on {device}"
    elif unknown:
        why = f"vLLM has no option {min(unknown)}"
    elif uncorrected(c):
        why = "policy_loss: plain without a correction needs an engine that rounds as the learner does"
    elif c.speculative:
        why = "speculative needs an engine that reads drafts"
    elif parameters < PAYS_FROM:
        why = f"vLLM pays off from {PAYS_FROM / 1e6:g} million parameters, the model has {parameters:,}"
    elif find_spec("vllm") is None:
        why = f"vLLM is faster on a GPU, but not installed; {install('vllm')}"
    else:
        name, why = "vllm", "samplers are on a GPU, and vLLM is installed"
    return ({"name": name} | options if options else name), why


def engine_options(c: RunConfig, *, alone: bool = False) -> Any:
    """Return the options of the run's engine. `alone`: on a GPU without a learner."""
    spec = section_of(c.engine)
    if spec.get("name") == AUTO:  # not settled yet
        spec["name"] = "local"
    options = method(ENGINES, spec, "engine")
    if not hasattr(options, "for_run"):
        return options
    sampling = sampler_options(c.sync)
    apart = alone or samples_elsewhere(c)
    share = ALONE * min(1.0, getattr(sampling, "num_gpus", None) or 1.0) if apart else SHARED
    if isinstance(sampling, Processes) and not apart:
        share /= sampling.samplers
    in_turn = not alone and "own_engine" not in sampling.provides
    return options.for_run(c.longest, share, sleep=in_turn)


def samples_elsewhere(c: RunConfig) -> bool:
    """Whether samplers have their own devices; sampler processes share the learner's unless given some."""
    options = sampler_options(c.sync)
    return "own_engine" in options.provides and not (isinstance(options, Processes) and not options.devices)


def uncorrected(c: RunConfig) -> bool:
    """Whether no ratio of the loss corrects for the engine's rounding of probabilities."""
    return c.policy_loss == "plain" and name_of(c.correction) == "none"
