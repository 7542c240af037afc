"""An update written out rollout by rollout in plain autograd, from the formulas, with nothing of the learner's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from winnow.types import Group, Rollout

LARGEST_WEIGHT = 1e6


@dataclass(frozen=True)
class Setting:
    """What an update is made of, under the names of the configuration."""

    advantage: str = "grpo"
    options: dict[str, Any] = field(default_factory=dict)
    loss_type: str = "dapo"
    group_weighting: str | None = None
    policy_loss: str = "clip"
    level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    correction: str = "none"
    correction_options: dict[str, Any] = field(default_factory=dict)
    step_scale: str = "none"
    iterations: int = 1
    mask_truncated: bool = False
    unbiased: bool = False
    temperature: float = 1.0
    max_length: int = 12
    max_grad_norm: float | None = None

    @property
    def in_update(self) -> bool:
        return self.advantage in ("opob", "otb")

    @property
    def weigh(self) -> bool:
        return self.correction != "none" and self.correction_options.get("weigh", True)


@dataclass
class Term:
    """A rollout in the loss. Its pool is that of a baseline which the update finds."""

    rollout: Rollout
    advantage: float
    coefficient: float = 0.0
    pool: int | None = None
    old: torch.Tensor | None = None
    logp: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """[A], with its graph."""
    probs: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """[A, V]."""

    @property
    def sampler(self) -> torch.Tensor:
        return torch.from_numpy(self.rollout.sampler_logp[self.rollout.action_mask]).double()

    @property
    def tokens(self) -> int:
        return int(self.rollout.action_mask.sum())


def distributions(model: Any, rollout: Rollout, temperature: float) -> torch.Tensor:
    """Log-probabilities of all tokens wherever the policy sampled one, [A, V]; each segment on its prompt."""
    starts = [0, *[segment.start for segment in rollout.later_segments]]
    stops = [*starts[1:], len(rollout.token_ids)]
    prompts = [rollout.prompt_ids, *[segment.prompt_ids for segment in rollout.later_segments]]
    found = []
    for prompt, start, stop in zip(prompts, starts, stops, strict=True):
        ids = torch.tensor([[*prompt, *rollout.token_ids[start:stop].tolist()]])
        places = np.flatnonzero(rollout.action_mask[start:stop]) + len(prompt) - 1
        found.append((model(input_ids=ids).logits[0, places] / temperature).log_softmax(-1))
    return torch.cat(found)


def sampled(logp_AV: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    tokens = torch.from_numpy(rollout.token_ids[rollout.action_mask])
    return logp_AV.gather(1, tokens[:, None])[:, 0]


# ---------------------------------------------------------------- advantages


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    return math.sqrt(_mean([(v - _mean(values)) ** 2 for v in values]))


def _max_at_k(rewards: Sequence[float], k: int) -> list[float]:
    if len(rewards) < k:
        return [0.0] * len(rewards)
    found = []
    for i, own in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i]
        with_own = [max((own, *some)) for some in itertools.combinations(others, k - 1)]
        without = [max(some) for some in itertools.combinations(others, min(k, len(others)))]
        found.append(k * (_mean(with_own) - _mean(without)))
    return found


def of_group(s: Setting, members: Sequence[Rollout], greedy: float | None) -> list[float]:
    """Advantages of the rewarded siblings of one group."""
    rewards = [float(r.reward) for r in members]  # type: ignore[arg-type]
    if s.advantage == "remax":
        assert greedy is not None
        return [r - greedy for r in rewards]
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    if s.advantage == "rloo":
        return [r - _mean([o for j, o in enumerate(rewards) if j != i]) for i, r in enumerate(rewards)]
    if s.advantage == "max_at_k":
        return _max_at_k(rewards, s.options["k"])
    if s.advantage == "opo":
        lengths = [int(r.action_mask.sum()) for r in members]
        baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
        return [r - baseline for r in rewards]
    divisor = _std(rewards) + 1e-6 if s.advantage == "grpo" else 1.0
    return [(r - _mean(rewards)) / divisor for r in rewards]


def _over_the_batch(members: Sequence[Sequence[Rollout]]) -> list[list[float]]:
    """REINFORCE++: every token counts the reward of its rollout once."""
    by_token = [float(r.reward) for some in members for r in some for _ in range(int(r.action_mask.sum()))]  # type: ignore[arg-type]
    if len(by_token) < 2 or max(by_token) == min(by_token):
        return [[0.0 for _ in some] for some in members]
    return [[(float(r.reward) - _mean(by_token)) / (_std(by_token) + 1e-6) for r in some] for some in members]  # type: ignore[arg-type]


def terms_of(s: Setting, groups: Sequence[Group]) -> list[Term]:
    """Every rollout that the loss is a mean of, with its coefficient."""
    members = [[r for r in group.rollouts if r.reward is not None and not r.greedy] for group in groups]
    if s.advantage == "reinforce_pp":
        advantages = _over_the_batch(members)
    else:
        advantages = [of_group(s, some, group.greedy_reward()) for some, group in zip(members, groups, strict=True)]
    by_group: list[list[Term]] = []
    for number, (some, values) in enumerate(zip(members, advantages, strict=True)):
        by_group.append([])
        rewards = [float(r.reward) for r in some]  # type: ignore[arg-type]
        factor = 1.0
        if s.options.get("scale"):
            signal = len(rewards) > 1 and max(rewards) != min(rewards)
            factor = 1 / (_std(rewards) + 1e-6) if signal else 0.0
        for rollout, value in zip(some, values, strict=True):
            if s.mask_truncated and rollout.truncated:
                continue
            term = Term(rollout, value, factor)
            if s.in_update:
                term.advantage = float(rollout.reward)  # type: ignore[arg-type]
                term.pool = 0 if s.options.get("scope") == "minibatch" else number
            by_group[-1].append(term)
    _weigh(s, by_group)
    return [term for some in by_group for term in some]


def _weigh(s: Setting, by_group: Sequence[Sequence[Term]]) -> None:
    """Coefficients: the token reduction, over the batch or over each group and then over groups."""
    weighting = s.group_weighting or ("size" if s.loss_type == "dapo" else "equal")
    everyone = [term for some in by_group for term in some]
    means = [some for some in ([everyone] if weighting == "size" else by_group) if some]
    for some in means:
        times = [1 / t.rollout.survival_p if s.unbiased else 1.0 for t in some]
        tokens = sum(t.tokens for t in some)
        for term, n in zip(some, times, strict=True):
            of = {
                "dapo": max(tokens, 1),
                "grpo": len(some) * max(term.tokens, 1),
                "dr_grpo": len(some) * s.max_length,
                "sequence_sum": len(some),
            }[s.loss_type]
            term.coefficient *= n / (of * len(means))


# ---------------------------------------------------------------- the loss


def _bounded(s: Setting, difference_A: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """Log ratios at the correction's level, and its bounds."""
    o = s.correction_options
    level = {"token": difference_A, "sequence": difference_A.sum(), "geometric": difference_A.mean()}
    low, high = o.get("low", 0.0), o.get("high", 8.0)
    return (
        level[o.get("level", "sequence")].expand_as(difference_A),
        math.log(low) if low else -math.inf,
        math.inf if high is None else math.log(high),
    )


