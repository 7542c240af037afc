"""Where the parts of a run would be: memory of samplers and ranks, nodes of the cluster, and what does not fit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..base import cluster
from ..config import MethodSpec, RunConfig, method
from ..engine import ENGINES
from ..engine.loading import load_config
from ..learner import LEARNERS, Fsdp
from ..sampler.options import PoolOptions
from .build import sampler_options

if TYPE_CHECKING:
    from .trainer import Trainer

MIB = 2**20
PROCESS_MIB = 500
"""What a process takes before it has a model; measured: 390 MiB for a sampler, 470 for a rank."""


def placement(trainer: Trainer, rollouts: int) -> dict[str, Any]:
    """`samplers`, `ranks`, `nodes` and `does_not_fit`; nothing for a run of one process. `rollouts`: of one step."""
    found: dict[str, Any] = {}
    parameters, trained = trainer.learner.sizes.total, trainer.learner.sizes.trained
    sampling, learner = sampler_options(trainer.config), method(LEARNERS, trainer.config.learner, "learner")
    if isinstance(sampling, PoolOptions):
        processes = getattr(method(ENGINES, trainer.config.engine, "engine"), "tensor_parallel_size", 1)
        bytes_ = 4 * parameters + _kv_bytes(trainer, rollouts // sampling.samplers)
        found["samplers"] = {
            "count": sampling.samplers,
            "to_start": sampling.least,
            "cpus": sampling.threads,
            "gpus": getattr(sampling, "num_gpus", 0.0),
            "mib": round(processes * PROCESS_MIB + bytes_ / MIB),
        }
    if isinstance(learner, Fsdp):
        whole, kept = 4 * parameters, (4 * parameters + 12 * trained) / learner.ranks
        found["ranks"] = {
            "count": learner.ranks,
            "cpus": learner.threads,
            "gpus": learner.num_gpus,
            "mib": round(PROCESS_MIB + max(whole, kept) / MIB),
            "mib_once_cut": round(PROCESS_MIB + kept / MIB),
        }
    if found:
        found["nodes"] = nodes = _nodes(trainer.config.sync, trainer.config.learner)
        found["does_not_fit"] = does_not_fit(found, nodes)
    return found


def engine_bytes(c: RunConfig) -> int:
    """Bytes of an engine's weight, key or value."""
    dtype = c.engine.get("dtype") if isinstance(c.engine, dict) else None
    return 2 if dtype in ("bfloat16", "float16") else 4


def _kv_bytes(trainer: Trainer, rollouts: int) -> int:
    """Keys and values of as many of a step's rollouts as run at once, at their longest."""
    c = trainer.config
    text = load_config(c.model).get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    slots = c.engine.get("slots", 256) if isinstance(c.engine, dict) else 256
    each = (
        2 * text.num_hidden_layers * heads * width * engine_bytes(c) * (c.max_prompt_length + c.max_completion_length)
    )
    return int(each * min(max(rollouts, 1), int(slots)))


def _nodes(*specs: MethodSpec) -> list[dict[str, Any]]:
    """Nodes of the cluster that these are on, else this machine."""
    if any((spec if isinstance(spec, str) else spec.get("name")) in ("ray", "fsdp") for spec in specs):
        return [
            {
                "node": cluster.node_name(node),
                "cpus": node["Resources"].get("CPU", 0.0),
                "gpus": node["Resources"].get("GPU", 0.0),
                "mib": round(node["Resources"].get("memory", 0.0) / MIB),
            }
            for node in cluster.alive_nodes()
        ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [{"node": "this machine", "cpus": os.cpu_count(), "gpus": 0.0, "mib": round(memory / MIB)}]


def does_not_fit(wanted: dict[str, dict[str, Any]], nodes: list[dict[str, Any]]) -> list[str]:
    """Place processes where most memory is left, ranks first; sentences about those that found no place."""
    left = [dict(node) for node in nodes]
    problems = []
    for kind in ("ranks", "samplers"):
        if kind not in wanted:
            continue
        each, missing = wanted[kind], 0
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
            waits = (
                "; the run starts without them"
                if each["count"] - missing >= each.get("to_start", each["count"])
                else ""
            )
            problems.append(f"{missing} of {each['count']} {kind}: no node has {need} left for each{waits}")
    return problems
