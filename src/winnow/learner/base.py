"""The learner protocol: gradients, an optimizer step, weights to publish."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..base.weights import WeightSource
from ..engine.facts import n_tokens
from ..methods.loss import LossConfig
from ..types import Rollout
from .batch import Row

OF_ROWS = ("log_w_B", "log_ratio_N", "baselines", "row_norm_B")
"""Fields of `Stats` that are lists of tensors."""


@dataclass
class Stats:
    """Sums over action tokens of one or more micro-batches; divide by `tokens` for means."""

    sums: dict[str, float] = field(default_factory=dict)
    log_w_B: list[torch.Tensor] = field(default_factory=list)
    """Log importance ratio (learner over sampler) of every row, [B] per micro-batch."""
    log_ratio_N: list[torch.Tensor] = field(default_factory=list)
    """Log-ratios of every action token, [N] per micro-batch."""
    baselines: list[torch.Tensor] = field(default_factory=list)
    """Baselines that the update has found, of pools or of tokens."""
    row_norm_B: list[torch.Tensor] = field(default_factory=list)
    """Gradient norm of every row at an advantage of 1, where baselines depend on it."""

    def add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def on_host(self) -> Stats:
        """The same with its tensors copied to the host."""
        found = Stats(dict(self.sums))
        for name in OF_ROWS:
            getattr(found, name).extend(tensor.cpu() for tensor in getattr(self, name))
        return found

    def mean(self, name: str, of: str = "tokens") -> float:
        return self.sums.get(name, 0.0) / max(self.sums.get(of, 0.0), 1.0)


class LearnerLostError(RuntimeError):
    """A rank of the learner has died, fallen silent or failed; the others cannot go on without it."""


@dataclass(frozen=True)
class Sizes:
    """The policy in numbers."""

    total: int
    """Parameters."""
    trained: int
    """Parameters that are trained."""
    vocab_size: int
    """Ids that can be sampled, as `Policy.n_tokens`."""
    max_length: int | None
    """Most tokens of a sequence; None without a limit."""

    @classmethod
    def of(cls, model: torch.nn.Module, trained: Iterable[torch.nn.Parameter], vocab_size: int) -> Sizes:
        """Of a Hugging Face model, wrapped by peft or not."""
        config: Any = model.config
        return cls(
            sum(p.numel() for p in model.parameters()),
            sum(p.numel() for p in trained),
            vocab_size,
            getattr(config.get_text_config(), "max_position_embeddings", None),
        )

    def require_fit(self, rollout: Rollout) -> None:
        """Raises ValueError for a rollout that this policy cannot have sampled, as one from a file may be."""
        ids = (*rollout.prompt_ids, *rollout.token_ids.tolist())
        if (wrong := next((i for i in ids if not 0 <= i < self.vocab_size), None)) is not None:
            raise ValueError(f"a rollout has the token {wrong}, which is outside the vocabulary of {self.vocab_size}")
        if self.max_length is not None and len(ids) > self.max_length:
            raise ValueError(f"a rollout has {len(ids)} tokens, more than the model's {self.max_length} positions")


class Learner(Protocol):
    """The policy and its optimizer, on one device or many. Nobody outside touches the model itself.

    On several ranks every rank makes the same calls with the same rows; cutting them into micro-batches is the
    learner's own business, so that ranks can agree on it.
    """

    @property
    def device(self) -> torch.device:
        """Device on which results of this process lie."""
        ...

    @property
    def sizes(self) -> Sizes: ...

    @property
    def precision(self) -> str:
        """Coarsest type of the forward pass: `float32`, `tfloat32`, `bfloat16` or `float16`."""
        ...

    def accumulate(self, rows: Sequence[Row], loss: LossConfig, iteration: int = 0) -> Stats:
        """Accumulate the gradients of the loss summed over `rows`.

        `iteration`: counts updates on the same rows, from 0; importance ratios refer to the policy before number 0.
        Raises FloatingPointError when the loss is not finite.
        """
        ...

    def logp(self, rows: Sequence[Row], *, raw: bool = False) -> list[torch.Tensor]:
        """Log-probabilities [A] of the A action tokens of each row, without gradients or dropout.

        `raw`: before temperature, top-k and top-p.
        """
        ...

    def reference_logp(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Log-probabilities under the reference model. Raises ValueError without one."""
        ...

    def sync_reference(self, alpha: float) -> None:
        """Mix the policy into the reference: (1 - alpha) reference + alpha policy. Raises ValueError without one."""
        ...

    def apply(self, lr: float) -> float:
        """Clip, step the optimizer at this learning rate, clear gradients; returns the norm before clipping.

        Raises FloatingPointError, leaving the weights as they were, when the norm is not finite.
        """
        ...

    def weights(self) -> WeightSource:
        """Weights as engines load them."""
        ...

    def metrics(self) -> dict[str, float]:
        """Figures of now that are not of an update."""
        ...

    def save(self, directory: Path) -> None:
        """Write what a resume needs: trained weights (a Hugging Face or PEFT directory `model`), optimizer."""
        ...

    def load(self, directory: Path) -> None:
        """Load what `save` has written. Raises ValueError when it is another model's."""
        ...

    def export(self, directory: Path) -> None:
        """Write the policy as one ordinary Hugging Face model directory, adapters merged."""
        ...

    def close(self) -> None:
        """End what was started elsewhere."""
        ...


@dataclass
class Policy:
    """The model that is trained, what it speaks, and what a KL penalty holds it to."""

    model: torch.nn.Module
    """Wrapped by peft under LoRA."""
    tokenizer: Any
    reference: torch.nn.Module | None
    origin: str = ""
    """Digest of the weights that adapters or a KL penalty refer to; they are not in the checkpoint."""
    files: Path | None = None
    """Directory that ranks read the weights from: `model` has none but adapters. None: `model` has them."""
    reference_files: Path | None = None
    """That of the reference, where `reference` is left to the ranks."""

    @property
    def n_tokens(self) -> int:
        """Ids that can be sampled, as engines count them."""
        return n_tokens(self.model, self.tokenizer)