def weights_of(s: Setting, terms: Sequence[Term]) -> list[torch.Tensor]:
    """Detached importance weights of the tokens of each rollout."""
    against_old = s.policy_loss == "clip" and s.weigh
    found = []
    differences = [((t.old if against_old else t.logp.detach()) - t.sampler) for t in terms]  # type: ignore[operator]
    for term, d in zip(terms, differences, strict=True):
        if s.correction == "none":
            found.append(torch.ones_like(d))
        elif s.correction == "truncate":
            log_w, low, high = _bounded(s, d)
            found.append(log_w.clamp(low, high).exp().clamp(max=LARGEST_WEIGHT))
        elif s.correction == "mask":
            log_w, low, high = _bounded(s, d)
            outside = (log_w < low) | (log_w > high)
            if s.correction_options.get("only_negative") and not term.advantage < 0:
                outside = torch.zeros_like(outside)
            kept = log_w.exp().clamp(max=LARGEST_WEIGHT) if s.weigh else torch.ones_like(d)
            found.append(torch.where(outside, 0.0, kept))
    if s.correction != "m2po":
        return found
    biting = [d * np.sign(t.advantage) > 0 for t, d in zip(terms, differences, strict=True)]
    squared = sorted(float(x) ** 2 for d, b in zip(differences, biting, strict=True) for x in d[b])
    while squared and _mean(squared) >= 0.04:
        dropped = squared[-1]
        squared = [x for x in squared if x < dropped]
    largest = squared[-1] if squared else -1.0
    for d, b in zip(differences, biting, strict=True):
        kept = d.exp().clamp(max=LARGEST_WEIGHT) if s.weigh else torch.ones_like(d)
        found.append(torch.where(b & (d**2 > largest), 0.0, kept))
    return found


