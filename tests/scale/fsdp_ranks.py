"""Two ranks of a learner, the model they share, and updates to compare with one process's."""

from __future__ import annotations

import copy
from typing import Any

import torch

from winnow.config import RunConfig, validate
from winnow.learner import Learner, LearnerContext, Policy
from winnow.learner.fsdp.learner import FsdpLearner
from winnow.learner.fsdp.ranks import Ranks
from winnow.methods.correct import M2PO, Truncate
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Clip, Plain
from winnow.run.resolved import Options, learner_context
from winnow.study.warm_start import word_tokenizer

from .. import parity
from ..unit.learner_models import WORDS, llama, random_rows

REWARD = f"{parity.__file__}:parity_reward"
FSDP = {"name": "fsdp", "ranks": 2, "timeout_s": 120}


def over(ranks: Ranks, policy: Policy, **changes: Any) -> FsdpLearner:
    return FsdpLearner(ranks, *ranks.build(policy, context(**changes)), read=policy.files is not None)


def context(**changes: Any) -> LearnerContext:
    c = config(**changes)
    return learner_context(c, Options.from_config(c))


def config(**changes: Any) -> RunConfig:
    return validate({"model": "given", "env": "countdown", "max_grad_norm": 0.5, "tokens_per_microbatch": 48} | changes)


def policy(reference: bool = False, **model: Any) -> Policy:
    causal_lm = llama(**model)
    tokenizer = word_tokenizer([f"w{i}" for i in range(WORDS)], max_positions=64)
    return Policy(causal_lm, tokenizer, copy.deepcopy(causal_lm) if reference else None)


class Norm(torch.nn.Module):
    """RMSNorm in the dtype of its input. Transformers' own rounds to float32, which enlarges the last bits by which
    orders of summation differ."""

    def __init__(self, weight: torch.nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def in_float64(parts: Policy) -> Policy:
    """The same model with nothing below float64."""
    for name, module in list(parts.model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            parent, _, attribute = name.rpartition(".")
            setattr(parts.model.get_submodule(parent), attribute, Norm(module.weight, module.variance_epsilon))
    parts.model.double()
    return parts


def updates(learner: Learner, loss: LossConfig, steps: int = 5, iterations: int = 1) -> list[dict[str, float]]:
    """Of rows that differ from step to step, in number, too."""
    found = []
    for step in range(steps):
        rows = random_rows(seed=step, n=1 + 4 * step)
        for iteration in range(iterations):
            stats = learner.accumulate(rows, loss, iteration)
            weights = torch.cat(stats.log_w_B)
            found.append(
                stats.sums | {"norm": learner.apply(1e-3), "rows": float(len(weights)), "weight": float(weights.sum())}
            )
    return found


def state(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


LOSSES = {
    "plain": LossConfig(policy_loss=Plain()),
    "clip": LossConfig(policy_loss=Clip()),
    "kl and entropy": LossConfig(policy_loss=Plain(), beta=0.1, entropy_coef=0.01),
    "truncate": LossConfig(policy_loss=Plain(), correction=Truncate()),
    "over the batch": LossConfig(policy_loss=Plain(), correction=M2PO()),
    "over the batch, clip": LossConfig(policy_loss=Clip(), correction=M2PO()),
}
