"""Norms and gated activations, computed again in the backward pass instead of being kept for it.

They are little work, yet nearly half of what the layers of a decoder would keep: what a norm has between its input and
its output, that output, the gate's activation, and the product with it. Their own inputs are kept. Whole layers are
another matter: `eval_mode.checkpoint_layers`.

PyTorch's selective checkpointing of whole layers measures about the same (14M parameters, AMD EPYC: 2.09 CPU seconds
and 113 MiB of activations, here 2.06 and 111; nothing recomputed: 1.82 and 182). But it would run a layer's forward
pass again, which extends the cache of shared prompts a second time, and which `WideAttention` does not reach.
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
"""Classes of transformers whose forward is `down_proj(act_fn(gate_proj(x)) * up_proj(x))` and nothing else."""
TRIED, TRIED_SIZE = 64, 1 << 20
"""Parameters whose gradients a trial compares, at most, and the largest of them."""
WORTH = 100_000_000
"""Parameters from which it is done. Measured on a CPU: it takes no time at 135 million (docs/benchmarks.md), 3% of an
update at 14 and 7% at 0.7, whose activations are small anyway."""


class Again:
    """One use of a function: what it has made is forgotten, and made again from its inputs when it is asked for."""

    def __init__(self, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], module: nn.Module):
        """`module`: whose parameters the function has, besides its inputs."""
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
        """Gradients of the inputs, then of the module's parameters; the last that is asked in a backward pass."""
        output, leaves = self._make()
        self._made, self._inputs, self._versions = None, [], []
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, of_output, allow_unused=True))
        return [next(found) if x.requires_grad else None for x in leaves]

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
    def forward(ctx: Any, again: Again, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """`inputs` are those of the function, which knows how many, and parameters."""
        ctx.again = again
        return function()

    @staticmethod
    def backward(ctx: Any, of_output: torch.Tensor) -> Any:
        return None, None, *ctx.again.gradients(of_output)


class _Kept(NamedTuple):
    tensor: torch.Tensor
    version: int
    """Version it was saved with: hooks make torch leave the comparison to them."""


class Recomputing:
    """The norms and gated feed-forward layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}
        """Forwards of the modules that compute otherwise inside `forward`."""
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], int, Again]] = {}
        """Outputs that can be made again, with their versions, by address."""
        for module in model.modules():
            if "forward" in vars(module):
                continue  # somebody else computes it otherwise already
            if "Norm" in type(module).__name__ and not [*module.children()] and not [*module.buffers()]:
                self._forwards[module] = partial(self._norm, module, module.forward)
            elif is_gated(module):
                self._forwards[module] = partial(self._gated, module, module.forward)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Forward passes inside keep less for their backward passes."""
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
        return self._again(module, usual, args[0])

    def _gated(self, module: Any, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return usual(*args, **kwargs)
        (x,) = args

        def product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            activated: torch.Tensor = module.act_fn(gate) * up
            return activated

        return module.down_proj(self._again(module.act_fn, product, module.gate_proj(x), module.up_proj(x)))

    def _again(self, module: nn.Module, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        parameters = list(module.parameters())
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*inputs, *parameters)):
            return function(*inputs)
        again = Again(function, inputs, module)
        output: torch.Tensor = _Forgotten.apply(again, partial(function, *inputs), *inputs, *parameters)
        self._outputs[output.data_ptr()] = weakref.ref(output), output._version, again
        return output

    def _pack(self, saved: torch.Tensor) -> _Kept | tuple[Again, torch.Size]:
        """What is kept of a tensor that an operation saves; it may be a view of one that can be made again.

        It is detached: an operation may save its own output, whose graph would then hold itself for good."""
        reference, version, again = self._outputs.get(saved.data_ptr(), (None, 0, None))
        output = reference() if reference is not None else None
        if output is not None and again is not None and output._version == version:
            same = saved.dtype == output.dtype and saved.numel() == output.numel()
            if same and saved.is_contiguous() and output.is_contiguous():
                return again, saved.shape
        return _Kept(saved.detach(), saved._version)

    @staticmethod
    def _unpack(kept: _Kept | tuple[Again, torch.Size]) -> torch.Tensor:
        if isinstance(kept, _Kept):
            if kept.tensor._version != kept.version:
                raise RuntimeError("a tensor that the gradient needs was overwritten after it had been used")
            return kept.tensor
        again, shape = kept
        return again.output().reshape(shape)


def is_gated(module: nn.Module) -> bool:
    """By its class, not by a trial alone: that would not reach a clamp of large activations."""
    cls = type(module)
    return cls.__name__ in GATED and cls.__module__.startswith("transformers.models.")


def recomputing_if_exact(
    model: Any, body: Callable[..., torch.Tensor], n_tokens: int, used: nn.Module | None = None
) -> Recomputing | None:
    """None for small models, and where a trial of `body` fails or gives other numbers or gradients: a class may make
    something else of the same parts. `used`: the model that it is for; None is `model`, which is tried."""
    used = used or model
    if sum(p.numel() for p in used.parameters()) < WORTH:
        return None
    found, device = Recomputing(model), model.get_input_embeddings().weight.device
    ids_BT = (torch.arange(2 * 8, device=device).view(2, 8) * 7 + 1) % n_tokens
    small = sorted((p for p in model.parameters() if p.requires_grad and p.numel() <= TRIED_SIZE), key=torch.numel)

    def trial() -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        output = body(input_ids=ids_BT, use_cache=False)
        ramp = torch.linspace(-1, 1, output.numel(), device=device, dtype=output.dtype).view_as(output)
        total = (output * ramp).sum()
        return output.detach(), list(torch.autograd.grad(total, small[:TRIED], allow_unused=True)) if small else []

    usual, gradients = trial()
    try:
        with found.forward():
            again, their_gradients = trial()
    except Exception:  # whatever a class may do that is not foreseen here
        return None
    alike = (_alike(one, other) for one, other in zip(their_gradients, gradients, strict=True))
    if not torch.equal(again, usual) or not all(alike):
        return None
    return found if used is model else Recomputing(used)


def _alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool((one - other).abs().max() <= 1e-3 * other.abs().max())