def baselines_of(
    s: Setting, terms: Sequence[Term], weights: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Baselines of the tokens of each rollout, from exact gradients (OPOB) or energies of logits (OTB)."""
    found = [torch.zeros(0)] * len(terms)
    for pool in {t.pool for t in terms}:
        rows = [i for i, t in enumerate(terms) if t.pool == pool and t.tokens and t.coefficient]
        if s.advantage == "otb":
            energies = [
                weights[i] ** 2 * (1 - 2 * terms[i].logp.exp() + (terms[i].probs ** 2).sum(1)).detach() for i in rows
            ]
            for i in rows:
                values = []
                for t in range(terms[i].tokens):
                    there = [
                        (float(e[: t + 1].sum()), terms[j]) for e, j in zip(energies, rows, strict=True) if len(e) > t
                    ]
                    total = sum(w for w, _ in there)
                    rewards = [x.advantage for _, x in there]
                    values.append(sum(w * x.advantage for w, x in there) / total if total else _mean(rewards))
                found[i] = torch.tensor(values, dtype=torch.float64)
            continue
        norms = []
        for i in rows:
            u = -(weights[i] * terms[i].logp).sum() * terms[i].coefficient
            gradient = torch.autograd.grad(u, parameters, retain_graph=True, allow_unused=True)
            norms.append(sum(float((g**2).sum()) for g in gradient if g is not None))
        rewards = [terms[i].advantage for i in rows]
        if rows and sum(norms) > 0:
            baseline = sum(n * r for n, r in zip(norms, rewards, strict=True)) / sum(norms)
        else:
            baseline = _mean(rewards) if rows else 0.0
        for i in rows:
            found[i] = torch.full((terms[i].tokens,), baseline, dtype=torch.float64)
    return found


def loss_of(s: Setting, terms: Sequence[Term], reference: Any, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The loss over all terms, with the graph of `term.logp` and `term.probs`."""
    weights = weights_of(s, terms)
    baselines = baselines_of(s, terms, weights, parameters) if s.in_update else []
    total = torch.zeros((), dtype=torch.float64)
    for i, (term, w) in enumerate(zip(terms, weights, strict=True)):
        if not term.tokens or not term.coefficient:
            continue
        advantage = term.advantage - baselines[i] if s.in_update else torch.tensor(term.advantage, dtype=torch.float64)
        old = term.old if s.policy_loss == "clip" and s.weigh else term.sampler
        log_ratio = term.logp - old  # type: ignore[operator]
        ratio = (log_ratio.mean().expand_as(log_ratio) if s.level == "sequence" else log_ratio).exp()
        if s.policy_loss == "plain":
            per_token = -w * advantage * term.logp
        else:
            clipped = ratio.clamp(1 - s.epsilon, 1 + s.epsilon_high)
            per_token = -w * torch.minimum(ratio * advantage, clipped * advantage)
        if s.beta:
            with torch.no_grad():
                d = sampled(distributions(reference, term.rollout, s.temperature), term.rollout)
            d = term.logp - d
            kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[s.kl_estimator]
            per_token = per_token + s.beta * w * (ratio.detach() if s.policy_loss == "clip" else 1.0) * kl
        entropy = -(term.probs * term.probs.clamp(min=1e-300).log()).sum(1)
        total = total + term.coefficient * (per_token - s.entropy_coef * entropy).sum()
    return total


def update(model: Any, reference: Any, groups: Sequence[Group], s: Setting, lr: float) -> list[float]:
    """Update `model` by SGD; the effective sample size over the rollouts at each iteration."""
    terms, parameters, shares = terms_of(s, groups), list(model.parameters()), []
    for _ in range(s.iterations):
        for term in terms:
            logp_AV = distributions(model, term.rollout, s.temperature)
            term.logp, term.probs = sampled(logp_AV, term.rollout), logp_AV.exp()
            term.old = term.logp.detach() if term.old is None else term.old
        total = loss_of(s, terms, reference, parameters)
        if not total.requires_grad:
            return shares
        gradient = torch.autograd.grad(total, parameters, allow_unused=True)
        gradient = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradient, strict=True)]
        w = [math.exp(float((t.logp.detach() - t.sampler).sum())) for t in terms]
        shares.append(math.fsum(w) ** 2 / math.fsum(x * x for x in w) / len(w))
        norm = math.sqrt(math.fsum(float((g**2).sum()) for g in gradient))
        rate = lr * (math.sqrt(min(1.0, shares[-1])) if s.step_scale == "ess" else 1.0)
        if s.max_grad_norm is not None:
            rate *= min(1.0, s.max_grad_norm / (norm + 1e-6))
        with torch.no_grad():
            for p, g in zip(parameters, gradient, strict=True):
                p -= rate * g
    return shares
