"""The learner protocol: compute gradients, step the optimizer, publish weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..base.errors import ExpectedError
from ..base.weights import WeightSource
from ..engine.facts import n_tokens
from ..methods.loss import LossConfig
from ..types import Rollout
from .rows import Row

OF_ROWS = ("log_w_B", "log_ratio_N", "baselines", "row_norm_B")
"""Fields of `Stats` that are lists of tensors."""


@dataclass
class Stats:
    """Sums over the action tokens of one or more micro-batches; divide by `tokens` for means."""

    booked: dict[str, float] = field(default_factory=dict)
    """Sums so far, without those that are still on a device."""
    log_w_B: list[torch.Tensor] = field(default_factory=list)
    """Log importance ratio (learner over sampler) of each row, [B] per micro-batch."""
    log_ratio_N: list[torch.Tensor] = field(default_factory=list)
    """Log-ratio of each action token, [N] per micro-batch."""
    baselines: list[torch.Tensor] = field(default_factory=list)
    """Baselines that the update computed, per pool or per token."""
    row_norm_B: list[torch.Tensor] = field(default_factory=list)
    """Gradient norm of each row at an advantage of 1, where baselines depend on it."""
    _on_device: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Values still to add, as 0-dimensional tensors."""

    def add(self, name: str, value: float | torch.Tensor) -> None:
        """Add to a sum. A tensor is fetched when the sums are read, so that passes need not wait for the device."""
        if isinstance(value, torch.Tensor):
            self._on_device.append((name, value.detach()))
        else:
            self.booked[name] = self.booked.get(name, 0.0) + value

    @property
    def sums(self) -> dict[str, float]:
        """All sums, by name. Fetches what is still on the device, in one transfer."""
        if self._on_device:
            names, values = zip(*self._on_device, strict=True)
            self._on_device = []
            for name, value in zip(names, torch.stack([x.double() for x in values]).tolist(), strict=True):
                self.add(name, value)
        return self.booked

    def on_host(self) -> Stats:
        """Return a copy with all tensors on the host."""
        return Stats(dict(self.sums), **{name: [tensor.cpu() for tensor in getattr(self, name)] for name in OF_ROWS})

    def mean(self, name: str, of: str = "tokens") -> float:
        return self.sums.get(name, 0.0) / max(self.sums.get(of, 0.0), 1.0)


UPDATE_SECONDS = ("pack", "forward_backward", "optimizer")
"""What a learner spends the seconds of an update on."""


def update_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by `UPDATE_SECONDS` as metrics."""
    return {f"seconds/update/{name}": value for name, value in seconds.items()}


class LearnerLostError(ExpectedError):
    """A learner rank exited, hung or failed; the other ranks cannot continue without it."""


@dataclass(frozen=True)
class Sizes:
    """Size and limits of the policy."""

    total: int
    """Parameters."""
    trained: int
    vocab_size: int
    """Ids that can be sampled, as in `Policy.n_tokens`."""
    max_length: int | None
    """Maximum tokens per sequence; None: unlimited."""

    @classmethod
    def from_model(cls, model: torch.nn.Module, trained: Iterable[torch.nn.Parameter], vocab_size: int) -> Sizes:
        """Return the sizes of a Hugging Face model, with or without a peft wrapper."""
        config: Any = model.config
        return cls(
            sum(p.numel() for p in model.parameters()),
            sum(p.numel() for p in trained),
            vocab_size,
            getattr(config.get_text_config(), "max_position_embeddings", None),
        )

    def require_fit(self, rollout: Rollout) -> None:
        """Raise ValueError for a rollout that this policy cannot have sampled, e.g. one read from a file."""
        for part in rollout.parts():
            ids = (*part.prompt_ids, *part.token_ids.tolist())
            if (wrong := next((i for i in ids if not 0 <= i < self.vocab_size), None)) is not None:
                raise ValueError(
                    f"a rollout has the token {wrong}, which is outside the vocabulary of {self.vocab_size}"
                )
            if self.max_length is not None and len(ids) > self.max_length:
                raise ValueError(f"a rollout has {len(ids)} tokens, more than the model's {self.max_length} positions")


class Learner(Protocol):
    """The policy and its optimizer, on one or more devices. No other part changes the model.

    With several ranks, every rank gets the same calls with the same rows. The learner splits rows into micro-batches,
    so that ranks can agree on the split.
    """

    @property
    def device(self) -> torch.device:
        """Device of the results that this process returns."""
        ...

    @property
    def sizes(self) -> Sizes:
        """Size and limits of the policy."""
        ...

    @property
    def precision(self) -> str:
        """Coarsest dtype of the forward pass: `float32`, `tfloat32`, `bfloat16` or `float16`."""
        ...

    def accumulate(self, rows: Sequence[Row], loss: LossConfig, iteration: int = 0) -> Stats:
        """Accumulate the gradients of the loss summed over `rows`.

        `iteration` counts updates on the same rows, from 0; importance ratios refer to the policy before update 0.
        Raises FloatingPointError when the loss is not finite.
        """
        ...

    def logp(self, rows: Sequence[Row], *, raw: bool = False) -> list[torch.Tensor]:
        """Return the log-probabilities [A] of each row's A action tokens, without gradients or dropout.

        `raw`: before temperature, top-k and top-p.
        """
        ...

    def reference_logp(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return log-probabilities under the reference model. Raises ValueError without one."""
        ...

    def sync_reference(self, alpha: float) -> None:
        """Set reference = (1 - alpha) reference + alpha policy. Raises ValueError without a reference."""
        ...

    def apply(self, lr: float) -> float:
        """Clip, step the optimizer at this learning rate and clear gradients; return the norm before clipping.

        Raises FloatingPointError when the norm is not finite; the weights are then unchanged.
        """
        ...

    def weights(self) -> WeightSource:
        """Return the weights as engines load them."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics that do not belong to an update, e.g. memory."""
        ...

    def save(self, directory: Path) -> None:
        """Write the state for a resume: trained weights (a Hugging Face or PEFT directory `model`) and optimizer."""
        ...

    def load(self, directory: Path) -> None:
        """Load a directory written by `save`. Raises ValueError when it belongs to another model."""
        ...

    def export(self, directory: Path) -> None:
        """Write the policy as one ordinary Hugging Face model directory, adapters merged."""
        ...

    def close(self) -> None:
        """Stop the processes that the learner started."""
        ...


@dataclass
class Policy:
    """The trained model, its tokenizer, and the reference model of a KL penalty."""

    model: torch.nn.Module
    """Wrapped by peft under LoRA."""
    tokenizer: Any
    reference: torch.nn.Module | None
    origin: str = ""
    """Digest of the base weights that adapters or a KL penalty refer to; checkpoints do not contain them."""
    files: Path | None = None
    """Directory from which ranks read weights; `model` then has only adapters. None: `model` has all weights."""
    reference_files: Path | None = None
    """The same for the reference, when ranks load `reference` themselves."""

    @property
    def n_tokens(self) -> int:
        """Number of ids that can be sampled, as engines count them."""
        return n_tokens(self.model, self.tokenizer)
