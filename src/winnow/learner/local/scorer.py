"""Log-probabilities of rows under a Hugging Face causal LM: the half of a learner that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...engine.loading import prepare_cuda
from ...engine.saving import Types
from ...engine.skeleton import for_trials
from ..batch import MicroBatch, PassLimits, packed
from ..rows import Row
from .eval_mode import WideAttention, without_adapter_dropout
from .forward import Body, can_share, head_is_linear, predictions
from .logprob import TokenDistribution, token_logp


@dataclass(frozen=True)
class LearnerOptions:
    optim: str = "adamw_torch_fused"
    optim_args: Mapping[str, Any] = field(default_factory=dict)
    """Optimizer arguments without a key of their own."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """None: no clipping."""
    compute_dtype: torch.dtype = torch.float32
    """bfloat16, float16: forward and backward under autocast; weights and optimizer stay float32."""
    matmul_precision: str = "highest"
    """Precision of the update's float32 products; `medium` uses bfloat16 units (AMX, tensor cores) if available."""
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    """See `compiled`."""
    deterministic: bool = False
    """On a GPU: use only kernels with a fixed order of additions."""
    tokens_per_microbatch: int = 16_384
    """Padded tokens of one forward and backward pass; a longer row runs alone."""
    pad_id: int = 0
    merge_adapters: bool = True
    """Publish whole weights under LoRA too; otherwise only adapters."""
    save_types: Types = field(default_factory=dict)
    """Dtypes of an exported model; empty: those of the learner."""


class Scorer:
    """A model that scores rows. `model`: a Hugging Face causal LM, possibly wrapped by peft; it is put in eval mode."""

    def __init__(self, model: Any, distribution: TokenDistribution, options: LearnerOptions) -> None:
        self.model = model
        self.distribution = distribution
        self.options = options
        self._causal_lm: Any = model.get_base_model() if hasattr(model, "peft_config") else model
        model.eval()
        if self.device.type == "cuda":
            prepare_cuda(deterministic=options.deterministic)
        tried, n_tokens = for_trials(self._causal_lm, distribution.n_tokens, self.device)
        self._own_head = head_is_linear(tried, n_tokens)
        self._share = can_share(tried, self._body(tried), n_tokens)
        parameters, device = sum(p.numel() for p in model.parameters()), self.device.type
        self._by_blocks = False
        """Whether attention of prefix trees skips what a token does not see."""
        self._limits = PassLimits.for_model(options.tokens_per_microbatch, parameters, share=self._share, device=device)

    @property
    def device(self) -> torch.device:
        return next(self._causal_lm.parameters()).device

    @torch.no_grad()
    def batch_logp(self, batch: MicroBatch) -> torch.Tensor:
        """Return log-probabilities of the tokens after the first, [B, T-1], 0 outside the mask."""
        with self._kernels():
            return self._logp(batch)[0]

    def logp(self, rows: Sequence[Row], *, raw: bool = False) -> list[torch.Tensor]:
        used = self.distribution
        self.distribution = TokenDistribution(used.n_tokens) if raw else used
        try:
            with without_adapter_dropout(self.model):
                return self._of_rows(rows, self.batch_logp)
        finally:
            self.distribution = used

    def _of_rows(self, rows: Sequence[Row], logp: Callable[[MicroBatch], torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of `logp`, [B, T-1], at the action tokens of each row."""
        by_row: dict[int, torch.Tensor] = {}
        for packing in packed(rows, self._limits):
            batch = packing.micro_batch(self.options.pad_id, self.device)
            logp_BT, mask_BT = logp(batch), batch.mask_BT[:, 1:]
            for row, logp_T, mask_T in zip(packing.rows, logp_BT, mask_BT, strict=True):
                by_row[id(row)] = logp_T[mask_T]
        return [by_row[id(row)] for row in rows]

    def _logp(
        self, batch: MicroBatch, *, with_entropy_grad: bool = False, squares: bool = False, model: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `of_tokens` as [B, T-1], 0 outside the mask; float32, or float64 for a float64 model."""
        model = model or self._causal_lm
        targets_N = batch.sampled(batch.input_ids_BT[:, 1:])
        with self._autocast():
            wide = self.options.compute_dtype == torch.float32
            dtype = model.dtype if wide else self.options.compute_dtype
            states_PH, state_N = predictions(self._body(model), batch, dtype, by_blocks=self._by_blocks)
            head = model.get_output_embeddings() if self._own_head else torch.nn.Identity()
            context = self.distribution.context(batch.input_ids_BT, batch.mask_BT)
            logp_N, entropy_N, squares_N = token_logp(
                states_PH,
                head,
                targets_N,
                self.distribution,
                context,
                state_N=state_N,
                squares=squares,
                fused=self.options.torch_compile,
            )
        entropy_N = entropy_N if with_entropy_grad else entropy_N.detach()
        logp, entropy, squared = (batch.spread(values) for values in (logp_N, entropy_N, squares_N))
        return logp, entropy, squared

    def _body(self, model: Any) -> Body:
        """Return the forward to hidden states, or to logits if the class does more than multiply by the head."""
        if self._own_head:
            return lambda **inputs: model.get_decoder()(**inputs).last_hidden_state
        return lambda **inputs: model(**inputs).logits

    def _autocast(self) -> Any:
        if self.options.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.options.compute_dtype)

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Set matmul precision and CPU attention: below the highest precision, fused attention is slower than plain."""
        previous, precision = torch.get_float32_matmul_precision(), self.options.matmul_precision
        on_cpu, o = self.device.type == "cpu", self.options
        # It does not apply in backward passes, so recomputed layers would miss it.
        wide = on_cpu and o.compute_dtype == torch.bfloat16 and not o.gradient_checkpointing
        torch.set_float32_matmul_precision(precision)
        try:
            with (
                sdpa_kernel(SDPBackend.MATH) if on_cpu and precision != "highest" else nullcontext(),
                WideAttention() if wide else nullcontext(),
            ):
                yield
        finally:
            torch.set_float32_matmul_precision(previous)
