"""The one-process learner: a Hugging Face causal LM and its optimizer, full fine-tuning or LoRA."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ...base.failpoint import failpoint
from ...base.machine import gpu_memory_since, keep_freed_memory
from ...base.seconds import Seconds
from ...base.weights import StateWeights, WeightSource, adapters_of, save_tensors, state_once
from ...engine.loading import resolve_device
from ...engine.saving import save_whole
from ...methods.correct import Evidence, OverBatch
from ...methods.loss import LossConfig, Sampled, kl_loss
from ..base import UPDATE_SECONDS, Policy, Sizes, Stats, update_metrics
from ..batch import MicroBatch, Pools, micro_batches
from ..context import LearnerContext
from ..rows import Row
from .compiled import attend_by_blocks, compile_layers
from .eval_mode import checkpoint_layers, halve_frozen, train_adapter_dropout, without_adapter_dropout
from .grad_norms import UnsupportedModelError
from .logprob import TokenDistribution
from .loss_scale import LossScale
from .merged import MergedWeights
from .optimal_baseline_update import Batched, RowByRow, alone_is_faster, exactly_batched
from .optimizer import load_state, make_optimizer, saved_state, set_learning_rate
from .recompute import recomputing
from .reference import load_reference, mix, save_reference
from .scorer import LearnerOptions as LearnerOptions
from .scorer import Scorer
from .token_baselines import TokenBaselines
from .update_stats import book, correction_weights, evidence

OPTIMIZER_FILE = "optimizer.safetensors"
FILE_BYTES = 4 << 30
"""Maximum bytes of a checkpoint's model file when it comes from a GPU."""


