"""The reference model of a KL penalty: created, mixed with the policy, saved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from ...base.weights import is_finite, save_tensors

REFERENCE_FILE = "reference.safetensors"


def frozen_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Return the reference for a KL penalty under full fine-tuning."""
    return copy.deepcopy(model).requires_grad_(False).eval()


@torch.no_grad()
def mix(reference: torch.nn.Module, policy: torch.nn.Module, alpha: float) -> None:
    """Set reference = (1 - alpha) reference + alpha policy per parameter, as TRL's `SyncRefModelCallback`.

    A sharded policy is gathered, parameter by parameter; the reference is whole.
    """
    for theirs, ours in zip(reference.parameters(), policy.parameters(), strict=True):
        whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        theirs.mul_(1.0 - alpha).add_(whole, alpha=alpha)


def save_reference(reference: torch.nn.Module, directory: Path) -> None:
    save_tensors(dict(reference.named_parameters()), directory / REFERENCE_FILE)


@torch.no_grad()
def load_reference(reference: torch.nn.Module, directory: Path) -> bool:
    """Load a saved reference; return whether one exists. Raises ValueError if it is another model's."""
    file = directory / REFERENCE_FILE
    if not file.exists():
        return False
    saved: Mapping[str, torch.Tensor] = load_file(file)
    own = dict(reference.named_parameters())
    if saved.keys() != own.keys() or any(saved[name].shape != p.shape for name, p in own.items()):
        raise ValueError(f"{file}: not the reference of this model")
    for name, parameter in own.items():
        if not is_finite(saved[name]):
            raise ValueError(f"{file}: {name} is not finite")
        parameter.copy_(saved[name])
    return True
