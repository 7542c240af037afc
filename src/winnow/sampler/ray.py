"""Samplers as Ray actors, on this machine or others of a cluster; weights are one object that all of them read."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import threading
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass

from ..base import cluster
from ..base.errors import ConfigError
from ..base.machine import MIB
from ..base.weights import HalvedWeights, RemoteWeights, WeightSource, as_bytes, from_bytes, transfer_s
from ..config.options import CHECKED
from .base import PoolOptions, SamplerContext, busy
from .handle import Inbox, Message
from .pool import SamplerPool
from .weights import Transport

HEAR_S = 1.0
"""Longest wait of an actor for something to report."""
LOOK_S = 1.0
"""Seconds between two checks for an answer: a lost node never reports its end."""
FETCH_S = 60.0
"""Timeout for an object to arrive, on top of the time for its bytes."""
END_S = 10.0
"""Longest wait for a killed actor."""


@pydantic_dataclass(frozen=True, config=CHECKED)
class Ray(PoolOptions):
    """Samplers as actors of a Ray cluster, spread over its nodes."""

    provides: ClassVar[frozenset[str]] = frozenset({"asynchronous", "own_engine"})
    unplaced: ClassVar[str] = "free resources of the cluster (see `ray status`), or add nodes"

    ray_address: str | None = None
    """Cluster to join, e.g. `auto`; None: that of RAY_ADDRESS, else one started on this machine."""
    num_gpus: float | None = None
    """GPUs of each sampler; None: as many as its engine uses if the cluster has any, else 0. With 0 it samples on the
    CPU. Each sampler gets `threads` CPU cores."""
    min_samplers: int | None = None
    """Samplers required at the start; the others join when the cluster has room. None: all."""

    def __post_init__(self) -> None:
        if self.min_samplers is not None and not 0 <= self.min_samplers <= self.samplers:
            raise ValueError(f"min_samplers must be 0 to samplers={self.samplers}, not {self.min_samplers}")

    @property
    def least(self) -> int:
        return self.samplers if self.min_samplers is None else max(self.min_samplers, 1)

    def gpus(self, device: str, engine: Any) -> float:
        """Return the GPUs of each sampler of a run on `device`, on the cluster this process has joined."""
        parts = getattr(engine, "tensor_parallel_size", 1)
        if self.num_gpus and self.num_gpus < parts:
            raise ConfigError(
                f"sync: num_gpus: too few for engine: tensor_parallel_size ({self.num_gpus:g} of {parts}); "
                f"set num_gpus: {parts}"
            )
        return cluster.gpus_each(self.num_gpus, device, parts)

    def device_of(self, slot: int, device: str) -> str:
        """Return the device type: Ray shows a sampler only its own GPUs, whatever the learner's number."""
        return device.partition(":")[0] if self.num_gpus else "cpu"

    def build(self, context: SamplerContext) -> SamplerPool:
        """Build the pool. Raises ConfigError when Ray is not installed, or no cluster answers."""
        try:
            cluster.join("sync", self.ray_address, context.cores)
            options = replace(self, num_gpus=self.gpus(context.device, context.engine))
            held = None if context.gpu is None else cluster.hold_gpu(context.gpu)
        except cluster.ClusterError as error:
            raise ConfigError(str(error)) from None
        open_channel = partial(
            ActorChannel, options=options, private=cluster.private_environment(context.reward_env), entry=context.entry
        )
        return SamplerPool(options, context, RayWeights(), open_channel, partial(cluster.release, held))


