"""The multi-rank learner on the driver: distributes rows to ranks and combines their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...base.weights import TensorSpec
from ...methods.loss import LossConfig
from ...types import Rollout
from ..base import OF_ROWS, Sizes, Stats
from ..rows import Row, rollouts_of
from .ranks import Ranks


class FsdpLearner:
    """See `Learner`. Keeps siblings on one rank."""

    device = torch.device("cpu")

    def __init__(self, ranks: Ranks, sizes: Sizes, precision: str, specs: Mapping[str, TensorSpec]) -> None:
        self.sizes, self.precision = sizes, precision
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
        found = self._ranks.each("logp_part", [([bare(row) for row in part], bare(rows[0])) for part in parts], **named)
        dealt = [row for part in parts for row in part]
        by_row = {id(row): logp for row, logp in zip(dealt, [logp for some in found for logp in some], strict=True)}
        return [by_row[id(row)] for row in rows]

    def apply(self, lr: float) -> float:
        return float(self._ranks.same("apply", lr)[0])

    def sync_reference(self, alpha: float) -> None:
        self._ranks.same("sync_reference", alpha)

    def weights(self) -> GatheredWeights:
        return GatheredWeights(self._specs, partial(self._ranks.same, "gather"), partial(self._ranks.same, "put"))

    def metrics(self) -> dict[str, float]:
        """Return each rank's memory, and its peak GPU memory."""
        ranks = self._ranks.all("memory", [()] * self._ranks.world)
        return {f"rank/{rank}/{name}": value for rank, held in enumerate(ranks) for name, value in held.items()}

    def save(self, directory: Path) -> None:
        self._ranks.same("save", directory.absolute())

    def load(self, directory: Path) -> None:
        self._ranks.same("load", directory.absolute())

    def export(self, directory: Path) -> None:
        self._ranks.same("export", directory.absolute())

    def close(self) -> None:
        self._ranks.close()


class GatheredWeights:
    """Weights gathered from all ranks on request; see `RemoteWeights`."""

    def __init__(
        self, specs: Mapping[str, TensorSpec], gather: Callable[[], list[Any]], put: Callable[[bool], list[Any]]
    ) -> None:
        self.specs = specs
        self._gather, self._put = gather, put

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.state_dict().items()

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        found: Mapping[str, torch.Tensor] = self._gather()[0]
        return found

    def put(self, *, half: bool = False) -> Any:
        return self._put(half)[0][0]


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
