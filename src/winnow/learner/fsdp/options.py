"""Options of the multi-rank learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...base import cluster
from ..base import LearnerLostError, Policy
from ..context import LearnerContext
from ..local.optimizer import WHOLE
from .learner import FsdpLearner


@dataclass(frozen=True)
class Fsdp:
    """Several ranks as Ray actors that shard weights and optimizer (FSDP2); full fine-tuning or LoRA."""

    provides: ClassVar[frozenset[str]] = frozenset({"elastic", "own_devices"})
    """Options may change on a resume: they select where the learner runs, not the update. Its devices are not this
    process's."""

    ranks: int = 2
    fsdp_size: int | None = None
    """Ranks per sharding group; each group holds all weights (HSDP). None: all ranks."""
    threads: int = 1
    """Threads, and CPU cores, of each rank."""
    num_gpus: float | None = None
    """GPUs of each rank: 1 uses NCCL; 0 computes on the CPU with gloo. None: 1 if the cluster has GPUs."""
    timeout_s: float = 600.0
    """Seconds without a response before a rank counts as lost; a call may take longer."""
    ray_address: str | None = None
    """Cluster to join, e.g. `auto`. None: the one in RAY_ADDRESS, or a new one on this machine."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.threads < 1:
            raise ValueError("ranks and threads must be at least 1")
        if self.fsdp_size is not None and (self.fsdp_size < 1 or self.ranks % self.fsdp_size):
            raise ValueError(f"fsdp_size must divide ranks={self.ranks}, not {self.fsdp_size}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be > 0, not {self.timeout_s}")
        if self.num_gpus not in (None, 0, 1):
            raise ValueError(f"num_gpus must be 0 or 1, not {self.num_gpus:g}: NCCL needs one GPU for each rank")

    def gpus(self, device: str) -> float:
        """Return the GPUs of each rank of a run on `device`, on the cluster that this process has joined."""
        if self.num_gpus == 0 and device.startswith("cuda"):
            raise ValueError(f"learner: num_gpus=0: ranks without a GPU cannot use device: {device}; set cpu")
        return cluster.gpus_each(self.num_gpus, device)

    def build(self, policy: Policy, context: LearnerContext) -> FsdpLearner:
        """Build the learner. Raises ValueError if ranks cannot train this, or do not fit the cluster."""
        if context.options.compute_dtype == torch.float16:
            raise ValueError("learner: fsdp has no loss scale for dtype: float16; set dtype: bfloat16 or float32")
        if context.options.optim not in WHOLE:
            raise ValueError(
                f"learner: fsdp has no optim: {context.options.optim}: its ranks cut AdamW's states among them; set "
                "optim: adamw_torch_fused, or learner: local"
            )
        from .ranks import Ranks  # torch.distributed takes a while to import

        cluster.join("learner", self.ray_address, self.ranks * self.threads)
        private = cluster.private_environment(context.reward_env)
        size = sum(p.numel() * p.element_size() for p in policy.model.parameters())
        try:
            ranks = Ranks(self.ranks, self.threads, self.gpus(context.device), self.timeout_s, size, private)
            try:
                return FsdpLearner(ranks, *ranks.build(policy, context, self.fsdp_size))
            except BaseException:
                ranks.close()
                raise
        except LearnerLostError as error:
            raise ValueError(str(error)) from None