class RayWeights(Transport):
    """Newest weights as one object in Ray's store; messages carry a reference to it."""

    def write(self, weights: WeightSource, version: int) -> None:
        """Store the weights. Ray keeps older ones until the last sampler has read them."""
        import ray

        self.located = None  # the store may have no room for two
        size = sum(spec.bytes for spec in weights.specs.values())
        try:
            source = weights.source if isinstance(weights, HalvedWeights) else weights
            if isinstance(source, RemoteWeights):
                put = source.put(half=source is not weights)
            else:
                put = ray.put(as_bytes(weights.items()))
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise ConfigError(
                f"sync: ray: the weights ({size / MIB:,.0f} MiB) fit neither into Ray's object store nor where it "
                f"spills to: {str(error).strip().splitlines()[0]}; start Ray with more (`ray start "
                "--object-store-memory=BYTES`, init's object_store_memory), or free that disk"
            ) from None
        self.located, self.version, self.bytes = put, version, size

    def remove(self) -> None:
        self.located = None


def read_object(message: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors over the store's own memory; never write to them."""
    import ray

    return from_bytes(ray.get(message["weights"], timeout=FETCH_S + transfer_s(message["bytes"])))


class ActorChannel:
    """Channel to one actor: its messages and its end go into `inbox`. It ends with the driver.

    While the cluster has no room it is pending: an autoscaler sees its demand, and calls are answered later.
    """

    def __init__(self, inbox: Inbox, options: Ray, private: Mapping[str, str], entry: str) -> None:
        import ray

        placed = cluster.actor_options(options.threads, options.num_gpus, "SPREAD")
        actor = ray.remote(concurrency_groups={"orders": 1, "reports": 1})(SamplerActor).options(**placed)
        self._actor = actor.remote(os.getcwd(), private, entry)
        self._last_words = ""
        self._killed = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(inbox,), daemon=True)
        self._thread.start()

    def send(self, content: dict[str, Any]) -> None:
        self._actor.order.options(concurrency_group="orders").remote(content)

    def kill(self) -> str:
        import ray

        self._killed.set()
        with contextlib.suppress(Exception):  # actor or node may be gone
            ray.kill(self._actor, no_restart=True)
        self._thread.join(timeout=END_S)
        return self._last_words or "it was killed"

    def _listen(self, inbox: Inbox) -> None:
        """Read the actor's reports, one at a time. A lost node never answers: the pool detects the silence."""
        import ray

        try:
            while True:
                report = self._actor.report.options(concurrency_group="reports").remote()
                while not ray.wait([report], timeout=LOOK_S)[0]:
                    if self._killed.is_set():
                        return
                for content in ray.get(report, timeout=FETCH_S):
                    if "ended" in content:
                        self._last_words = content["ended"]
                        inbox.put(Message(self, None))
                        return
                    inbox.put(Message(self, content))
        except Exception as error:
            self._last_words = self._last_words or f"{type(error).__name__}: {error}".strip()
            inbox.put(Message(self, None))


class SamplerActor:
    """Sampler end of the channel, in a Ray process. Orders keep their sequence, also while a report is awaited."""

    def __init__(self, folder: str, private: Mapping[str, str], entry: str) -> None:
        os.environ.update(private)
        if os.path.isdir(folder):  # the learner's, so that relative paths resolve alike
            os.chdir(folder)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        import ray

        here = {"NodeManagerAddress": ray.util.get_node_ip_address(), "NodeID": ray.get_runtime_context().get_node_id()}
        self._reports.put({"placed": cluster.node_name(here)})
        threading.Thread(target=self._serve, args=(entry,), daemon=True).start()

    def _serve(self, entry: str) -> None:
        ended = "it was stopped"
        try:
            with busy(self._reports.put):
                module = importlib.import_module(entry)
            module.serve(self._orders, self._reports.put, read_object)
        except BaseException:
            ended = traceback.format_exc()[-2000:]
        self._reports.put({"ended": ended})

    def order(self, content: dict[str, Any]) -> None:
        self._orders.put(content)

    def report(self) -> list[dict[str, Any]]:
        """Return pending messages, waiting a moment for the first."""
        messages = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._reports.get(timeout=HEAR_S))
            while True:
                messages.append(self._reports.get_nowait())
        return messages
