"""KL in the reward (VCPO, appendix E.3): the gradient of E[R] - beta KL by enumeration, and who sees which rewards."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.reference_kl import penalised
from winnow.methods.advantage import ADVANTAGES
from winnow.types import Group, Prompt, Rollout, Visit

from ..builders.groups import make_group
from ..builders.kl_in_reward import trained
from ..builders.toy_models import PROMPT, SEQUENCES, V, close, flat, model_of, parameters, toy
from .learner_models import VOCABULARY, assert_equal, llama

BETA = 0.3


def rollout(sibling: int, sequence: tuple[int, ...], reward: float | None) -> Rollout:
    ones = np.ones(2, bool)
    return Rollout(sibling, tuple(PROMPT), np.array(sequence), ones, -np.ones(2, np.float32), 0 * ones, reward=reward)


@pytest.mark.parametrize("on_policy", [True, False])
def test_with_importance_weights_the_gradient_is_that_of_reward_less_divergence(on_policy: bool) -> None:
    """RLOO over all pairs of rollouts; the sampler's log-probabilities in the penalty would give another gradient."""
    t = toy(on_policy)
    rewards = torch.linspace(-1, 2, len(SEQUENCES), dtype=torch.float64) ** 2
    pairs = list(itertools.product(range(len(SEQUENCES)), repeat=2))
    groups = [
        Group(
            Visit(n, 0, Prompt(str(n), n, text="")),
            [rollout(i, SEQUENCES[y], float(rewards[y])) for i, y in enumerate(pair)],
        )
        for n, pair in enumerate(pairs)
    ]
    learner = LocalLearner(model_of(0), TokenDistribution(V), LearnerOptions(), model_of(2))
    advantage = ADVANTAGES["rloo"]()
    found, metrics = penalised(groups, learner, advantage, BETA)
    logp, sampler = t.policy.sum(1), t.sampler.sum(1)
    weight = (logp.detach() - sampler).exp()
    value = torch.zeros((), dtype=torch.float64)
    for (a, b), A in zip(pairs, advantage.of_batch(found), strict=True):
        chance = (sampler[a] + sampler[b]).exp() / 2
        value = value + chance * (weight[a] * A[0] * logp[a] + weight[b] * A[1] * logp[b])
    ours = flat(torch.autograd.grad(value, parameters(), retain_graph=True))
    divergence = (logp.exp() * (logp - t.reference.sum(1))).sum()
    exact = (logp.exp() * rewards).sum() - BETA * divergence
    close(ours, flat(torch.autograd.grad(exact, parameters(), retain_graph=True)))
    plain = float((logp - t.reference.sum(1)).detach().mean())
    assert metrics == {"kl": pytest.approx(plain / 2), "kl_penalty": pytest.approx(BETA * plain)}


def groups_of(rewards: list[list[float | None]]) -> list[Group]:
    groups = [make_group(n, r) for n, r in enumerate(rewards)]
    for n, member in enumerate(r for g in groups for r in g.rollouts):
        member.token_ids = (member.token_ids + 3 * n) % 30
    return groups


REWARDS: list[list[float | None]] = [[1.0, 0.0, 0.3], [1.0, 1.0, 1.0], [0.0, None, 1.0]]


def by_hand(groups: list[Group], scaled: bool) -> list[list[float | None]]:
    """Rewards less BETA times the log ratio of the whole rollout, one rollout at a time."""
    model, reference = llama().double(), llama().double()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    found: list[list[float | None]] = []
    for group in groups:
        raw = [r.reward for r in group.rollouts]
        found.append([])
        for r in group.rollouts:
            ids = torch.tensor([[*r.prompt_ids, *r.token_ids.tolist()]])
            logps = [
                m(input_ids=ids)
                .logits[0, len(r.prompt_ids) - 1 : -1, :VOCABULARY]
                .log_softmax(-1)
                .gather(1, ids[0, len(r.prompt_ids) :, None])
                .sum()
                .detach()
                for m in (model, reference)
            ]
            penalty = 0.0 if scaled and len(set(raw) - {None}) == 1 else BETA * float(logps[0] - logps[1])
            found[-1].append(None if r.reward is None else r.reward - penalty)
    return found


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(
    ("advantage", "scaled"),
    [
        (ADVANTAGES["dr_grpo"](), False),
        (ADVANTAGES["grpo"](), True),
        (ADVANTAGES["rloo"](), False),
        (ADVANTAGES["max_at_k"](k=2), False),
        (ADVANTAGES["opo"](), False),
        (ADVANTAGES["reinforce_pp"](), False),
        (ADVANTAGES["opob"](), False),
        (ADVANTAGES["opob"](scope="minibatch"), False),
        (ADVANTAGES["opob"](scale=True), True),
        (ADVANTAGES["otb"](), False),
    ],
    ids=lambda x: str(x),
)
def test_every_advantage_takes_the_penalised_rewards(advantage: Any, scaled: bool) -> None:
    """As if the environment had given them. Where the group's spread is divided by, equal rewards stay equal."""
    groups = groups_of(REWARDS)
    (ours, _), metrics = trained(groups, advantage, BETA)
    assert [[r.reward for r in g.rollouts] for g in groups] == REWARDS, "others see the rewards as they are"
    (theirs, _), same = trained(groups_of(by_hand(groups, scaled)), advantage, 0.0)
    assert_equal(list(ours.parameters()), list(theirs.parameters()), tolerance=1e-6)
    assert metrics["rows_with_gradient"] == same["rows_with_gradient"]
    assert (metrics["rows_with_gradient"] == 5) == scaled, "the group of equal rewards teaches the penalty, or nothing"
    assert metrics["kl_penalty"] != 0


def test_a_step_without_groups_trains_nothing() -> None:
    _, metrics = trained([], ADVANTAGES["grpo"](), BETA)
    assert metrics["kl_penalty"] == 0


def test_a_step_without_signal_is_not_blown_up() -> None:
    """GRPO over a penalty of a thousandth would have advantages of the size of 1."""
    equal: list[list[float | None]] = [[1.0] * 4, [0.0] * 4]
    _, metrics = trained(groups_of(equal), ADVANTAGES["grpo"](), 1e-3)
    assert metrics["updated"] == 0
    (_, _), small = trained(groups_of(equal), ADVANTAGES["dr_grpo"](), 1e-3)
    (_, _), usual = trained(groups_of(REWARDS), ADVANTAGES["dr_grpo"](), 0.0)
    assert 0 < small["grad_norm"] < usual["grad_norm"] / 10


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_a_penalty_alone_is_never_blown_up_to_the_size_of_a_reward(name: str) -> None:
    """Both divide by a spread, of the group or of the batch; where rewards have none it would be the penalty's."""
    groups = [
        Group(Visit(n, 0, Prompt(str(n), n, text="")), [rollout(i, s, 0.0) for i, s in enumerate(SEQUENCES[n : n + 3])])
        for n in range(2)
    ]
    learner = LocalLearner(model_of(0), TokenDistribution(V), LearnerOptions(), model_of(2))
    found, metrics = penalised(groups, learner, ADVANTAGES[name](), 1e-3)
    assert metrics["kl_penalty"] != 0
    assert all((a == 0).all() for a in ADVANTAGES[name]().of_batch(found))
