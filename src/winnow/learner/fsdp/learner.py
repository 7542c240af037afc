"""The multi-rank learner on the driver: distributes rows to ranks and combines their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...base import cluster
from ...base.errors import ConfigError
from ...base.files import appears
from ...base.weights import TensorSpec
from ...methods.loss import LossConfig
from ...types import Rollout
from ..base import OF_ROWS, LearnerLostError, Policy, Sizes, Stats, update_metrics
from ..context import LearnerContext
from ..local.optimizer import WHOLE
from ..rows import Row, rollouts_of
from .ranks import Ranks
from .sharded import SEEN_S

SHARED = (
    "all machines with ranks must have that directory in common; `winnow cluster check --shared DIRECTORY` tries one"
)


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
        if context.options.torch_compile:
            raise ValueError("learner: fsdp does not compile its layers; set torch_compile: false, or learner: local")
        optim = context.options.optim
        if optim not in WHOLE:
            raise ValueError(
                f"learner: fsdp has no optim: {optim}: its ranks cut AdamW's states among them; set optim: "
                "adamw_torch_fused, or learner: local"
            )
        cluster.join("learner", self.ray_address, self.ranks * self.threads)
        private = cluster.private_environment(context.reward_env)
        size = sum(p.numel() * p.element_size() for p in policy.model.parameters())
        try:
            ranks = Ranks(self.ranks, self.threads, self.gpus(context.device), self.timeout_s, size, private)
            try:
                built = ranks.build(policy, context, self.fsdp_size)
                return FsdpLearner(ranks, *built, read=policy.files is not None)
            except BaseException:
                ranks.close()
                raise
        except LearnerLostError as error:
            raise ValueError(str(error)) from None


class FsdpLearner:
    """See `Learner`. Keeps siblings on one rank."""

    device = torch.device("cpu")

    def __init__(
        self, ranks: Ranks, sizes: Sizes, precision: str, specs: Mapping[str, TensorSpec], *, read: bool
    ) -> None:
        self.sizes, self.precision = sizes, precision
        self.read = read
        """Whether ranks read their shards from files, so that none holds the whole model."""
        self._ranks = ranks
        self._specs = specs
        self._parts: list[list[Row]] = []
        """Rows of each rank in the current step."""

    def accumulate(self, rows: Sequence[Row], loss: LossConfig, iteration: int = 0) -> Stats:
        if iteration == 0:
            self._parts = deal(rows, self._ranks.world)
        seed = torch.initial_seed()
        calls = [([bare(row) for row in part], bare(rows[0]), loss, iteration, seed) for part in self._parts]
        return together(self._ranks.each("accumulate_part", calls))

    def logp(self, rows: Sequence[Row], *, raw: bool = False) -> list[torch.Tensor]:
        return self._logp(rows, raw=raw, reference=False)

    def reference_logp(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        return self._logp(rows, raw=False, reference=True)

    def _logp(self, rows: Sequence[Row], **named: bool) -> list[torch.Tensor]:
        if not rows:
            return []
        parts = deal(rows, self._ranks.world)
        calls = [([bare(row) for row in part], bare(rows[0])) for part in parts]
        by_row: dict[int, torch.Tensor] = {}
        for part, logps in zip(parts, self._ranks.each("logp_part", calls, **named), strict=True):
            by_row |= {id(row): logp for row, logp in zip(part, logps, strict=True)}
        return [by_row[id(row)] for row in rows]

    def apply(self, lr: float) -> float:
        return float(self._ranks.same("apply", lr)[0])

    def sync_reference(self, alpha: float) -> None:
        self._ranks.same("sync_reference", alpha)

    def weights(self) -> GatheredWeights:
        return GatheredWeights(self._specs, self._ranks)

    def metrics(self) -> dict[str, float]:
        """Return each rank's memory, and its peak GPU memory; seconds of rank 0."""
        ranks = self._ranks.all("memory", [()] * self._ranks.world)
        memory = {f"rank/{rank}/{name}": value for rank, held in enumerate(ranks) for name, value in held.items()}
        return memory | update_metrics(self._ranks.same("spent")[0])

    def save(self, directory: Path) -> None:
        self._require_here(self._ranks.same("save", directory.absolute()), directory)

    def load(self, directory: Path) -> None:
        self._ranks.same("load", directory.absolute())

    def export(self, directory: Path) -> None:
        self._require_here(self._ranks.same("export", directory.absolute()), directory)

    def require_shared(self, file: Path) -> None:
        """Raise ConfigError unless all ranks see a file of the run's directory, where they will write."""
        for rank, seen in enumerate(self._ranks.same("sees", file.absolute())):
            if not seen:
                raise ConfigError(f"output_dir: rank {rank} does not see {file.parent}; {SHARED}")

    def _require_here(self, written: Sequence[Sequence[str]], directory: Path) -> None:
        """Raise ConfigError if a file that a rank has written is not on this machine."""
        for rank, files in enumerate(written):
            for name in files:
                if not appears(directory / name, SEEN_S):
                    raise ConfigError(f"output_dir: what rank {rank} wrote, {name}, is not in {directory}; {SHARED}")

    def close(self) -> None:
        self._ranks.close()


class GatheredWeights:
    """Weights gathered from all ranks on request; see `RemoteWeights`."""

    def __init__(self, specs: Mapping[str, TensorSpec], ranks: Ranks) -> None:
        self.specs = specs
        self._ranks = ranks

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.state_dict().items()

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        whole: Mapping[str, torch.Tensor] = self._ranks.same("gather")[0]
        return whole

    def put(self, *, half: bool = False) -> Any:
        return self._ranks.same("put", half)[0][0]


def deal(rows: Sequence[Row], world: int) -> list[list[Row]]:
    """Return the rows of each rank, whole groups each: the longest group first, to the rank with the fewest tokens."""
    groups: dict[Any, list[Row]] = {}
    for of_one in rollouts_of(rows):
        groups.setdefault(of_one[0].pool or of_one[0].rollout.prompt_ids, []).extend(of_one)
    parts: list[list[Row]] = [[] for _ in range(world)]
    tokens = [0] * world
    for group in sorted(groups.values(), key=lambda some: sum(row.length for row in some), reverse=True):
        least = tokens.index(min(tokens))
        parts[least] += group
        tokens[least] += sum(row.length for row in group)
    return parts


def bare(row: Row) -> Row:
    """Return the row with only the fields an update reads, without hidden states, decisions and costs."""
    r = row.rollout
    return replace(
        row, rollout=Rollout(r.sibling, r.prompt_ids, r.token_ids, r.action_mask, r.sampler_logp, r.versions)
    )


def together(parts: Sequence[Stats]) -> Stats:
    """Return the sums and rows of all ranks combined."""
    whole = Stats()
    for part in parts:
        for name, value in part.sums.items():
            whole.add(name, value)
        for name in OF_ROWS:
            getattr(whole, name).extend(getattr(part, name))
    return whole