class LocalLearner(Scorer):
    """See `Learner`. `model` is a Hugging Face causal LM, possibly wrapped by peft; it is trained in place.

    It stays in eval mode (see `eval_mode`): the trained policy must be the one that sampled.
    """

    def __init__(
        self,
        model: Any,
        distribution: TokenDistribution,
        options: LearnerOptions,
        reference: torch.nn.Module | None = None,
    ) -> None:
        super().__init__(model, distribution, options)
        self.reference = reference
        self._reference_moved = False
        saves = options.gradient_checkpointing or options.torch_compile  # compiled layers recompute of their own
        self._recomputing = None if saves else recomputing(self._causal_lm)
        if options.torch_compile:
            self._compile()
        if options.gradient_checkpointing:
            checkpoint_layers(self._causal_lm)
        train_adapter_dropout(model)
        self._place()
        self._params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._scale = LossScale() if options.compute_dtype == torch.float16 else None
        self.seconds = Seconds(*UPDATE_SECONDS)
        self._batches: list[MicroBatch] = []
        """Micro-batches of the current step; later iterations use values stored by the first."""
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        self.optimizer = make_optimizer(
            options.optim,
            self._params,
            ends=[end.weight for end in ends if end is not None],
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            weight_decay=options.weight_decay,
            args=options.optim_args,
        )
        """The optimizer, as callbacks get it."""

    def _compile(self) -> None:
        models = [self._causal_lm] if self.reference is None else [self._causal_lm, self.reference]
        for model in models:
            compile_layers(model)
        self._by_blocks = self._share and all(attend_by_blocks(model) for model in models)
        if self._by_blocks:  # lanes as wide as a pass: a token attends to its own rows, whatever else is in the lane
            self._limits = replace(self._limits, pairs=math.inf)

    def _place(self) -> None:
        """Hook for sharding weights over ranks; called once, before the optimizer is made."""

    @property
    def sizes(self) -> Sizes:
        return Sizes.from_model(self.model, self._params.values(), self.distribution.n_tokens)

    @property
    def precision(self) -> str:
        if self.options.compute_dtype == torch.float32 and self.options.matmul_precision != "highest":
            return "bfloat16" if self.options.matmul_precision == "medium" else "tfloat32"
        return str(self.options.compute_dtype).removeprefix("torch.")

    @cached_property
    def _row_by_row(self) -> RowByRow:
        return RowByRow(list(self._params.values()), self._logp)

    @cached_property
    def _batched(self) -> Batched | None:
        if self.options.gradient_checkpointing or not self._own_head:
            return None
        try:
            with without_adapter_dropout(self.model):
                return exactly_batched(self._causal_lm, self._row_by_row, self.distribution, self._autocast)
        except UnsupportedModelError as error:
            warnings.warn(
                f"{type(self._causal_lm).__name__}: the gradients of rollouts are computed one rollout at a time, "
                f"which may take twice as long as all at once: {error}",
                stacklevel=2,
            )
            return None

    @cached_property
    def _token_baselines(self) -> TokenBaselines:
        return TokenBaselines(self._logp)

    def accumulate(self, rows: Sequence[Row], loss: LossConfig, iteration: int = 0) -> Stats:
        if iteration == 0:
            with self.seconds.phase("pack"):
                self._batches = self._cut(rows)
        with self.seconds.phase("forward_backward"):
            loss = self._ahead(loss)
            while True:
                stats = Stats()
                for batch in self._batches:
                    self.forward_backward(batch, loss, stats)
                    failpoint("gradient")
                self._require_finite(stats)
                if self._scale is None or self._scale.fits(self._params.values()):
                    return stats

    def _cut(self, rows: Sequence[Row]) -> list[MicroBatch]:
        return micro_batches(rows, self._limits, pad_id=self.options.pad_id, device=self.device)

    def _ahead(self, loss: LossConfig) -> LossConfig:
        """Return the loss; a correction over the batch first sees all micro-batches, in one more forward pass."""
        correction = loss.correction
        if self._passes() == 1 or not isinstance(correction, OverBatch):
            return loss
        return replace(loss, correction=correction.over_batch(self._evidence(loss, self._batches)))

    def _passes(self) -> int:
        """Return the forward and backward passes of this step, on the rank with the most."""
        return len(self._batches)

    def _evidence(self, loss: LossConfig, batches: Sequence[MicroBatch]) -> list[Evidence]:
        """Return the correction's evidence for each micro-batch."""
        parts = []
        for batch in batches:
            logp = batch.old_logp_BT
            if logp is None or not loss.ratio_to_learner:
                logp = self.batch_logp(batch)
            parts.append(evidence(batch, logp))
        return parts

    def forward_backward(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> None:
        """Accumulate the gradients of one micro-batch, times the loss scale under float16."""
        with torch.enable_grad(), self._kernels():  # a user's module may have switched it off for the thread
            if batch.pools is not None and batch.pools.weighing == "gradient":
                self._strategy(batch.pools).add(batch, loss, stats)
                return
            with nullcontext() if self._recomputing is None else self._recomputing.forward():
                total = self._loss(batch, loss, stats)
            self._backward(total)

    def _require_finite(self, stats: Stats) -> None:
        """Raise FloatingPointError when the loss of all micro-batches is not finite. Only here the host waits."""
        loss = stats.sums.get("loss", 0.0)
        if not math.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the loss is {loss}; no update was made")

    def _strategy(self, pools: Pools) -> RowByRow | Batched:
        """Return how to compute the gradients of a block whose baselines depend on them."""
        return self._row_by_row if self._batched is None or alone_is_faster(pools) else self._batched

    def _backward(self, total: torch.Tensor) -> None:
        (total if self._scale is None else total * self._scale.factor).backward()

    def _loss(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> torch.Tensor:
        """Return all loss terms summed over tokens, weighted by `row_weight_B`. Shifted: column t predicts t + 1."""
        mask = batch.mask_BT[:, 1:]
        logp, entropy, squares = self._logp(
            batch, with_entropy_grad=loss.entropy_coef != 0, squares=batch.pools is not None
        )
        weights, old_logp = correction_weights(batch, loss, logp, stats)
        advantages = loss.reward_weight * batch.advantages_B[:, None]
        if batch.pools is not None:
            baselines = self._token_baselines(batch, loss, logp, squares, weights)
            advantages = advantages - baselines
            stats.baselines.append(batch.sampled(baselines))
        if batch.teacher_logp_BT is not None:
            log_ratio = batch.teacher_logp_BT[:, 1:] - logp.detach()
            advantages = advantages + loss.teacher_weight * log_ratio
            stats.add("teacher_kl", -(log_ratio * mask).sum())
        advantages, row_weight_B = advantages.to(logp.dtype), batch.row_weight_B.to(logp.dtype)
        sampled = Sampled(logp, old_logp, advantages, weights, mask, batch.rollout_B)
        per_token, clipped = loss.policy_loss(sampled)
        if loss.beta:
            kl = kl_loss(sampled, self._under_reference(batch), loss)
            per_token = per_token + loss.beta * kl
            stats.add("kl", (kl.detach() * mask).sum())
        if loss.entropy_coef:
            per_token = per_token - loss.entropy_coef * entropy
        total = (per_token * mask * row_weight_B[:, None]).sum()
        low, high = ((clipped & mask & side).sum() for side in (advantages <= 0, advantages > 0))
        book(stats, batch, logp, entropy, loss=total.detach(), clip_low=low, clip_high=high)
        return total

    @torch.no_grad()
    def reference_logp(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        with self._kernels():
            return self._of_rows(rows, self._under_reference)

    def sync_reference(self, alpha: float) -> None:
        if self.reference is None:
            raise ValueError("there is no reference model to sync; set beta, without lora")
        mix(self.reference, self.model, alpha)
        self._reference_moved = True

    @torch.no_grad()
    def _under_reference(self, batch: MicroBatch) -> torch.Tensor:
        if self.reference is not None:
            return self._logp(batch, model=self.reference)[0]
        if not hasattr(self.model, "disable_adapter"):
            raise ValueError("there is no reference model; set beta or reference_kl_steps")
        with self.model.disable_adapter():
            return self._logp(batch)[0]

    def apply(self, lr: float) -> float:
        with self.seconds.phase("optimizer"):
            norm = self._clipped()
            if not math.isfinite(norm):
                self.optimizer.zero_grad(set_to_none=True)
                raise FloatingPointError(f"the gradient norm is {norm}; the weights were left as they were")
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return norm

    def close(self) -> None: ...

    def _clipped(self) -> float:
        """Clip all gradients; return their norm before clipping. Those within the limit are not written again."""
        total = torch.nn.utils.get_total_norm([p.grad for p in self._params.values() if p.grad is not None])
        norm, limit = float(total), self.options.max_grad_norm
        if limit is not None and math.isfinite(norm) and limit < 1.0001 * (norm + 1e-6):  # it scales by 1 at most
            torch.nn.utils.clip_grads_with_norm_(self._params.values(), limit, total)
        return norm

    def weights(self) -> WeightSource:
        return self._merged_weights() if self.options.merge_adapters else StateWeights(adapters_of(self._causal_lm))

    def _merged_weights(self) -> WeightSource:
        if self._causal_lm is self.model:
            return StateWeights(state_once(self.model))
        return MergedWeights(self._causal_lm)

    def metrics(self) -> dict[str, float]:
        """Return GPU memory of this process, GiB: current, and peak since the last call; and the seconds since then."""
        return gpu_memory_since(self.device) | update_metrics(self.seconds.take())

    def save(self, directory: Path) -> None:
        self._save_trained(directory / "model")
        save_tensors(saved_state(self.optimizer, self._params), directory / OPTIMIZER_FILE)
        self._save_reference(directory)

    def _save_trained(self, directory: Path, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the model. Adapters here have no embeddings; peft's default would ask the hub for the base's size."""
        own: dict[str, Any] = {"save_embedding_layers": False}
        if self._causal_lm is self.model:  # transformers copies each file from the GPU before writing
            own = {"max_shard_size": FILE_BYTES} if self.device.type == "cuda" else {}
        self.model.save_pretrained(directory, state_dict=state, **own)

    def _save_reference(self, directory: Path) -> None:
        """Write the reference if it has moved; checkpoints do not contain the initial model."""
        if self.reference is not None and self._reference_moved:
            save_reference(self.reference, directory)

    def export(self, directory: Path) -> None:
        save_whole(self._causal_lm, directory, self._merged_weights().state_dict(), self.options.save_types)

    def load(self, directory: Path) -> None:
        """Load the optimizer's state, and a reference that has moved; weights come with the model.

        Raises ValueError when a file's parameters are not this model's.
        """
        file = directory / OPTIMIZER_FILE
        load_state(self.optimizer, self._params, load_file(file), str(file))
        self._load_reference(directory)

    def _load_reference(self, directory: Path) -> None:
        self._reference_moved = self.reference is not None and load_reference(self.reference, directory)


@dataclass(frozen=True)
class Local:
    """One process and one device: a Hugging Face causal LM, full fine-tuning or LoRA."""

    def build(self, policy: Policy, context: LearnerContext) -> LocalLearner:
        device, dtype = resolve_device(context.device), context.options.compute_dtype
        if dtype == torch.float16 and device.type != "cuda":
            raise ValueError(
                f"dtype: float16 needs a CUDA device, and this run uses {device.type}; set dtype: bfloat16 or float32"
            )
        if context.options.torch_compile and (context.gradient_baselines or context.options.deterministic):
            other = "advantage: opob" if context.gradient_baselines else "deterministic: true"
            raise ValueError(f"torch_compile: does not work with {other}; set it to false")
        models = [model for model in (policy.model, policy.reference) if model is not None]
        if context.lora and dtype == torch.bfloat16 and device.type == "cuda":
            halve_frozen(*models)
        for model in models:
            model.to(device)
        if device.type == "cpu":
            keep_freed_memory()
        return LocalLearner(policy.model, context.distribution(policy), context.options_for(policy), policy.reference)
