"""Norms and gated activations, recomputed in the backward pass instead of stored.

They are little work, yet nearly half of a decoder layer's activations: a norm's intermediate values and output, the
gate's activation, and the product with it. Their inputs are kept. For whole layers see `eval_mode.checkpoint_layers`.

PyTorch's selective checkpointing of whole layers measures about the same (14M parameters, AMD EPYC: 2.09 CPU seconds
and 113 MiB of activations, here 2.06 and 111; nothing recomputed: 1.82 and 182). But it would repeat a layer's forward
pass, which bypasses `WideAttention`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

GATED = frozenset(
    {"CohereMLP", "Cohere2MLP", "DeepseekV3MLP", "Exaone4MLP", "GemmaMLP", "Gemma2MLP", "Gemma3MLP", "GraniteMLP"}
    | {"LlamaMLP", "Ministral3MLP", "MistralMLP", "Olmo2MLP", "Olmo3MLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP"}
)
"""transformers classes whose forward is `down_proj(act_fn(gate_proj(x)) * up_proj(x))` and nothing else."""
WORTH = 100_000_000
"""Parameters from which recomputing is used. Measured on a CPU: it takes no time at 135 million (docs/benchmarks.md),
3% of an update at 14 and 7% at 0.7, whose activations are small anyway."""


class RecomputedCall:
    """One call of a function: its result is discarded, and recomputed from its inputs on demand."""

    def __init__(self, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], module: nn.Module):
        """`module`: owner of the parameters that the function uses in addition to its inputs."""
        self._function, self._module = function, module
        self._inputs = [x.detach() for x in inputs]
        self._versions = [x._version for x in inputs]
        self._with_gradient = [x.requires_grad for x in inputs]
        kind = inputs[0].device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._made: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def output(self) -> torch.Tensor:
        return self._make()[0].detach()

    def gradients(self, of_output: torch.Tensor) -> list[torch.Tensor | None]:
        """Return gradients of inputs, then of the module's parameters. Call it last in a backward pass."""
        output, leaves = self._make()
        self._made, self._inputs, self._versions = None, [], []
        trained = [x for x in leaves if x.requires_grad]
        gradients = iter(torch.autograd.grad(output, trained, of_output, allow_unused=True))
        return [next(gradients) if x.requires_grad else None for x in leaves]

    def _make(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if self._made is None:
            if [x._version for x in self._inputs] != self._versions:
                raise RuntimeError(f"{type(self._module).__name__}: its input was overwritten after it had been used")
            inputs = [x.detach().requires_grad_(g) for x, g in zip(self._inputs, self._with_gradient, strict=True)]
            with torch.enable_grad(), torch.autocast(*self._autocast):
                self._made = self._function(*inputs), [*inputs, *self._module.parameters()]
        return self._made


class _Forgotten(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: RecomputedCall, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Run `function`, which binds its inputs. `inputs`: those inputs, then the parameters."""
        ctx.call = call
        return function()

    @staticmethod
    def backward(ctx: Any, of_output: torch.Tensor) -> Any:
        return None, None, *ctx.call.gradients(of_output)


class _Kept(NamedTuple):
    tensor: torch.Tensor
    version: int
    """Version at saving: with hooks, torch leaves the version check to them."""


class Recomputing:
    """Recomputes the norms and gated feed-forward layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}
        """Replacement forwards of modules inside `forward`."""
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], int, RecomputedCall]] = {}
        """Recomputable outputs, with their versions, by address."""
        for module in model.modules():
            if "forward" in vars(module):
                continue  # its forward is already replaced
            if is_plain_norm(module):
                self._forwards[module] = partial(self._norm, module, module.forward)
            elif is_gated(module):
                self._forwards[module] = partial(self._gated, module, module.forward)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Forward passes inside this context keep less for their backward passes."""
        try:
            for module, forward in self._forwards.items():
                module.forward = forward
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._outputs.clear()
            for module in self._forwards:
                del module.__dict__["forward"]

    def _norm(self, module: nn.Module, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return usual(*args, **kwargs)
        return self._recomputed(module, usual, args[0])

    def _gated(self, module: Any, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return usual(*args, **kwargs)
        (x,) = args

        def product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            activated: torch.Tensor = module.act_fn(gate) * up
            return activated

        return module.down_proj(self._recomputed(module.act_fn, product, module.gate_proj(x), module.up_proj(x)))

    def _recomputed(
        self, module: nn.Module, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        parameters = list(module.parameters())
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*inputs, *parameters)):
            return function(*inputs)
        call = RecomputedCall(function, inputs, module)
        output: torch.Tensor = _Forgotten.apply(call, partial(function, *inputs), *inputs, *parameters)
        self._outputs[output.data_ptr()] = weakref.ref(output), output._version, call
        return output

    def _pack(self, saved: torch.Tensor) -> _Kept | tuple[RecomputedCall, torch.Size]:
        """Return the form in which a saved tensor is kept; it may be a view of a recomputable output. It is detached:
        an operation may save its own output, whose graph would then reference itself forever."""
        reference, version, call = self._outputs.get(saved.data_ptr(), (None, 0, None))
        output = reference() if reference is not None else None
        if output is not None and call is not None and output._version == version:
            same = saved.dtype == output.dtype and saved.numel() == output.numel()
            if same and saved.is_contiguous() and output.is_contiguous():
                return call, saved.shape
        return _Kept(saved.detach(), saved._version)

    @staticmethod
    def _unpack(kept: _Kept | tuple[RecomputedCall, torch.Size]) -> torch.Tensor:
        if isinstance(kept, _Kept):
            if kept.tensor._version != kept.version:
                raise RuntimeError("a tensor that the gradient needs was overwritten after it had been used")
            return kept.tensor
        call, shape = kept
        return call.output().reshape(shape)


def is_gated(module: nn.Module) -> bool:
    """Return whether the class is in `GATED`."""
    cls = type(module)
    return cls.__name__ in GATED and cls.__module__.startswith("transformers.models.")


def is_plain_norm(module: nn.Module) -> bool:
    """Return whether this is a norm of transformers or torch that depends on its input and parameters alone."""
    cls = type(module)
    known = "Norm" in cls.__name__ and cls.__module__.startswith(("transformers.models.", "torch.nn."))
    return known and not [*module.children()] and not [*module.buffers()]


def recomputing(model: nn.Module) -> Recomputing | None:
    """Return None for models that are small or have no gated layer; `run/budget.py` counts on the same rule."""
    large = sum(p.numel() for p in model.parameters()) >= WORTH
    return Recomputing(model) if large and any(is_gated(module) for module in model.modules()) else None
