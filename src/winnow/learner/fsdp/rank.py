"""One rank in a Ray process: joins the other ranks and runs the driver's calls."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ...base.memory import gpu_gib, resident_mib
from ...base.weights import TensorSpec
from ...engine.loading import CPU, load_whole
from ..base import Policy, Sizes
from ..context import LearnerContext
from .sharded import ShardedLearner

Built = tuple[Sizes, str, Mapping[str, TensorSpec]]
"""Sizes, precision and specs of the whole model."""


class Rank:
    """One of `world` ranks. `folder`: the driver's, so that relative paths match; `gpu`: whether Ray assigned one."""

    def __init__(self, rank: int, world: int, threads: int, folder: str, gpu: bool, private: Mapping[str, str]) -> None:
        os.environ.update(private)
        if os.path.isdir(folder):
            os.chdir(folder)
        torch.set_num_threads(threads)
        self.rank, self.world = rank, world
        self.gpu = gpu and torch.cuda.is_available()  # an unassigned GPU may belong to another rank

    def listen(self, timeout_s: float) -> tuple[str, int] | None:
        """Return the rendezvous host and port: rank 0 binds the port from the start, so no process can take it."""
        import ray

        if self.rank:
            return None
        host = ray.util.get_node_ip_address()
        limit = timedelta(seconds=timeout_s)
        self.store = dist.TCPStore(host, 0, self.world, is_master=True, timeout=limit, wait_for_workers=False)
        return host, self.store.port

    def join(self, host: str, port: int, timeout_s: float) -> None:
        backend = "nccl" if self.gpu else "gloo"
        limit = timedelta(seconds=timeout_s)
        if self.rank:
            self.store = dist.TCPStore(host, port, self.world, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world, timeout=limit)

    def build(self, policy: Policy, context: LearnerContext, fsdp_size: int | None) -> Built:
        """Shard the model."""
        device = torch.device("cuda", torch.cuda.current_device()) if self.gpu else torch.device("cpu")
        model, reference = policy.model, policy.reference
        if policy.files is None:
            model = model.to(device)
        if policy.reference_files is not None:
            reference = load_whole(policy.reference_files, CPU).requires_grad_(False).eval()
        if reference is not None:
            reference = reference.to(device)
        self.learner = learner = ShardedLearner(
            model,
            context.distribution(policy),
            context.options_for(policy),
            reference,
            fsdp_size=fsdp_size,
            gradient_baselines=context.gradient_baselines,
            device=device,
            files=policy.files,
        )
        return learner.sizes, learner.precision, learner.weights().specs

    def memory(self) -> dict[str, float]:
        return {"memory_mib": resident_mib()} | gpu_gib()

    def pulse(self) -> int:
        """Return a hash of the positions of all other threads; it changes while the rank makes progress."""
        places = []
        for thread, last in sys._current_frames().items():
            frame: FrameType | None = last
            while thread != threading.get_ident() and frame is not None:
                places.append((id(frame), frame.f_lasti))
                frame = frame.f_back
        return hash(tuple(places))

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        """Return the result of a learner method."""
        return getattr(self.learner, name)(*args, **named)
