"""Samplers as Ray actors, on this machine or others of a cluster; weights are one object that all of them read."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from ..base import cluster
from ..base.weights import HalvedWeights, RemoteWeights, WeightSource, as_bytes, from_bytes, transfer_s
from ..config import ConfigError, RunConfig
from .base import SamplerContext
from .handle import Inbox, Message
from .heartbeat import busy
from .options import PoolOptions
from .pool import SamplerPool

HEAR_S = 1.0
"""Longest wait of a sampler that is asked what it has to say."""
LOOK_S = 1.0
"""Seconds between two looks whether an answer has come: a lost node never says that it is gone."""
FETCH_S = 60.0
"""Most that an object may take to arrive, besides the time for its bytes."""
END_S = 10.0
"""Seconds that a killed actor is waited for."""


@dataclass(frozen=True)
class Ray(PoolOptions):
    """Samplers as actors of a Ray cluster, spread over its nodes."""

    provides: ClassVar[frozenset[str]] = frozenset({"beside", "own_engine"})

    ray_address: str | None = None
    """Cluster to join, e.g. `auto`; None is that of RAY_ADDRESS, or one that is started on this machine."""
    num_gpus: float | None = None
    """GPUs of each sampler; None: as many as its engine uses where the cluster has any, else 0. With 0 it samples on
    the CPU. Of CPU cores it gets `threads`."""
    min_samplers: int | None = None
    """Samplers with which the run starts; the others join when the cluster has room for them. None: all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_samplers is not None and not 0 <= self.min_samplers <= self.samplers:
            raise ValueError(f"min_samplers must be 0 to samplers={self.samplers}, not {self.min_samplers}")

    @property
    def least(self) -> int:
        return self.samplers if self.min_samplers is None else max(self.min_samplers, 1)

    def gpus(self, config: RunConfig) -> float:
        """GPUs of each sampler, on the cluster that this process has joined."""
        parts = config.engine.get("tensor_parallel_size", 1) if isinstance(config.engine, dict) else 1
        if self.num_gpus and self.num_gpus < parts:
            raise ConfigError(f"sync: num_gpus={self.num_gpus:g}: engine: tensor_parallel_size={parts} needs {parts}")
        return cluster.gpus_each(self.num_gpus, config.device, parts)

    def device_of(self, slot: int, device: str) -> str:
        """Ray shows a sampler no GPU but its own, whatever number the learner's has."""
        return device.partition(":")[0] if self.num_gpus else "cpu"

    def build(self, context: SamplerContext) -> SamplerPool:
        """Raises ConfigError when Ray is not installed, or no cluster answers."""
        c = context.config
        self.check(c.reward_timeout_s)
        try:
            cluster.join("sync", self.ray_address, [c.sync, c.learner])
            options = replace(self, num_gpus=self.gpus(c))
            held = None if context.gpu is None else cluster.hold_gpu(context.gpu)
        except cluster.ClusterError as error:
            raise ConfigError(str(error)) from None
        open_channel = partial(
            ActorChannel, options=options, private=cluster.private_environment(c.reward_env), entry=context.entry
        )
        return SamplerPool(options, context, RayWeights(), open_channel, partial(cluster.release, held))


class RayWeights:
    """The newest weights as one object of Ray's store; the reference to it travels in messages."""

    def __init__(self) -> None:
        self._reference: Any = None
        self.version = -1
        self.bytes = 0

    def write(self, weights: WeightSource, version: int) -> None:
        """Ray keeps an object until nobody has a reference: older weights until the last sampler has read them."""
        import ray

        self._reference = None  # the store may have no room for two
        size = sum(spec.bytes for spec in weights.specs.values())
        try:
            source = weights.source if isinstance(weights, HalvedWeights) else weights
            if isinstance(source, RemoteWeights):
                put = source.put(half=source is not weights)
            else:
                put = ray.put(as_bytes(weights.items()))
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise ConfigError(
                f"sync: ray: no room for the weights ({size / 2**20:,.0f} MiB) in Ray's object store, nor where it "
                f"spills to: {str(error).strip().splitlines()[0]}\nstart Ray with more (`ray start "
                "--object-store-memory=BYTES`, init's object_store_memory), or make room on that disk"
            ) from None
        self._reference, self.version, self.bytes = put, version, size

    def told(self) -> dict[str, Any]:
        return {"weights": self._reference, "version": self.version, "bytes": self.bytes}

    def remove(self) -> None:
        self._reference = None


def read_object(told: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors over the store's own memory, not to be written to."""
    import ray

    return from_bytes(ray.get(told["weights"], timeout=FETCH_S + transfer_s(told["bytes"])))


class ActorChannel:
    """One actor; what it says goes into `inbox`, its end, too. It dies with the driver.

    While the cluster has no room it is pending: an autoscaler sees its demand, and what it is asked is answered later.
    """

    def __init__(self, inbox: Inbox, options: Ray, private: Mapping[str, str], entry: str) -> None:
        self._actor = (
            remote_actor()
            .options(
                num_cpus=options.threads,
                num_gpus=options.num_gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy="SPREAD",
                runtime_env=cluster.environment(options.threads),
            )
            .remote(os.getcwd(), private, entry)
        )
        self._last_words = ""
        self._killed = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(inbox,), daemon=True)
        self._thread.start()

    def send(self, content: dict[str, Any]) -> None:
        self._actor.order.remote(content)

    def kill(self) -> str:
        import ray

        self._killed.set()
        with contextlib.suppress(Exception):  # it may be gone, and its node, too
            ray.kill(self._actor, no_restart=True)
        self._thread.join(timeout=END_S)
        return self._last_words or "it was killed"

    def _listen(self, inbox: Inbox) -> None:
        """One question at a time. A node that is lost never answers: the pool notices the silence."""
        import ray

        try:
            while True:
                asked = self._actor.report.remote()
                while not ray.wait([asked], timeout=LOOK_S)[0]:
                    if self._killed.is_set():
                        return
                for content in ray.get(asked, timeout=FETCH_S):
                    if "ended" in content:
                        self._last_words = content["ended"]
                        inbox.put(Message(self, None))
                        return
                    inbox.put(Message(self, content))
        except Exception as error:
            self._last_words = self._last_words or f"{type(error).__name__}: {error}".strip()
            inbox.put(Message(self, None))


class Actor:
    """The other end, in a process of Ray's."""

    def __init__(self, folder: str, private: Mapping[str, str], entry: str) -> None:
        os.environ.update(private)
        if os.path.isdir(folder):  # as the learner's, so that names of files mean the same
            os.chdir(folder)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reports.put({"placed": node()})
        threading.Thread(target=self._serve, args=(entry,), daemon=True).start()

    def _serve(self, entry: str) -> None:
        ended = "it was told to stop"
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
        """What there is, waiting a moment for the first."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._reports.get(timeout=HEAR_S))
            while True:
                found.append(self._reports.get_nowait())
        return found


def node() -> str:
    """The one that this process runs on."""
    import ray

    here = {"NodeManagerAddress": ray.util.get_node_ip_address(), "NodeID": ray.get_runtime_context().get_node_id()}
    return cluster.node_name(here)


def remote_actor() -> Any:
    """Orders come in the order in which they were given, also while a report is waited for."""
    import ray

    class SamplerActor(Actor):
        order = ray.method(concurrency_group="orders")(Actor.order)
        report = ray.method(concurrency_group="reports")(Actor.report)

    return ray.remote(concurrency_groups={"orders": 1, "reports": 1})(SamplerActor)
