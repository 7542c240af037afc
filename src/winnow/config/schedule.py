"""Learning-rate schedules, computed here or by transformers, and their checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal

Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
OWN = ("constant", "constant_with_warmup", "linear", "cosine", "warmup_stable_decay")
"""Schedules computed here, ending at `lr_end`. All others, and any with `lr_scheduler_kwargs`, are transformers'."""
WHOLE = ("linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial")
"""Schedules that decay from the warm-up to the last step, so at least one step must follow the warm-up."""


def check_schedule(kind: str, kwargs: Mapping[str, Any], lr: float, warmup: int, steps: int) -> None:
    """Raise ValueError if transformers has no such schedule for these options."""
    if kind in WHOLE and warmup >= steps:
        raise ValueError(f"warmup_steps: must be below max_steps ({warmup} of {steps}); lower it")
    if kind in OWN and not kwargs:
        return
    if kind.startswith("constant"):
        raise ValueError(f"lr_scheduler_kwargs: has no effect with lr_scheduler_type: {kind}; remove it")
    if lr == 0:
        raise ValueError(f"lr_scheduler_type: {kind} needs a learning_rate above 0")
    try:
        share = transformers_share(kind, tuple(sorted(kwargs.items())), lr, warmup, steps)
        rates = [share(step) for step in (warmup, (warmup + steps) // 2, steps)]
    except (TypeError, ValueError, ArithmeticError) as error:
        cause = str(error).replace("`lr_scheduler_kwargs`", "lr_scheduler_kwargs")
        raise ValueError(f"lr_scheduler_kwargs: lr_scheduler_type: {kind}: {cause}") from None
    if not all(isinstance(rate, float | int) and 0 <= rate < math.inf for rate in rates):
        values = [rate * lr for rate in rates]
        raise ValueError(f"lr_scheduler_kwargs: learning rates must be finite and at least 0, not {values}")


@lru_cache(maxsize=8)
def transformers_share(
    kind: str, kwargs: tuple[tuple[str, Any], ...], lr: float, warmup: int, steps: int
) -> Callable[[int], float]:
    """Return the function from a step, counted from 0, to its share of `lr` by `transformers.get_scheduler`."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    share: Callable[[int], float] = get_scheduler(kind, optimizer, warmup, steps, dict(kwargs)).lr_lambdas[0]
    return share
