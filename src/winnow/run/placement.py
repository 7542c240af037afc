"""Placement of a run's processes: memory of samplers and ranks, nodes of the cluster, and what does not fit."""

from __future__ import annotations

import math
import os
import time
from typing import Any

from ..base import cluster
from ..config import ConfigError
from ..learner import Fsdp
from ..learner.base import Sizes
from ..sampler import Ray
from ..sampler.base import PoolOptions
from .budget import Shapes, engine_bytes
from .resolved import Resolved, main_memory

MIB = 2**20
FREE_S = 30.0
"""Longest wait for resources that other jobs hold: an earlier run may just have ended."""
FEWER = "set fewer samplers, ranks, threads or num_gpus, or add nodes"
STARTS = "the run starts without them"
PROCESS_MIB = 500
"""MiB of a process without a model; measured: 390 for a sampler, 470 for a rank."""


def placement(r: Resolved, sizes: Sizes, rollouts: int, *, sent: bool = True) -> dict[str, Any]:
    """Return `samplers`, `ranks`, `nodes` and `does_not_fit`; nothing for a run of one process.

    `rollouts`: of one step. `sent`: ranks are sent the whole model instead of reading their shards from files.
    """
    c, engine = r.config, r.engine
    places: dict[str, Any] = {**_places(r)}
    if "samplers" in places:
        processes = getattr(engine, "tensor_parallel_size", 1)
        at_once = min(max(rollouts // places["samplers"]["count"], 1), getattr(engine, "slots", rollouts))
        positions = at_once * c.longest
        bytes_ = (
            4 * sizes.total
            + positions * engine_bytes(engine) * Shapes.from_model(r.model.meta_model, c.lora).kv_elements
        )
        places["samplers"]["mib"] = round(processes * PROCESS_MIB + bytes_ / MIB)
    if "ranks" in places:
        cut_among = r.options.learner.fsdp_size or places["ranks"]["count"]
        reference = 4 * sizes.total if c.keeps_reference and c.lora is None else 0
        kept = reference + (4 * sizes.total + 12 * sizes.trained) / cut_among
        at_start = reference + 4 * sizes.total if sent else 0
        places["ranks"]["mib"] = round(PROCESS_MIB + max(at_start, kept) / MIB)
        places["ranks"]["mib_once_cut"] = round(PROCESS_MIB + kept / MIB)
    if places:
        if isinstance(r.options.sync, Ray) or "ranks" in places:
            places["nodes"] = nodes = _nodes()
        else:  # processes of this machine, which share its cores
            here = {"node": "this machine", "cpus": os.cpu_count(), "gpus": 0.0, "mib": round(main_memory() / MIB)}
            places["nodes"], nodes = [here], [here | {"cpus": math.inf}]
        places["does_not_fit"] = does_not_fit(places, nodes)
    return places


def _places(r: Resolved) -> dict[str, dict[str, Any]]:
    """Return the count of each kind of process and its needs except memory. Its Ray cluster must be joined."""
    places: dict[str, dict[str, Any]] = {}
    sampling, learner, device = r.options.sync, r.options.learner, r.config.device
    if isinstance(sampling, PoolOptions):
        gpus = sampling.gpus(device, r.engine) if isinstance(sampling, Ray) else 0.0
        places["samplers"] = {"count": sampling.samplers, "to_start": sampling.least}
        places["samplers"] |= {"cpus": sampling.threads, "gpus": gpus}
    if isinstance(learner, Fsdp):
        places["ranks"] = {"count": learner.ranks, "cpus": learner.threads, "gpus": learner.gpus(device)}
    return places


def require_places(r: Resolved) -> None:
    """Raise ConfigError if samplers, ranks and the learner's GPU do not fit on their Ray cluster together.

    Waits up to `FREE_S` for resources that other jobs hold.
    """
    sampling, learner = r.options.sync, r.options.learner
    on_cluster = {"sync": sampling, "learner": learner}
    on_cluster = {key: options for key, options in on_cluster.items() if isinstance(options, Ray | Fsdp)}
    if not on_cluster:
        return
    key = next(iter(on_cluster))
    try:
        cluster.join(key, on_cluster[key].ray_address, r.options.cores)
        places = _places(r)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(sampling, Ray):
        places.pop("samplers", None)
    elif sampling.min_samplers is not None:
        places["samplers"]["count"] = sampling.min_samplers
    if not isinstance(learner, Fsdp) and r.device.type == "cuda" and cluster.gpus_here():
        places["learner"] = {"count": 1, "cpus": 0, "gpus": 1}
    needs = []
    for kind, each in places.items():
        count = each["count"]
        needs.append(f"{count} {kind} need {_amounts(count * each['cpus'], count * each['gpus'])}")
    need = f"{' and '.join(on_cluster)}: {', '.join(needs)}"
    nodes = [node | {"mib": 0} for node in _nodes()]
    if does_not_fit({kind: each | {"mib": 0} for kind, each in places.items()}, nodes):
        has = "; ".join(_amounts(node["cpus"], node["gpus"]) for node in nodes) or "no nodes"
        raise ConfigError(f"{need}, and the cluster has {has}; {FEWER}")
    deadline = time.monotonic() + FREE_S
    while missing := _not_free(places):
        if time.monotonic() > deadline:
            raise ConfigError(f"{need}, but other jobs of the cluster leave {missing}; {FEWER}")
        time.sleep(0.2)


def _amounts(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPUs and {gpus:g} GPUs"


def _not_free(places: dict[str, dict[str, Any]]) -> str:
    """Return the free resources if they are not enough, else an empty text."""
    import ray

    free, short = ray.available_resources(), False
    for kind, name in (("cpus", "CPU"), ("gpus", "GPU")):
        needed = sum(each["count"] * each[kind] for each in places.values())
        short = short or needed > free.get(name, 0.0)
    return _amounts(free.get("CPU", 0.0), free.get("GPU", 0.0)) if short else ""


def _nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster."""
    nodes = []
    for node in cluster.alive_nodes():
        has = node["Resources"]
        memory = round(has.get("memory", 0.0) / MIB)
        gpus, cpus = has.get("GPU", 0.0), has.get("CPU", 0.0)
        nodes.append({"node": cluster.node_name(node), "cpus": cpus, "gpus": gpus, "mib": memory})
    return nodes


def does_not_fit(places: dict[str, dict[str, Any]], nodes: list[dict[str, Any]]) -> list[str]:
    """Place processes where most memory is left, samplers last; return a sentence for each kind that does not fit."""
    left = [dict(node) for node in nodes]
    problems = []
    for kind in ("learner", "ranks", "samplers"):
        if kind not in places:
            continue
        each, missing = places[kind], 0
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
            waits = f"; {STARTS}" if each["count"] - missing >= each.get("to_start", each["count"]) else ""
            problems.append(f"{missing} of {each['count']} {kind}: no node has {need} left for each{waits}")
    return problems
