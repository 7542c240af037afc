"""Build updates with a KL penalty in the reward."""

from __future__ import annotations

from typing import Any

import torch

from winnow.learner.step import OptimizerStep, StepOptions
from winnow.methods.correct.none import NoScale
from winnow.methods.correct.truncate import Truncate
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain
from winnow.types import Group

from ..unit.learner_models import learner_of, llama


def trained(groups: list[Group], advantage: Any, kl_in_reward: float, **loss: Any) -> tuple[Any, dict[str, float]]:
    model, reference = llama().double(), llama().double()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    options = StepOptions(
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_steps=1,
        num_iterations=1,
        max_completion_length=16,
        mask_truncated_completions=False,
        seed=0,
        kl_in_reward=kl_in_reward,
    )
    terms = LossConfig(Plain(), loss_type="sequence_sum", correction=Truncate(), **loss)
    metrics = OptimizerStep(learner_of(model, reference, tokens=20), advantage, terms, NoScale(), options)(groups, 0)
    return (model, reference), metrics
