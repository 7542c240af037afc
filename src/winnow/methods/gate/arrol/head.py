"""A small network that predicts success in the middle of an answer, from the policy's hidden state (ARRoL).

Input: the last hidden state at the detection token, and the mean log-probability of the tokens so far. No gradient
flows back into the policy. The paper's head uses the hidden state alone. On small models the log-probability predicts
better than the hidden state, and both together predict best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import PositiveFloat
from safetensors import SafetensorError, safe_open

from ....base.array_json import Packed, pack, unpack
from ....base.noise import noise_key
from ....base.state import Count, Loose, State, at
from ....types import Rollout
from ..base import Array
from .calibration import FLOATS, TRUTHS, Columns, Window

if TYPE_CHECKING:
    import torch
    from torch import nn

HEAD_STREAM = 6
"""Separates its draws from other noise."""
FILE = "gate/quality_head.safetensors"
"""In a folder of its own: engines load every such file next to a model's weights."""
WIDTH, LEARNING_RATE = 128, 1e-3
UPDATES, BATCH = 4, 256
"""Gradient steps after an optimizer step of the policy, and examples per gradient step."""
MAX_EXAMPLES, MAX_RECENT = 2048, 512
MAX_CHANGE = 1e17
"""Bound of a hidden state's values: the sum of a million squares still fits float32."""


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a head for scoring; without layers it has learned nothing and scores everything 0."""

    layers: list[Array] = field(default_factory=list)
    """float32: weights [W, H + 1] and [1, W] of the two layers, each followed by its biases [W] and [1]."""
    moments: tuple[float, float] = (0.0, 1.0)
    """Mean and standard deviation of the log-probabilities, fixed at the last fit."""

    def score(self, hidden: np.ndarray, logp: float) -> float:
        """Return the logit of success, for float32 [H] and the mean log-probability.

        NaN for inputs that are not finite; 0 before anything was learned.
        """
        return float(self.scores(hidden[None], np.array([logp]))[0])

    def scores(self, hidden_NH: np.ndarray, logp_N: np.ndarray) -> np.ndarray:
        """Return `score` of many, float [N]; bit-identical to scoring each alone."""
        score_N = np.where(_normalisable(hidden_NH), 0.0, np.nan)
        if self.layers:
            finite_N = score_N == 0
            # matrix products round differently with the number of rows; a vector times a matrix does not
            score_N[finite_N] = self.logits(hidden_NH[finite_N, None], logp_N[finite_N, None])[:, 0]
        return score_N

    def logits(self, hidden_NH: np.ndarray, logp_N: np.ndarray) -> np.ndarray:
        """Return [..., N] for [..., N, H] and [..., N]."""
        first, bias, second, last = self.layers
        hidden_NH, z_N = inputs_of(hidden_NH, logp_N, self.moments)
        inner = hidden_NH @ first[:, :-1].T
        inner += z_N[..., None] * first[:, -1]
        inner += bias
        return np.asarray(np.maximum(inner, 0, out=inner) @ second[0] + last[0])

    def save(self, directory: Path) -> None:
        """Write `FILE`; nothing before anything was learned."""
        import torch
        from safetensors.torch import save_file

        if self.layers:
            tensors = {name: torch.from_numpy(layer) for name, layer in zip(_NAMES, self.layers, strict=True)}
            (directory / FILE).parent.mkdir(exist_ok=True)
            save_file(tensors | {"moments": torch.tensor(self.moments, dtype=torch.float64)}, directory / FILE)

    @classmethod
    def load(cls, path: Path) -> HeadWeights:
        """Return the head of a file or a directory. Raises ValueError when it holds no head."""
        file = path / FILE if path.is_dir() else path
        try:
            with safe_open(str(file), "numpy") as tensors:
                layers = [tensors.get_tensor(name) for name in _NAMES]
                mean, deviation = map(float, tensors.get_tensor("moments").tolist())
            width, size = layers[0].shape
            if [layer.shape for layer in layers] != [(width, size), (width,), (1, width), (1,)] or size < 2:
                raise ValueError("its layers do not fit together")
            if not (all(np.isfinite(layer).all() for layer in layers) and np.isfinite(mean) and 0 < deviation < np.inf):
                raise ValueError("its numbers are not finite")
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: is no quality head ({error}); a run with gate arrol saves one") from None
        return cls(layers, (mean, deviation))

    @property
    def hidden_size(self) -> int | None:
        """Size of the states it was trained on; None before anything was learned."""
        return self.layers[0].shape[1] - 1 if self.layers else None


def mean_logp(rollout: Rollout) -> float:
    """Return the mean log-probability of a whole rollout, nats; under the model itself where reported.

    A head trained at one sampling temperature then works at another.
    """
    logp_N = rollout.sampler_logp[rollout.action_mask] if rollout.raw_logp is None else rollout.raw_logp
    return float(np.add.reduce(logp_N) / len(logp_N))


def inputs_of(hidden_NH: np.ndarray, logp_N: np.ndarray, moments: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return float32: normalised hidden states, and the log-probability, which counts as a few of them."""
    size = hidden_NH.shape[-1]
    centred_NH = hidden_NH - np.add.reduce(hidden_NH, -1, keepdims=True) / size
    # row by row: einsum splits rows of more than 8,192 at its buffer's end, so rounding would depend on their position
    variance_N = (centred_NH[..., None, :] @ centred_NH[..., None])[..., 0, 0] / size
    centred_NH /= np.sqrt(variance_N + 1e-5)[..., None]
    mean, deviation = moments
    return centred_NH, np.asarray(2 * (logp_N - mean) / deviation, np.float32)


