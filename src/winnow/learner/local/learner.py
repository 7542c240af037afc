"""The learner of one process: a Hugging Face causal LM, AdamW, full fine-tuning or LoRA."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...methods.loss import LossConfig, kl_loss, policy_loss
from ..base import Stats
from ..batch import MicroBatch
from .forward import Body, can_share_prompts, head_is_linear, predictions
from .logprob import TokenDistribution, token_logp
from .modes import checkpoint_layers, train_adapter_dropout
from .pooled import PooledGradients, RowByRow, batched_if_exact
from .terms import book, correction_weights, spread
from .token_baselines import TokenBaselines

OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True)
class LearnerOptions:
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """None: no clipping."""
    compute_dtype: torch.dtype = torch.float32
    """bfloat16: forward and backward under autocast; weights and optimizer stay float32."""
    matmul_precision: str = "highest"
    """float32 matrix products of the update; `medium` uses bfloat16 units (AMX, tensor cores) where there are any."""
    gradient_checkpointing: bool = False


class LocalLearner:
    """See `Learner`. `model` is a Hugging Face causal LM, possibly wrapped by peft; it is trained in place.

    It stays in eval mode (see `modes`): the policy that is trained must be the one that sampled.
    """

    def __init__(
        self,
        model: Any,
        distribution: TokenDistribution,
        options: LearnerOptions,
        reference: torch.nn.Module | None = None,
    ) -> None:
        self.model = model
        self.distribution = distribution
        self.options = options
        self.reference = reference
        self._causal_lm: Any = model.get_base_model() if hasattr(model, "peft_config") else model
        model.eval()
        self._own_head = head_is_linear(self._causal_lm, distribution.n_tokens)
        self._share_prompts = not options.gradient_checkpointing and can_share_prompts(
            self._causal_lm, self._body(self._causal_lm), distribution.n_tokens
        )
        if options.gradient_checkpointing:
            checkpoint_layers(self._causal_lm)
        train_adapter_dropout(model)
        self._params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._params.values(),
            lr=0.0,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    @cached_property
    def _pooled(self) -> PooledGradients:
        row_by_row = RowByRow(list(self._params.values()), self._logp)
        if self.options.gradient_checkpointing or not self._own_head:
            return row_by_row
        self.model.eval()  # without the dropout of adapters, which would make the trial another draw
        try:
            return batched_if_exact(self._causal_lm, row_by_row, self.distribution, self._autocast)
        finally:
            train_adapter_dropout(self.model)

    @cached_property
    def _token_baselines(self) -> TokenBaselines:
        return TokenBaselines(self._logp)

    def forward_backward(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> None:
        with self._kernels():
            if batch.pools is not None and batch.pools.weighing == "gradient":
                self._pooled.add(batch, loss, stats)
                return
            total = self._loss(batch, loss, stats)
            if not torch.isfinite(total):
                raise FloatingPointError(f"the loss is {total.item()}; no update was made")
            total.backward()

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """The matrix precision of the update. Below the highest, a CPU's fused attention is slower than plain."""
        previous, precision = torch.get_float32_matmul_precision(), self.options.matmul_precision
        plain_attention = precision != "highest" and next(iter(self._params.values())).device.type == "cpu"
        torch.set_float32_matmul_precision(precision)
        try:
            with sdpa_kernel(SDPBackend.MATH) if plain_attention else nullcontext():
                yield
        finally:
            torch.set_float32_matmul_precision(previous)

    def _loss(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> torch.Tensor:
        """Sum over tokens of every term, weighted by `row_weight_B`; positions are shifted: column t predicts t + 1."""
        mask = batch.mask_BT[:, 1:]
        logp, entropy, squares = self._logp(
            batch, with_entropy_grad=loss.entropy_coef != 0, squares=batch.pools is not None
        )
        weights, old_logp = correction_weights(batch, loss, logp, stats)
        advantages = batch.advantages_B[:, None]
        if batch.pools is not None:
            baselines = self._token_baselines(batch, loss, logp, squares, weights)
            advantages = advantages - baselines
            stats.baselines.append(baselines[mask])
        advantages, row_weight_B = advantages.to(logp.dtype), batch.row_weight_B.to(logp.dtype)
        per_token, clipped = policy_loss(logp, old_logp, advantages, weights, mask, loss)
        if loss.beta:
            kl = kl_loss(logp, self._under_reference(batch), old_logp, weights, mask, loss)
            per_token = per_token + loss.beta * kl
            stats.add("kl", float((kl.detach() * mask).sum()))
        if loss.entropy_coef:
            per_token = per_token - loss.entropy_coef * entropy
        total = (per_token * mask * row_weight_B[:, None]).sum()

        positive = advantages > 0
        low, high = (clipped & mask & ~positive).sum(), (clipped & mask & positive).sum()
        book(stats, batch, logp, entropy, loss=total.detach(), clip_low=low, clip_high=high)
        return total

    @torch.no_grad()
    def logp(self, batch: MicroBatch) -> torch.Tensor:
        with self._kernels():
            return self._logp(batch)[0]

    def _logp(
        self, batch: MicroBatch, *, with_entropy_grad: bool = False, squares: bool = False, model: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `of_tokens` gives, [B, T-1], 0 off the mask; float32, or float64 for a float64 model."""
        model = model or self._causal_lm
        mask, targets = batch.mask_BT[:, 1:], batch.input_ids_BT[:, 1:]
        with self._autocast():
            states_NH = predictions(self._body(model), batch, share=self._share_prompts)
            head = model.get_output_embeddings() if self._own_head else _identity
            logp_N, entropy_N, squares_N = token_logp(
                states_NH, head, targets[mask], self.distribution, squares=squares
            )
        entropy_N = entropy_N if with_entropy_grad else entropy_N.detach()
        logp, entropy, squared = (spread(mask, values) for values in (logp_N, entropy_N, squares_N))
        return logp, entropy, squared

    def _body(self, model: Any) -> Body:
        """Hidden states, or logits for classes that do more to them than multiply by the head."""
        if self._own_head:
            return lambda **inputs: model.get_decoder()(**inputs).last_hidden_state
        return lambda **inputs: model(**inputs).logits

    @torch.no_grad()
    def reference_logp(self, batch: MicroBatch) -> torch.Tensor:
        with self._kernels():
            return self._under_reference(batch)

    @torch.no_grad()
    def _under_reference(self, batch: MicroBatch) -> torch.Tensor:
        if self.reference is not None:
            return self._logp(batch, model=self.reference)[0]
        if not hasattr(self.model, "disable_adapter"):
            raise ValueError("beta > 0 needs a reference model")
        with self.model.disable_adapter():
            return self._logp(batch)[0]

    def _autocast(self) -> Any:
        if self.options.compute_dtype == torch.float32:
            return nullcontext()
        device = next(iter(self._causal_lm.parameters())).device
        return torch.autocast(device.type, dtype=self.options.compute_dtype)

    def apply(self, lr: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._params.values(), self.options.max_grad_norm or math.inf)
        if not torch.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the gradient norm is {norm.item()}; the weights were left as they were")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    @torch.no_grad()
    def weights(self) -> Mapping[str, torch.Tensor]:
        if self._causal_lm is self.model:
            return self.model.state_dict()
        return merged_state(self._causal_lm)

    def save(self, directory: Path) -> None:
        self.model.save_pretrained(directory / "model")
        state = {}
        for name, param in self._params.items():
            for key, value in self._optimizer.state.get(param, {}).items():
                state[f"{name}:{key}"] = value.detach().contiguous()
        save_file(state, directory / OPTIMIZER_FILE)

    def save_merged(self, directory: Path) -> None:
        """Write the policy as one ordinary Hugging Face model directory, adapters merged."""
        self._causal_lm.save_pretrained(directory, state_dict=dict(self.weights()))

    def load_optimizer(self, directory: Path) -> None:
        """Raises ValueError when the file's parameters are not this model's."""
        state = load_file(directory / OPTIMIZER_FILE)
        names = {name.rpartition(":")[0] for name in state}
        if names and names != set(self._params):
            different = sorted(names ^ set(self._params))[:3]
            raise ValueError(f"{directory / OPTIMIZER_FILE}: not the optimizer of this model; differs in {different}")
        for name, value in state.items():
            param_name, _, key = name.rpartition(":")
            param = self._params[param_name]
            self._optimizer.state[param][key] = value.to(param.device) if value.ndim else value


def _identity(logits: torch.Tensor) -> torch.Tensor:
    return logits


def merged_state(causal_lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """State dict of a model with LoRA layers injected, under the names of the model without them; W + delta merged.

    The layers are not touched (merging and un-merging in place would drift).
    """
    state = {}
    deltas = {
        f"{name}.weight": module.get_delta_weight("default")
        for name, module in causal_lm.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    for name, value in causal_lm.state_dict().items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        state[plain] = value + deltas[plain] if plain in deltas else value
    return state


def frozen_copy(model: torch.nn.Module) -> torch.nn.Module:
    """The reference for a KL penalty under full fine-tuning."""
    return copy.deepcopy(model).requires_grad_(False).eval()
