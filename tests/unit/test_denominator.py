"""Active-RLOO, equation 3: every term of the loss runs over the groups that survived the filter, and no others.

Groups go the way of a run - filter without refill, buffer, optimizer step - and the gradient is compared with one that
is computed a rollout at a time, in float64, with B_eff written out in the denominator.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from winnow.learner.step import OptimizerStep, StepOptions
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.correct import STEP_SCALES
from winnow.methods.correct.truncate import Truncate
from winnow.methods.filter import FILTERS
from winnow.methods.group_kind import GroupJudge
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain
from winnow.sampler.buffer import Buffer
from winnow.types import Group, Prompt, Rollout, Visit

from .learner_models import VOCABULARY, assert_equal, learner_of, llama

REWARDS = [[1.0, 1.0, 1.0], [1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
"""Two of five groups teach; in the first of them the last member has the advantage 0."""
K, B_EFF = 3, 2
RANGE = (math.exp(-2.3), math.exp(2.3))
BETA, ENTROPY = 0.3, 0.2


def groups() -> list[Group]:
    rng = np.random.default_rng(1)
    found = []
    for number, rewards in enumerate(REWARDS):
        prompt_ids, rollouts = tuple(rng.integers(2, VOCABULARY, 4).tolist()), []
        for sibling, reward in enumerate(rewards):
            length = int(rng.integers(2, 9))
            rollouts.append(
                Rollout(
                    sibling=sibling,
                    prompt_ids=prompt_ids,
                    token_ids=rng.integers(2, VOCABULARY, length),
                    action_mask=np.ones(length, bool),
                    sampler_logp=rng.normal(-3, 1, length).astype(np.float32),
                    versions=np.zeros(length, np.int32),
                    reward=reward,
                )
            )
        found.append(Group(Visit(number, 0, Prompt(f"p{number}", number, text="x")), rollouts))
    return found


def through_the_step(loss: LossConfig, model: Any, reference: Any, tokens_per_microbatch: int) -> tuple[list[Any], Any]:
    """Gradients just before the optimizer's step, and the metrics."""
    keep, buffer = FILTERS["zero_variance"](refill=False), Buffer(len(REWARDS), max_lag=0)
    for group in groups():
        if keep.admit(group, GroupJudge().kind(group)).keep:
            buffer.add(group)
        else:
            buffer.unreplaced += 1
    survivors = buffer.take(0)[0]
    assert [g.visit.number for g in survivors] == [1, 3]
    learner, seen = learner_of(model, reference, tokens=tokens_per_microbatch), []
    apply = learner.apply

    def looking(lr: float) -> float:
        seen.extend(p.grad.clone() for p in model.parameters())
        return apply(lr)

    learner.apply = looking  # type: ignore[method-assign]
    options = StepOptions(
        learning_rate=0.0,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_steps=1,
        num_iterations=1,
        max_completion_length=16,
        mask_truncated_completions=False,
        seed=0,
    )
    step = OptimizerStep(learner, ADVANTAGES["rloo"](), loss, STEP_SCALES["none"](), options)
    return seen, step(survivors, 0)


def by_hand(loss_type: str, model: Any, reference: Any, *, b: int, kl: bool, entropy: bool) -> torch.Tensor:
    """-1/(b K) * sum of w A logp(y), and beta KL and entropy under the same denominator."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for group in groups():
        rewards = [float(r.reward) for r in group.rollouts if r.reward is not None]
        if len(set(rewards)) == 1:
            continue
        for i, rollout in enumerate(group.rollouts):
            advantage = rewards[i] - sum(r for j, r in enumerate(rewards) if j != i) / (K - 1)
            ids = torch.tensor([*rollout.prompt_ids, *rollout.token_ids.tolist()])[None]
            p = len(rollout.prompt_ids)
            logps = model(input_ids=ids).logits[0, p - 1 : -1, :VOCABULARY].log_softmax(-1)
            with torch.no_grad():
                ref_logps = reference(input_ids=ids).logits[0, p - 1 : -1, :VOCABULARY].log_softmax(-1)
            logp, ref_logp = (x.gather(1, ids[0, p:, None])[:, 0] for x in (logps, ref_logps))
            log_w = float(logp.detach().sum()) - float(rollout.sampler_logp.astype(np.float64).sum())
            w = min(max(math.exp(min(log_w, 50.0)), RANGE[0]), RANGE[1])
            total = total - w * advantage * logp.sum()
            if kl:
                d = ref_logp - logp
                total = total + w * BETA * (d.exp() - 1 - d).sum()
            if entropy:
                total = total + ENTROPY * (logps.exp() * logps).sum()
            tokens += len(rollout.token_ids)
    return total / (b * K if loss_type == "sequence_sum" else tokens * b / B_EFF)


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize("tokens_per_microbatch", [1, 10_000])
@pytest.mark.parametrize(("kl", "entropy"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("loss_type", ["sequence_sum", "dapo"])
def test_every_term_has_the_surviving_denominator(
    loss_type: Any, kl: bool, entropy: bool, tokens_per_microbatch: int
) -> None:
    model, reference = llama().double(), llama().double()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    loss = LossConfig(
        policy_loss=Plain(),
        loss_type=loss_type,
        beta=BETA if kl else 0.0,
        entropy_coef=ENTROPY if entropy else 0.0,
        correction=Truncate(level="sequence", low=RANGE[0], high=RANGE[1]),
    )
    plain = copy.deepcopy(model)
    expected = by_hand(loss_type, plain, reference, b=B_EFF, kl=kl, entropy=entropy)
    theirs = list(torch.autograd.grad(expected, list(plain.parameters())))
    ours, metrics = through_the_step(loss, model, reference, tokens_per_microbatch)
    assert metrics["rows"] == B_EFF * K
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert_equal(ours, theirs, tolerance=1e-5)
    of_all = by_hand(loss_type, plain, reference, b=len(REWARDS), kl=kl, entropy=entropy)
    assert abs(of_all.item() - expected.item()) > 0.1 * abs(expected.item()), "the wrong denominator would show"