HIDDEN = Packed("f4", None, "hidden")


class HeadState(State):
    fits: Count
    resets: Count
    net: list[dict[str, Any]] | None
    moments: Annotated[tuple[float, PositiveFloat], Loose]
    recent: Annotated[list[np.ndarray], Columns(HIDDEN, FLOATS)]
    examples: Annotated[list[np.ndarray], Columns(HIDDEN, FLOATS, TRUTHS, FLOATS)]


class QualityHead:
    """Two layers, trained with cross-entropy on the last `MAX_EXAMPLES` labelled rollouts; built at the first one."""

    def __init__(self, seed: int = 0, width: int = WIDTH, learning_rate: float = LEARNING_RATE) -> None:
        self._seed, self._width, self._learning_rate = seed, width, learning_rate
        self._fits = 0
        self.resets = 0
        """Number of resets because weights were not finite."""
        self._examples = Window(maxlen=MAX_EXAMPLES)
        self._recent = Window(maxlen=MAX_RECENT)
        """Hidden state and log-probability."""
        self._net: nn.Sequential | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self.weights = HeadWeights()
        """Weights of the last fit."""

    def remember(self, hidden_NH: np.ndarray, logp_N: np.ndarray) -> None:
        """Store rollouts at their detection token, whatever their fate."""
        self._recent.extend(zip(hidden_NH, logp_N, strict=True))

    def recent_scores(self) -> np.ndarray:
        """Return the scores of the last `MAX_RECENT` rollouts by the current head, float [N]."""
        there = self.weights.layers and len(self._recent)
        return self.weights.logits(*self._recent.columns()) if there else np.empty(0)

    def observe(self, hidden: np.ndarray | None, logp: float, label: bool, weight: float) -> None:
        """Store a rollout with its outcome; one without a hidden state, or that is not finite, teaches nothing.

        `hidden`: float32 [H]. `logp`: mean log-probability of its tokens so far, nats. `weight`: 1 / (chance that its
        outcome was seen).
        """
        if hidden is not None and _normalisable(hidden) and np.isfinite(logp + weight):
            self._examples.append((hidden, logp, label, weight))

    def fit(self) -> None:
        """Take a few AdamW steps; the draws depend only on the seed and the number of earlier fits."""
        import torch

        self._fits += 1
        if not len(self._examples):
            return
        hidden_NH, logp_N, label_N, weight_N = self._examples.columns()
        if self._net is None:
            self._build(hidden_NH.shape[1])
        assert self._net is not None
        assert self._optimizer is not None
        moments = float(logp_N.mean()), float(max(logp_N.std(), 1e-3))
        draws = torch.Generator().manual_seed(noise_key(self._seed, HEAD_STREAM, self._fits) >> 1)
        for _ in range(UPDATES):
            picked = torch.randint(len(label_N), (BATCH,), generator=draws).numpy()
            inputs = np.column_stack(inputs_of(hidden_NH[picked], logp_N[picked], moments))
            labels, weights = (torch.from_numpy(c[picked].astype(np.float32)) for c in (label_N, weight_N))
            with torch.no_grad():
                self._set_gradients(torch.from_numpy(inputs), labels, weights)
            self._optimizer.step()
        self._publish(moments)

    def _set_gradients(self, inputs_NI: torch.Tensor, label_N: torch.Tensor, weight_N: torch.Tensor) -> None:
        """Set gradients of the weighted mean cross-entropy; by hand, since autograd takes longer than the products."""
        import torch

        assert self._net is not None
        first, bias, second, last = self._net.parameters()
        inner_NW = torch.addmm(bias, inputs_NI, first.t()).relu_()
        logit_N = torch.addmm(last, inner_NW, second.t())[:, 0]
        error_N = logit_N.sigmoid_().sub_(label_N).mul_(weight_N * (1 / weight_N.sum()))
        error_NW = torch.outer(error_N, second[0]).mul_(inner_NW > 0)
        first.grad, bias.grad = error_NW.t() @ inputs_NI, error_NW.sum(0)
        second.grad, last.grad = error_N[None] @ inner_NW, error_N.sum(0, keepdim=True)

    def _build(self, size: int) -> None:
        import torch
        from torch import nn

        generator = torch.Generator().manual_seed(noise_key(self._seed, HEAD_STREAM, 0, self.resets) >> 1)
        first, second = nn.Linear(size + 1, self._width), nn.Linear(self._width, 1)
        for layer in (first, second):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
            nn.init.zeros_(layer.bias)
        self._net = nn.Sequential(first, nn.ReLU(), second)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=self._learning_rate, fused=True)

    def _publish(self, moments: tuple[float, float]) -> None:
        """Copy the weights to NumPy, where scoring costs microseconds; drop weights that are not finite."""
        assert self._net is not None
        self.weights = HeadWeights([p.detach().numpy().copy() for p in self._net.parameters()], moments)
        if not all(np.isfinite(layer).all() for layer in self.weights.layers):
            self.weights, self._net, self._optimizer = HeadWeights(moments=moments), None, None
            self.resets += 1

    def _tensors(self) -> list[torch.Tensor]:
        """Return the parameters and AdamW's states of each, which AdamW makes at its first step."""
        if self._net is None or self._optimizer is None:
            return []
        tensors = [p.detach() for p in self._net.parameters()]
        for parameter in self._net.parameters():
            tensors += [self._optimizer.state[parameter][key] for key in ("step", "exp_avg", "exp_avg_sq")]
        return tensors

    def state_dict(self) -> dict[str, Any]:
        return {
            "fits": self._fits,
            "resets": self.resets,
            "net": [pack(tensor.numpy()) for tensor in self._tensors()] or None,
            "moments": list(self.weights.moments),
            "recent": self._recent.state_dict(),
            "examples": self._examples.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | HeadState) -> None:
        import torch

        saved = HeadState.of(state)
        self._fits, self.resets = saved.fits, saved.resets
        self._recent.load(saved.recent)
        self._examples.load(saved.examples)
        self.weights, self._net, self._optimizer = HeadWeights(moments=saved.moments), None, None
        if saved.net is not None:
            with at("net"):
                self._load_net([torch.from_numpy(unpack(packed)) for packed in saved.net])
            self._publish(saved.moments)

    def _load_net(self, saved: list[torch.Tensor]) -> None:
        """Load tensors. Raises ValueError on shapes other than this head's, which AdamW does not check."""
        import torch

        self._build(self._examples.columns()[0].shape[1])
        assert self._net is not None
        assert self._optimizer is not None
        for parameter in self._net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        for own, tensor in zip(self._tensors(), saved, strict=True):
            if own.shape != tensor.shape or own.dtype != tensor.dtype or not tensor.isfinite().all():
                raise ValueError(f"not a finite array of {list(own.shape)} {own.dtype}, as a head of {self._width} has")
            own.copy_(tensor)


def _normalisable(hidden_NH: np.ndarray) -> np.ndarray:
    """Return which states [..., H] are finite, also squared, as normalising needs; bool [...]."""
    lowest_N, highest_N = np.minimum.reduce(hidden_NH, -1), np.maximum.reduce(hidden_NH, -1)
    return np.asarray((highest_N < MAX_CHANGE) & (lowest_N > -MAX_CHANGE))


_NAMES = ("first.weight", "first.bias", "second.weight", "second.bias")
