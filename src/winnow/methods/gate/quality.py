"""Prune rollouts while they are generated, so that what survives is half right and half wrong (ARRoL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import comb, exp
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ...base.noise import as_tensor, noise_key, uniform
from ...types import KEEP, Fate, Group, GroupView, Rollout, Token, Verdict
from .calibration import Balance, BinnedPosterior, survival_factor, survival_probabilities
from .deepconf import lowest
from .quality_head import Example, QualityHead
from .quality_stats import Realised
from .window import Window

__all__ = ["Arrol", "ArrolGate", "BinnedPosterior", "survival_probabilities"]

QUALITY_STREAM = 7
"""Keeps these draws apart from other noise."""
REMEMBERED = 2048
"""Rollouts whose scores and lengths are remembered, pruned ones included."""
FIRST_AT = 16
"""Where the first step looks, when no length is known yet; nothing is pruned by then."""

Quality = Literal["head", "confidence", "logprob"]
NEEDS: dict[Quality, frozenset[str]] = {
    "head": frozenset({"hidden", "logp", "last_hidden"}),
    "confidence": frozenset({"logp", "confidence"}),
    "logprob": frozenset({"logp"}),
}


@dataclass(frozen=True)
class Arrol:
    """Prune single rollouts at a token, by their predicted chance of success, towards a balanced group (ARRoL)."""

    quality: Quality = "head"
    """What predicts: a trained head, DeepConf's trace confidence, or the mean log-probability so far."""
    at: int | None = None
    """Tokens of a turn after which the decision falls; None: `share` of a quantile of recent lengths."""
    quantile: float = 0.5
    share: float = 0.5
    keep_rate: float = 0.5
    target: float = 0.5
    """Share of right answers that survivors should have."""
    strength: float = 1.0
    p_min: float = 0.05
    balance: Balance | Literal["distinct"] = "target"
    """`distinct`: not by success, but less often the more siblings are expected to have said the same so far."""
    cold_start: int = 20
    """Optimizer steps in which the predictor learns and nothing is pruned."""
    min_survivors: int | None = None
    """Of a group; None: as many as the advantage needs (2 where nobody says)."""
    unbiased: bool = False
    """Weight what survivors add to the loss by 1 / (their chance of survival), as Horvitz and Thompson do."""

    def __post_init__(self) -> None:
        if self.at is not None and self.at < 1:
            raise ValueError(f"at counts tokens from 1, not {self.at}")
        if not (0 < self.quantile <= 1 and 0 < self.share <= 1):
            raise ValueError(f"quantile and share must lie in (0, 1], not {self.quantile}, {self.share}")
        if self.cold_start < 1:
            raise ValueError(
                f"cold_start must be at least 1 step, not {self.cold_start}: an untrained predictor is none"
            )
        if self.min_survivors is not None and self.min_survivors < 0:
            raise ValueError(f"min_survivors must not be negative, not {self.min_survivors}")
        balance = "target" if self.balance == "distinct" else self.balance
        survival_probabilities([], [], self.keep_rate, self.target, self.strength, self.p_min, balance)
        if self.p_min > self.keep_rate:
            raise ValueError(f"p_min={self.p_min} must not be above keep_rate={self.keep_rate}: it would replace it")
        if self.unbiased and self.p_min == 0:
            raise ValueError("unbiased needs p_min above 0: what never survives cannot be weighted")
        for name in ("quantile", "share") if self.at is not None else ():
            if getattr(self, name) != getattr(Arrol, name):
                raise ValueError(f"{name} has no effect beside at: {self.at}; remove one of them")
        without = {"target": (), "literal": ("target",), "distinct": ("target", "strength")}[self.balance]
        for name in without:
            if getattr(self, name) != getattr(Arrol, name):
                raise ValueError(f"{name} has no effect with balance: {self.balance}; remove it")

    def build(self, seed: int) -> ArrolGate:
        return ArrolGate(self, seed)


class _Asked(NamedTuple):
    """A rollout at its detection token."""

    hidden: np.ndarray | None
    logp: float
    score: float
    """In [0, 1]."""
    q: float
    tokens: int
    """Of the turn in which it was asked."""
    chance: float
    """With which this gate let it live."""


