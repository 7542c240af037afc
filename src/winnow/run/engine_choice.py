"""What `engine: auto` is in a run: vLLM on a GPU where it is installed and pays, else the embedded engine."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

from ..base.install import install
from ..config import MethodSpec, RunConfig, name_of
from ..engine import VllmOptions

AUTO = "auto"
PAYS_FROM = 10_000_000
"""Parameters of a model from which vLLM's start, up to a minute, pays."""


def choose_engine(c: RunConfig, parameters: int, device: str) -> tuple[MethodSpec, str]:
    """The engine that `c.engine` names or `auto` becomes, and why. `device`: the type that samplers have.

    Options that are given with `name: auto` stay; one that vLLM does not have decides for the embedded engine.
    """
    if name_of(c.engine) != AUTO:
        return c.engine, "as configured"
    options = {k: v for k, v in c.engine.items() if k != "name"} if isinstance(c.engine, dict) else {}
    name, why = _choice(c, parameters, device, set(options))
    return ({"name": name} | options if options else name), why


def uncorrected(c: RunConfig) -> bool:
    """Whether no ratio of the loss weighs tokens by what the engine's own rounding made of their probabilities."""
    return c.policy_loss == "plain" and name_of(c.correction) == "none"


def _choice(c: RunConfig, parameters: int, device: str, options: set[str]) -> tuple[str, str]:
    if device != "cuda":
        return "local", f"samplers are on {device}"
    if strange := sorted(options - {field.name for field in dataclasses.fields(VllmOptions)}):
        return "local", f"vLLM has no option {strange[0]}"
    if uncorrected(c):
        return "local", "policy_loss: plain without a correction needs an engine that rounds as the learner does"
    if parameters < PAYS_FROM:
        return "local", f"vLLM pays from {PAYS_FROM / 1e6:g} million parameters, the model has {parameters:,}"
    if find_spec("vllm") is None:
        return "local", f"vLLM is faster on a GPU, but not installed; {install('vllm')}"
    return "vllm", "samplers are on a GPU, and vLLM is installed"
