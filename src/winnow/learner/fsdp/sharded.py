"""One rank of the learner: the one-process learner over weights that all ranks shard (FSDP2).

All ranks make every call at once, each with its own rows. A pass through the model is a collective: a rank with fewer
micro-batches makes extra passes that contribute nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial

from ...base.files import appears
from ...base.weights import (
    HalvedWeights,
    StateWeights,
    WeightSource,
    as_bytes,
    is_finite,
    require_finite,
    state_once,
    tied_names,
)
from ...engine.saving import save_whole
from ...methods.correct import Evidence
from ...methods.loss import LossConfig
from ..base import Stats
from ..batch import MicroBatch, Pools, packed
from ..local.eval_mode import without_adapter_dropout
from ..local.grad_norms import UnsupportedModelError
from ..local.learner import LearnerOptions, LocalLearner
from ..local.logprob import TokenDistribution
from ..local.optimal_baseline_update import Batched, RowByRow, exactly_batched
from ..local.optimizer import make_states, parameter_of, require_steps
from ..local.token_baselines import spread_over_several
from ..rows import Row
from .shards import load_files, load_shards, save_shards

OPTIMIZER_FOLDER = "optimizer"
SEEN_S = 10.0
"""Time that a file of another machine has to appear on a network's file system."""


class Root(nn.Module):
    """Owner of the parameters outside layers. Weights are whole only inside its forward pass; a direct call of the
    decoder would bypass it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class ShardedLearner(LocalLearner):
    """See `Learner`. `filler` may be any row; it is trained with weight 0."""

    def __init__(
        self,
        model: Any,
        distribution: TokenDistribution,
        options: LearnerOptions,
        reference: nn.Module | None = None,
        *,
        device: torch.device,
        fsdp_size: int | None = None,
        gradient_baselines: bool = False,
        files: Path | None = None,
    ) -> None:
        """Raises ValueError if this model cannot compute `gradient_baselines` (OPOB).

        `device`: this rank's. `fsdp_size`: size of the groups of ranks that shard weights; all groups are equal.
        `files`: directory of the weights if `model` has no weights yet.
        """
        self._device = device
        self._files = files
        self._world = dist.get_world_size()
        self._fsdp_size = fsdp_size or self._world
        self._gradient_baselines = gradient_baselines
        self._most = 1
        self._filler: Row
        self._failed = ""
        """Why this rank cannot continue."""
        self._fillers: list[MicroBatch] = []
        """Extra passes of this rank in the current step, to match the other ranks."""
        self._kept: dict[nn.Parameter, torch.Tensor] = {}
        """Whole gradients of this rank's rows, when baselines depend on gradients."""
        super().__init__(model, distribution, options, reference)

    @property
    def device(self) -> torch.device:
        return self._device

    def _place(self) -> None:
        if self._gradient_baselines:
            self._try_gradient_baselines()
        groups = (self._world // self._fsdp_size, self._fsdp_size)
        mesh = init_device_mesh(self.device.type, groups, mesh_dim_names=("replicate", "shard"))
        cut: dict[str, Any] = {"mesh": mesh if groups[0] > 1 else mesh["shard"], "reshard_after_forward": True}
        # Layers are gathered in their compute dtype; tensors between them keep the autocast dtypes.
        under = self.options.compute_dtype
        half = MixedPrecisionPolicy(under, torch.float32, cast_forward_inputs=False)
        kinds = set(getattr(self._causal_lm, "_no_split_modules", None) or ())
        for module in list(self._causal_lm.modules()):
            if type(module).__name__ in kinds:
                fully_shard(module, **(cut if under == torch.float32 else cut | {"mp_policy": half}))
        # Shard the root too: otherwise it would keep whole weights after an update.
        self._root = Root(self.model)
        fully_shard(self._root, **cut)
        if self._files is not None:
            self._read(self._files)

    def _read(self, files: Path) -> None:
        """Allocate memory for this rank's shards and read them."""
        tied = tied_names(self.model)
        self._root._apply(lambda t: torch.empty_like(t, device=self.device) if t.is_meta else t)
        for name, first in tied.items():  # tied parameters were allocated separately
            module, _, parameter = name.rpartition(".")
            setattr(self.model.get_submodule(module), parameter, self.model.get_parameter(first))
        own = state_once(self._causal_lm)
        state = {name.replace(".base_layer.", "."): own[name] for name in own if ".lora_" not in name}
        load_files(state, files)
        for name, tensor in state.items():
            if not is_finite(tensor.to_local() if isinstance(tensor, DTensor) else tensor):
                raise ValueError(f"model: the weights of '{files}' are not finite ({name})")

    def _try_gradient_baselines(self) -> None:
        """Try gradient baselines before sharding: after it, each row's backward pass would be one more collective."""
        why = ""
        if self.options.gradient_checkpointing:
            why = "with gradient_checkpointing"
        elif not self._own_head:
            why = "with a head of another kind"
        else:
            params = [p for p in self.model.parameters() if p.requires_grad]
            row_by_row = RowByRow(params, super()._logp)
            try:
                with without_adapter_dropout(self.model):
                    exactly_batched(self._causal_lm, row_by_row, self.distribution, self._autocast)
            except UnsupportedModelError as error:
                why = f"for {type(self._causal_lm).__name__}: {error}"
        if why:
            raise ValueError(f"learner: fsdp cannot find the baselines of opob {why}; use learner: local")

    @cached_property
    def _batched(self) -> Batched:
        return Batched(self._causal_lm, self.distribution, self._autocast, self._root, self._keep)

    def _strategy(self, pools: Pools) -> Batched:
        return self._batched  # each row's backward pass would be a collective

    def _keep(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self._kept[parameter] = self._kept[parameter].add_(gradient) if parameter in self._kept else gradient

    # ---- passes that all ranks make ----------------------------------------------------------------------------

    def accumulate_part(self, rows: Sequence[Row], filler: Row, loss: LossConfig, iteration: int, seed: int) -> Stats:
        """Run `accumulate` on this rank's rows. Results are on the host: the driver may have no GPU."""
        torch.manual_seed(seed + dist.get_rank())
        self._filler = replace(filler, weight=0.0)
        self._failed = ""
        stats = self.accumulate(rows, loss, iteration)
        for batch in self._fillers:
            self.forward_backward(batch, loss, Stats())
        if filler.pool is not None and filler.pool.weighing == "gradient":
            self._deal_gradients()
        return stats.on_host()

    def _cut(self, rows: Sequence[Row]) -> list[MicroBatch]:
        batches = super()._cut(rows)
        self._most, missing = self._missing(len(batches))
        self._fillers = [batch for _ in range(missing) for batch in super(ShardedLearner, self)._cut([self._filler])]
        return batches

    def _missing(self, mine: int) -> tuple[int, int]:
        """Return the maximum number of passes over all ranks, and how many fewer this rank makes."""
        most = torch.tensor(mine, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most), int(most) - mine

    def _ahead(self, loss: LossConfig) -> LossConfig:
        """Make all ranks' passes over pools that span micro-batches first, so that collectives match."""
        loss = super()._ahead(loss)
        _, missing = self._missing(len(spread_over_several(self._batches)))
        with self._kernels():
            self._token_baselines.ahead(self._batches, loss)
        for _ in range(missing):
            self.batch_logp((self._batches or self._fillers)[0])
        return loss

    def forward_backward(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> None:
        if batch.pools is None or batch.pools.weighing != "gradient":
            super().forward_backward(batch, loss, stats)
            return
        try:
            super().forward_backward(batch, loss, stats)
        except FloatingPointError as error:  # the other ranks continue
            self._failed = str(error)

    def _deal_gradients(self) -> None:
        """Give each rank its shard of the gradient summed over ranks. If one rank must stop, all stop."""
        kept, self._kept = self._kept, {}
        self._all_or_none(self._failed)
        for p in self._params.values():
            mine = kept.pop(p, None)
            whole = torch.zeros(p.shape, dtype=p.dtype, device=self.device) if mine is None else mine.to(p.dtype)
            assert isinstance(p, DTensor)
            cut = DTensor.from_local(whole, p.device_mesh, [Partial()] * p.device_mesh.ndim).redistribute(
                placements=p.placements
            )
            p.grad = cut if p.grad is None else p.grad + cut

    def _all_or_none(self, why: str) -> None:
        """Raise FloatingPointError on all ranks if one has a reason. Call it on all ranks."""
        failed = torch.tensor(float(bool(why)), device=self.device)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:
            reasons = [""] * self._world
            dist.all_gather_object(reasons, why)
            raise FloatingPointError("; ".join(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why))

    def _passes(self) -> int:
        """Return the passes; with several ranks at least `world`, since no rank has all rows."""
        return max(self._most, self._world)

    def _evidence(self, loss: LossConfig, batches: Sequence[MicroBatch]) -> list[Evidence]:
        """Return the evidence of every rank's micro-batches; fillers only match passes and add no evidence."""
        mine = super()._evidence(loss, [*batches, *self._fillers])[: len(batches)]
        by_rank: list[list[Evidence]] = [[] for _ in range(self._world)]
        dist.all_gather_object(by_rank, mine)
        return [evidence for parts in by_rank for evidence in parts]

    def logp_part(self, rows: Sequence[Row], filler: Row, *, raw: bool, reference: bool) -> list[torch.Tensor]:
        """Run `logp` or `reference_logp` on this rank's rows; the results are on the host."""
        _, missing = self._missing(len(packed(rows, self._limits)))
        compute = self.reference_logp if reference else partial(self.logp, raw=raw)
        logps = compute(rows)
        for _ in range(missing):
            compute([filler])
        return [logp_A.cpu() for logp_A in logps]

    def _logp(self, batch: MicroBatch, *, model: Any = None, **options: bool) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        compute = partial(super()._logp, batch, model=model, **options)
        of_tokens: tuple[torch.Tensor, ...] = compute() if model is not None else self._root(compute)
        return of_tokens  # a reference, `model`, is whole

    def _backward(self, total: torch.Tensor) -> None:
        """Multiply the loss by `world`: ranks average gradients, but the loss is a sum. If one stops, all stop."""
        self._all_or_none("" if torch.isfinite(total) else f"the loss is {total.item()}; no update was made")
        (total * self._world).backward()

    def _clipped(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._params.values(), self.options.max_grad_norm or math.inf)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def spent(self) -> dict[str, float]:
        """Return this rank's seconds since the last call."""
        return self.seconds.take()

    # ---- whole tensors -----------------------------------------------------------------------------------------

    def gather(self) -> dict[str, torch.Tensor]:
        """Return the weights as engines load them; empty except on rank 0. FloatingPointError if not finite."""
        return _finite(self.weights())

    def put(self, half: bool) -> list[Any]:
        """Return the weights in Ray's store: a reference in a list, which Ray keeps. `half`: see `HalvedWeights`."""
        import ray

        weights = StateWeights(self.gather())
        return [ray.put(as_bytes((HalvedWeights(weights) if half else weights).items()))] if weights.specs else []

    def save(self, directory: Path) -> list[str]:  # type: ignore[override]
        """Write the model from rank 0, and the optimizer's shards from every rank; return the files, as seen here."""
        weights = _whole(self.model.state_dict().items())
        first = dist.get_rank() == 0
        if first:
            self._save_trained(directory / "model", weights)
            self._save_reference(directory)
        save_shards(self._optimizer_state(), directory / OPTIMIZER_FOLDER)
        return _files(directory, "**/*" if first else f"{OPTIMIZER_FOLDER}/*")

    def export(self, directory: Path) -> list[str]:  # type: ignore[override]
        """Write the model from rank 0; return its files."""
        weights = _finite(self._merged_weights())
        if dist.get_rank() != 0:
            return []
        save_whole(self._causal_lm, directory, weights, self.options.save_types)
        return _files(directory, "*")

    def sees(self, file: Path) -> bool:
        """Return whether a file that the driver has written is there."""
        return appears(file, SEEN_S)

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}:{key}": value
            for name, param in self._params.items()
            for key, value in self.optimizer.state.get(param, {}).items()
        }

    def load(self, directory: Path) -> None:
        """Load the optimizer's state, saved by any number of ranks; weights come with the model."""
        folder = directory / OPTIMIZER_FOLDER
        if not folder.is_dir():
            raise ValueError(f"{folder}: is missing; the checkpoint was not written by learner: fsdp")
        make_states(self.optimizer, self._params)
        loaded = load_shards(self._optimizer_state(), folder)
        require_steps(loaded, str(folder))
        known = {parameter_of(key) for key in loaded}
        for name in self._params.keys() - known:  # these had no gradient yet
            self.optimizer.state.pop(self._params[name], None)
        self._load_reference(directory)


def _files(directory: Path, pattern: str) -> list[str]:
    return sorted(str(file.relative_to(directory)) for file in directory.glob(pattern) if file.is_file())


def _finite(weights: WeightSource) -> dict[str, torch.Tensor]:
    whole = _whole(weights.items())
    for name, tensor in whole.items():
        require_finite(name, tensor)
    return whole


def _whole(tensors: Any) -> dict[str, torch.Tensor]:
    """Return whole tensors on rank 0, gathered one at a time; empty on other ranks."""
    state = {}
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            state[name] = whole.detach().cpu()
    return state