class ArrolGate:
    """Head, calibration and survival are fixed within an optimizer step, and learn between two: so neither the order in
    which rollouts come, nor what runs beside them, changes a decision.

    A rollout survives if its draw is below its chance of survival, or among the `min_survivors` lowest of its group;
    the verdict's probability is that of either. Rollouts that end before the detection token, further turns of a
    rollout that was decided, and those whose score is not finite survive.
    """

    def __init__(self, options: Arrol, seed: int) -> None:
        self.needs = NEEDS[options.quality]
        self.options = options
        self.head = QualityHead(seed)
        self.least = 2 if options.min_survivors is None else options.min_survivors
        """Survivors of a group, at least."""
        self.success_reward = 1.0
        """The least reward of a right answer; the run's own."""
        self._seed = seed
        self._steps = 0
        self._at = options.at or FIRST_AT
        self._posterior = BinnedPosterior(capacity=REMEMBERED)
        self._bins = Window(REMEMBERED)
        self._raw = Window(REMEMBERED)
        """Scores as they are, of predictors that know no scale."""
        self._scale_M = np.empty(0)
        """What recent rollouts score by the predictor of now, ascending."""
        self._lengths = Window(REMEMBERED)
        """Length of a rollout's last turn and how many rollouts it stands for."""
        self._asked: dict[tuple[int, int], _Asked | None] = {}
        """None: its score was not finite."""
        self._draws: dict[int, tuple[list[float], float]] = {}
        self._q_B = self._posterior.table()
        self._survival_B = np.full(self._posterior.bins, options.keep_rate)
        self._novelty = Window(REMEMBERED)
        """1 / (how many of a group are expected to have said the same by then: itself and, by its chance, others)."""
        self._factor = 1.0
        self._realised = Realised()

    @property
    def at(self) -> Token:
        return Token(self._at)

    @property
    def cold(self) -> bool:
        """Whether the predictor still only learns."""
        return self._steps < self.options.cold_start

    def decide(self, view: GroupView) -> Verdict:
        return self.decide_many([view])[0]

    def decide_many(self, views: Sequence[GroupView]) -> list[Verdict]:
        """Of each what `decide` says: nobody's verdict depends on who else is asked."""
        new = {(v.visit.number, v.sibling): v for v in views if (v.visit.number, v.sibling) not in self._asked}
        verdicts = dict(zip(new, self._decide(list(new.values())), strict=True)) if new else {}
        return [verdicts.pop((v.visit.number, v.sibling), KEEP) for v in views]

    def _decide(self, views: list[GroupView]) -> list[Verdict]:
        logp_N = np.array([_mean(v.logp) for v in views])
        scores = self._scores(views, logp_N)
        if not self.cold:
            self._draw(views)
        return [self._verdict(*each) for each in zip(views, logp_N.tolist(), scores, strict=True)]

    def _verdict(self, view: GroupView, logp: float, score: float | None) -> Verdict:
        assert view.sibling is not None
        assert isinstance(view.checkpoint, Token)
        key, n = (view.visit.number, view.sibling), view.checkpoint.n
        if score is None:
            self._realised.not_finite += 1
            self._asked[key] = None
            return Verdict(True, "its score is not finite")
        number = self._posterior.bin_of(score)
        self._bins.append(number)
        novelty = 1 / (1 + (len(view.running) - 1) * exp(min(logp * n, 0.0)))
        self._novelty.append(novelty)
        q = float(self._q_B[number])
        if self.cold:
            self._asked[key] = _Asked(view.hidden, logp, score, q, n, 1.0)
            self._realised.decided(1.0)
            return KEEP
        survival = self._survival(number, novelty)
        draws, enough = self._draws[view.visit.number]
        chance = survival + _forced_beyond(survival, len(draws), self.least)
        self._realised.decided(chance)
        self._asked[key] = _Asked(view.hidden, logp, score, q, n, chance)
        if draws[view.sibling] < survival or draws[view.sibling] <= enough:
            return Verdict(True, probability=chance)
        reason = f"pruned at token {n}: predicted success {q:.2f}, survival {survival:.2f}"
        return Verdict(False, reason, 1 - chance)

    def _survival(self, number: int, novelty: float) -> float:
        if self.options.balance == "distinct":
            return min(max(self._factor * novelty, self.options.p_min), 1.0)
        return float(self._survival_B[number])

    def _scores(self, views: list[GroupView], logp_N: np.ndarray) -> list[float | None]:
        """Their ranks among what recent rollouts would score today, in [0, 1]; None for what is not finite.

        A head that learns moves its scale every step. With ranks the bins stay equally full, and with them the keep
        rate stays what it should be; with the logistic function it swings widely from step to step.
        """
        if self.options.quality == "head":
            hidden_NH = np.array([v.hidden for v in views])
            raw_N = self.head.scores(hidden_NH, logp_N)
        elif self.options.quality == "confidence":
            raw_N = np.array([lowest(v.confidence) for v in views if v.confidence is not None])
        else:
            raw_N = logp_N
        finite_N = np.isfinite(raw_N)
        if self.options.quality == "head":
            self.head.remember(hidden_NH[finite_N], logp_N[finite_N])
        else:
            self._raw.extend(raw_N[finite_N])
        rank_N = np.searchsorted(self._scale_M, raw_N) / len(self._scale_M) if len(self._scale_M) else raw_N * 0 + 0.5
        return [rank if finite else None for rank, finite in zip(rank_N.tolist(), finite_N.tolist(), strict=True)]

    def _draw(self, views: list[GroupView]) -> None:
        """For each new group one draw a sibling, and the highest of those that survive whatever their chance."""
        new = {v.visit.number: v for v in views if v.visit.number not in self._draws}
        sizes = [len(v.running) for v in new.values()]
        keys = [noise_key(self._seed, QUALITY_STREAM, v.visit.prompt.ordinal, v.visit.epoch) for v in new.values()]
        keys_N = as_tensor(keys).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        draws = iter(uniform(keys_N, torch.cat([torch.arange(0), *map(torch.arange, sizes)])).tolist())
        for number, size in zip(new, sizes, strict=True):
            draws_G = list(islice(draws, size))
            self._draws[number] = draws_G, sorted(draws_G)[min(self.least, size) - 1] if self.least else -1.0

    def observe(self, group: Group) -> None:
        """Learn from whoever came to an end; outcomes count 1 / survival, for those of the pruned are not seen."""
        self._draws.pop(group.visit.number, None)
        for rollout in group.siblings:
            key = group.visit.number, rollout.sibling
            early, asked = key not in self._asked, self._asked.pop(key, None)
            if asked is not None:
                self._realised.ended(pruned=rollout.fate == Fate.PRUNED)
            if rollout.reward is None or not rollout.turns:
                continue
            label, weight = self._right(rollout.reward), 1 / rollout.survival_p
            self._learn(rollout.last_hidden, _mean(rollout.sampler_logp[rollout.action_mask]), label, weight)
            self._lengths.append(rollout.turns[-1].stop - rollout.turns[-1].start, weight)
            self._realised.ended_early += early
            if asked is not None:
                self._posterior.observe(asked.score, label, weight)
                self._learn(asked.hidden, asked.logp, label, weight)
                saved = weight * (1 - asked.chance) * _sampled_after(rollout, asked.tokens)
                self._realised.seen(asked.q, label, weight, saved)
        survivors = sum(r.fate != Fate.PRUNED for r in group.siblings)
        labels = [self._right(r.reward) for r in group.siblings if r.reward is not None]
        self._realised.group(labels, survivors, len(group.siblings))

    def _right(self, reward: float) -> bool:
        return reward >= self.success_reward - 1e-8  # as evaluations count

    def _learn(self, hidden: np.ndarray | None, logp: float, label: bool, weight: float) -> None:
        """Of the middle of a rollout, or of its end: the head is asked there, too, when answers are voted on."""
        if hidden is not None and self.options.quality == "head":
            self.head.observe(Example(hidden, logp, label, weight))

    def end_step(self) -> None:
        """An optimizer step is over: learn, and fix what the next step goes by."""
        o = self.options
        self._steps += 1
        if o.quality == "head":
            self.head.fit()
        self._set_scale()
        self._q_B = self._posterior.table()
        buffer_M = self._q_B[self._bins.columns()[0]] if len(self._bins) else np.empty(0)
        if o.balance == "distinct":
            if len(self._novelty):
                self._factor = survival_factor(self._novelty.columns()[0], o.keep_rate, o.p_min)
        else:
            self._survival_B = survival_probabilities(
                self._q_B, buffer_M, o.keep_rate, o.target, o.strength, o.p_min, o.balance
            )
        if o.at is None and len(self._lengths):
            length_N, weight_N = self._lengths.columns()
            order_N = np.argsort(length_N, kind="stable")
            reached = int(np.searchsorted(weight_N[order_N].cumsum(), o.quantile * weight_N.sum()))
            self._at = max(1, round(o.share * length_N[order_N[min(reached, len(length_N) - 1)]]))
        self._realised = Realised()

    def _set_scale(self) -> None:
        if self.options.quality == "head":
            self._scale_M = np.sort(self.head.recent_scores().astype(np.float64))
        elif len(self._raw):
            self._scale_M = np.sort(self._raw.columns()[0])

    def metrics(self) -> dict[str, float]:
        """Of this step."""
        found = self._realised.metrics() | {
            "detection_length": float(self._at),
            "cold": float(self.cold),
            "one_class": float(min(self._posterior.labels) == 0),
            "target": self.options.target,
        }
        found |= {"head_resets": float(self.head.resets)} if self.options.quality == "head" else {}
        return {f"gate/arrol/{name}": value for name, value in found.items()}

    def save(self, directory: Path) -> None:
        """Write the head beside a checkpoint's or the finished model's weights."""
        self.head.save(directory)

    def state_dict(self) -> dict[str, Any]:
        """Taken between steps, when nothing is in flight."""
        return {
            "steps": self._steps,
            "at": self._at,
            "head": self.head.state_dict(),
            "posterior": self._posterior.state_dict(),
            "bins": self._bins.state_dict(),
            "raw": self._raw.state_dict(),
            "lengths": self._lengths.state_dict(),
            "survival": self._survival_B.tolist(),
            "novelty": self._novelty.state_dict(),
            "factor": self._factor,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._at = int(state["steps"]), int(state["at"])
        self.head.load_state_dict(state["head"])
        self._posterior.load_state_dict(state["posterior"])
        self._q_B = self._posterior.table()
        self._bins.load_state_dict(state["bins"])
        self._raw.load_state_dict(state["raw"])
        self._lengths.load_state_dict(state["lengths"])
        self._novelty.load_state_dict(state["novelty"])
        self._factor = float(state["factor"])
        self._set_scale()
        self._survival_B = np.array(state["survival"], np.float64)


def _sampled_after(rollout: Rollout, n: int) -> int:
    """Tokens that it sampled after the first turn that had `n`, from its n-th on."""
    start = next(turn.start for turn in rollout.turns if turn.stop - turn.start >= n)
    return int(np.count_nonzero(rollout.action_mask[start + n :]))


def _mean(values_N: np.ndarray | None) -> float:
    """What `values_N.mean()` is, in a fifth of the time."""
    assert values_N is not None
    return float(np.add.reduce(values_N) / len(values_N))


@lru_cache(maxsize=4096)
def _forced_beyond(p: float, size: int, least: int) -> float:
    """Chance that a draw is not below p, but among the `least` lowest of `size` draws.

    The k-th lowest of n uniform draws is Beta(k, n + 1 - k), and each draw is the k-th with chance 1 / n.
    """
    if least >= size:
        return 1 - p
    # P(draw > p and fewer than `least` others below it) = sum over k <= least of P(k-th lowest > p) / n
    n, total = size, 0.0
    for k in range(1, least + 1):
        total += sum(comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k)) / n
    return total
