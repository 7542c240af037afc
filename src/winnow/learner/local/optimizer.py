"""Optimizers by transformers' names, and how their states are saved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ...base.machine import install

Parameters = Mapping[str, torch.nn.Parameter]
"""Trained parameters by name."""
WHOLE = ("adamw_torch", "adamw_torch_fused")
"""AdamW with 32-bit states; the first loops over parameters in Python, the second is one kernel."""
STEP_LIMIT = 1 << 53
"""Exclusive limit on a state's update count: a float counts no further."""
LOW_BIT = {"adamw_torch_8bit": "AdamW8bit", "adamw_torch_4bit": "AdamW4bit"}
"""transformers' name -> torchao's class: states in blocks of 256 or 128 numbers with a scale each."""
SET_ELSEWHERE = {"params", "lr", "betas", "eps", "weight_decay"}
FIXED = {"fused", "foreach", "capturable", "maximize", "differentiable", "relative_step", "warmup_init"}
OWN_KEYS = SET_ELSEWHERE | FIXED | {"ns_coefficients"}
"""Arguments not allowed in `optim_args`: other keys set them, they are not single values, or they change the meaning of
a learning rate."""


class Several:
    """Optimizers that share the parameters among them, as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.state = parts[0].state
        for part in parts:
            part.state = self.state  # each optimizer looks up only its parameters
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


Optimizer = torch.optim.Optimizer | Several


def make_optimizer(
    name: str,
    parameters: Parameters,
    *,
    ends: Collection[torch.nn.Parameter] = (),
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    args: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Return the optimizer for `optim: name` and `optim_args: args`. Muon leaves `ends` (embeddings, head) to AdamW.

    Raises ValueError when its library is missing, or it has no such arguments.
    """
    every = list(parameters.values())
    adam: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    cls: Any
    if name in WHOLE:
        cls, options = torch.optim.AdamW, adam | {"fused": name == "adamw_torch_fused"}
    elif name == "sgd":
        cls, options = torch.optim.SGD, {"weight_decay": weight_decay}
    elif name == "adafactor":
        from transformers.optimization import Adafactor

        cls, options = Adafactor, {"scale_parameter": False, "relative_step": False, "weight_decay": weight_decay}
    elif name == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"optim: muon needs torch 2.9 or later, and this is {torch.__version__}")
        cls, options = torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": weight_decay}
    else:
        cls, options = _low_bit(name), adam
    options |= _checked(cls, name, args or {})
    if name != "muon":
        return _made(cls, every, options)
    outer = {id(p) for p in ends}
    matrices = [p for p in every if p.ndim == 2 and id(p) not in outer]
    if not matrices:
        raise ValueError("optim: muon trains matrices of layers, and none is trained here; use optim: adamw_torch")
    rest = [p for p in every if p.ndim != 2 or id(p) in outer]
    first: torch.optim.Optimizer = _made(cls, matrices, options)
    return Several(first, torch.optim.AdamW(rest, lr=0.0, fused=True, **adam)) if rest else first


def _made(cls: Any, parameters: list[torch.nn.Parameter], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    try:
        made: torch.optim.Optimizer = cls(parameters, lr=0.0, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optim_args: {error}") from None
    return made


def _checked(cls: Any, name: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
    known = sorted(set(inspect.signature(cls).parameters) - OWN_KEYS)
    for key, value in args.items():
        if isinstance(value, str) and key != "adjust_lr_fn":
            raise ValueError(f"optim_args: {key} must be a number, true or false, not {value!r}")
        if key not in known:
            raise ValueError(
                f"optim_args: optim: {name} has no '{key}' here; it has {', '.join(known) or 'none'}; keys of their "
                "own are learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon"
            )
    return args


def _low_bit(name: str) -> Callable[..., torch.optim.Optimizer]:
    try:
        from torchao import optim
    except ImportError:
        raise ValueError(f"optim: {name} needs torchao; {install('torchao')}") from None
    cls: Callable[..., torch.optim.Optimizer] = getattr(optim, LOW_BIT[name])
    return cls


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate. torchao's is a tensor, so that its compiled step stays valid."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def saved_state(optimizer: Optimizer, parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return plain tensors: `parameter:key`, or `parameter:key.part` of a low-bit state. Numbers are 64-bit."""
    state = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            for part, tensor in _parts(value).items():
                state[f"{name}:{key}{part}"] = tensor.detach().contiguous()
    return state


def load_state(optimizer: Optimizer, parameters: Parameters, state: Mapping[str, torch.Tensor], where: str) -> None:
    """Load `state`. Raises ValueError if its parameters, or the kind of their states, are not this optimizer's.

    A parameter that had no gradient yet has no state, and starts without one.
    """
    if not state:
        return
    known = {parameter_of(key) for key in state}
    stepped = {name: parameter for name, parameter in parameters.items() if name in known}
    make_states(optimizer, stepped)
    own = saved_state(optimizer, stepped)
    if different := sorted(own.keys() ^ state.keys())[:3]:
        raise ValueError(f"{where}: not of this optim and model; differs in {different}")
    for name, parameter in stepped.items():
        for key, value in optimizer.state[parameter].items():
            for part, tensor in _parts(value).items():
                saved = state[f"{name}:{key}{part}"]
                if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                    raise ValueError(f"{where}: not of this optim and model; differs in {name}:{key}{part}")
                tensor.copy_(saved)
                if not isinstance(value, torch.Tensor):
                    optimizer.state[parameter][key] = saved.item()
    require_steps(state, where)


def parameter_of(key: str) -> str:
    """Return the parameter that a key of a saved state belongs to."""
    return key.partition(":")[0]


def require_steps(state: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise ValueError for a parameter with an impossible number of steps."""
    for name, value in state.items():
        if name.endswith(":step") and not 0 <= value.item() < STEP_LIMIT:
            raise ValueError(f"{where}: {name} is {value.item()}")


def make_states(optimizer: Optimizer, parameters: Parameters) -> None:
    """Create the optimizer's states with a step that changes no parameter."""
    set_learning_rate(optimizer, 0.0)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _parts(value: Any) -> dict[str, torch.Tensor]:
    if not isinstance(value, torch.Tensor):
        return {"": torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)}
    flatten = getattr(value, "__tensor_flatten__", None)
    return {"": value} if flatten is None else {f".{part}": getattr(value, part) for part in flatten()[0]}
