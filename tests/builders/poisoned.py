"""Build models with a weight that is not finite."""

from __future__ import annotations

import torch

from winnow import Trainer

WEIGHT = "model.layers.1.mlp.down_proj.weight"


def poisoned(trainer: Trainer, at_update: int) -> Trainer:
    """Whose optimizer leaves a NaN behind, although the gradient was finite."""
    apply, updates = trainer.learner.apply, 0

    def apply_badly(lr: float) -> float:
        nonlocal updates
        norm, updates = apply(lr), updates + 1
        if updates == at_update:
            with torch.no_grad():
                trainer.learner.model.get_parameter(WEIGHT)[0, 0] = torch.nan  # type: ignore[attr-defined]
        return norm

    trainer.learner.apply = apply_badly  # type: ignore[method-assign]
    return trainer
