"""Audits of rules: now and then a removal is overridden at random and runs on, to see what the rule got wrong.

A *removal* is a skip of a selector or a stop of a gate. With a known probability it is overridden; the finished group
shows what would have been lost. `estimates.py` turns the few that were overridden into statements on all the others.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...base.noise import as_tensor, noise_key, uniform
from ...types import Checkpoint, EnvStep, Fate, Group, GroupView, Token, Verdict
from ..advantage import Advantage
from ..filter.zero_variance import is_zero_variance
from . import Gate, decide_many
from .estimates import Estimate, Sums

AUDIT_STREAM = 4
"""Keeps the draws of audits apart from other noise."""
WINDOW = 25
"""Steps after which a removal counts e times less for the controller."""


class RuleAudit:
    """Draws the overrides of one rule, keeps its account, and estimates what the rule got wrong. Pure bookkeeping.

    `epsilon`: probability of an override. With `max_signal_loss` it is the least probability, and a controller steers
    the actual one so that the removals carried out hold at most that share of all signal. It starts at 1: nothing is
    removed until there is evidence. After each step

        probability = clip(1 - max_signal_loss / U, epsilon, 1),

    U being the upper bound of the share of the signal that all removals of about the last `WINDOW` steps hold, carried
    out or not. So (1 - probability) U, a bound of the share that is lost, never exceeds `max_signal_loss`: for any
    rule, random or not, as long as it changes slowly beside `WINDOW`. An abrupt change is noticed within a fraction of
    it. What is bounded is the expected loss; which removals the draws hit is luck, and evens out.
    Raises ValueError unless 0 < epsilon <= 1 and 0 < max_signal_loss < 1.
    """

    def __init__(self, name: str, epsilon: float, max_signal_loss: float | None = None, *, seed: int = 0) -> None:
        if not 0 < epsilon <= 1:
            raise ValueError(f"epsilon must lie in (0, 1], not {epsilon}")
        if max_signal_loss is not None and not 0 < max_signal_loss < 1:
            raise ValueError(f"max_signal_loss must lie in (0, 1), not {max_signal_loss}")
        self.name = name
        self.epsilon = epsilon
        self.max_signal_loss = max_signal_loss
        self.probability = epsilon if max_signal_loss is None else 1.0
        """Of an override, now."""
        self.largest = 0.0
        """Largest signal seen, kept ones included."""
        self.whole, self.recent = Sums(), Sums()
        self._key = seed, AUDIT_STREAM, zlib.crc32(name.encode())

    def overrides(self, last_N: np.ndarray, *key: int) -> np.ndarray:
        """bool [N]: which of the removals (*key, last) are overridden, at `probability`.

        A function of seed, name, key and probability only: neither order nor batching changes it.
        """
        noise = as_tensor([noise_key(*self._key, *key)])
        drawn: np.ndarray = uniform(noise, torch.from_numpy(last_N.astype(np.int64))).numpy()
        return drawn < self.probability

    def override(self, *key: int) -> tuple[bool, float]:
        """Whether the removal `key` (prompt ordinal, epoch, sibling ...) is overridden, and with what probability."""
        *before, last = key
        return bool(self.overrides(np.array([last]), *before)[0]), self.probability

    def removed(self, n: int = 1) -> None:
        """`n` removals were carried out, at the present probability of an override."""
        for sums in (self.whole, self.recent):
            sums.remove(self.probability, n)

    def audited(self, probability: float, signal: float, tokens: float) -> None:
        """A removal that was overridden with `probability` has finished.

        `signal`: squared norm of the advantages it turned out to have, 0 if it was worthless; `tokens`: sampled ones
        that the removal would have saved.
        """
        self.largest = max(self.largest, float(signal))
        for sums in (self.whole, self.recent):
            sums.audit(probability, float(signal), float(tokens))

    def kept(self, signal: float) -> None:
        """Something that the rule let pass has finished."""
        self.largest = max(self.largest, float(signal))
        for sums in (self.whole, self.recent):
            sums.kept_signal += float(signal)

    def precision(self) -> Estimate:
        """Share of the removals, carried out or not, that were worthless."""
        return self.whole.precision()

    def signal_lost(self) -> Estimate:
        """Squared advantage norm of what was removed, over that of everything."""
        return self.whole.signal_lost(self.largest)

    def tokens_saved(self) -> Estimate:
        """Tokens that the removals carried out would have cost."""
        return self.whole.tokens_saved()

    def end_step(self) -> None:
        """An optimizer step is over: steer the probability, and let the recent sums fade."""
        if self.max_signal_loss is not None and self.recent.removed + self.recent.audited > 0:
            bound = self.recent.signal_removed(self.largest).high
            self.probability = min(1.0, max(self.epsilon, 1 - self.max_signal_loss / max(bound, 1e-12)))
        self.recent.decay(math.exp(-1 / WINDOW))

    def metrics(self) -> dict[str, float]:
        """Over the whole run, under `audit/<name>/`; what is not known yet is left out."""
        found = {
            "audited": self.whole.audited,
            "removed": self.whole.removed,
            "override_probability": self.probability,
            "carried_out": 1 - self.probability,
        }
        for key in ("precision", "signal_lost", "tokens_saved"):
            value, low, high = getattr(self, key)()
            found |= {key: value, f"{key}_low": low, f"{key}_high": high}
        return {f"audit/{self.name}/{key}": float(value) for key, value in found.items() if math.isfinite(value)}

    def state_dict(self) -> dict[str, Any]:
        sums = {"whole": self.whole.state_dict(), "recent": self.recent.state_dict()}
        return {"probability": self.probability, "largest": self.largest} | sums

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.probability, self.largest = float(state["probability"]), float(state["largest"])
        self.whole, self.recent = Sums.from_state(state["whole"]), Sums.from_state(state["recent"])


def survival(p: float, epsilon: float) -> float:
    """p + (1 - p) epsilon: chance to come through when what a rule removes is overridden with probability `epsilon`.

    `p` is the chance to come through the rule alone, 0 or 1 if it is not random. Whichever way a survivor came, through
    the rule or an override, this is the probability whose inverse is its Horvitz-Thompson weight: epsilon where a
    deterministic rule was overridden, 1 where it keeps, and in between where the rule itself is random.
    """
    return p + (1 - p) * epsilon


def keep_probability(verdict: Verdict) -> float:
    """The chance with which the rule that gave this verdict would keep."""
    return verdict.probability if verdict.keep else 1 - verdict.probability


def squared_advantages(group: Group, advantage: Advantage) -> np.ndarray | None:
    """float64 [G], 0 for absent members; None where failures left too few rewards to tell: that is no evidence.

    What another rule stopped has no signal: had this one stopped it first, nothing more would have been lost. An
    advantage that looks at the whole batch is given the group alone.
    """
    rewards_G = group.rewards()
    failed = any(r.fate == Fate.FAILED for r in group.rollouts)
    if np.count_nonzero(~np.isnan(rewards_G)) < advantage.smallest_group:
        return None if failed else np.zeros(len(rewards_G))
    if advantage.group_relative and is_zero_variance(rewards_G):  # equal but for rounding: no filter would keep it
        return np.zeros(len(rewards_G))
    if advantage.greedy_baseline and group.greedy_reward() is None:
        return None
    squares: np.ndarray = np.nan_to_num(advantage.of_batch([group])[0]) ** 2
    return squares


class AuditedGate(Gate):
    """Wraps a gate: its stops are overridden as `audit` draws, once for each sibling or group.

    A token gate is asked at every turn that reaches its checkpoint; a sibling whose stop was overridden then runs to
    its end, and counts as one removal. So does a group at a gate of several environment steps. `advantage` is the one
    that the run trains with.
    """

    def __init__(self, gate: Gate, audit: RuleAudit, advantage: Advantage) -> None:
        self.gate = gate
        self.audit = audit
        self.advantage = advantage
        self._chance: dict[tuple[int, int | None], float] = {}
        """By visit and sibling, the probability with which the gate alone would have let it come so far."""
        self._overridden: dict[tuple[int, int | None], tuple[float, int]] = {}
        """By visit and sibling: probability of the override, and the turns finished by the checkpoint."""

    @property
    def at(self) -> Checkpoint | tuple[EnvStep, ...]:  # type: ignore[override]
        return self.gate.at

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.gate.needs

    def decide(self, view: GroupView) -> Verdict:
        return self.decide_many([view])[0]

    def decide_many(self, views: Sequence[GroupView]) -> list[Verdict]:
        return [self._audited(view, v) for view, v in zip(views, decide_many(self.gate, views), strict=True)]

    def _audited(self, view: GroupView, verdict: Verdict) -> Verdict:
        """The gate's verdict, or its override.

        A sibling has one draw for all its turns, so it survives them with `survival(p, epsilon)` if p is its chance to
        survive them by the gate alone; the verdict's probability is the factor by which this turn has changed that.
        """
        key = view.visit.number, view.sibling
        if not verdict.keep and key not in self._overridden:
            sibling = () if view.sibling is None else (view.sibling,)
            overridden, epsilon = self.audit.override(view.visit.prompt.ordinal, view.visit.epoch, *sibling)
            if overridden:
                at = view.checkpoint
                turns = at.k if isinstance(at, EnvStep) else len(view.actions[view.sibling or 0])
                self._overridden[key] = epsilon, turns
            else:
                self.audit.removed()
        goes_on = verdict.keep or key in self._overridden
        epsilon = self._overridden[key][0] if key in self._overridden else self.audit.probability
        before = self._chance.get(key, 1.0)
        after = self._chance[key] = before * keep_probability(verdict)
        survives = survival(after, epsilon) / survival(before, epsilon)
        reason = verdict.reason if verdict.keep or not goes_on else f"audit: {verdict.reason}"
        return Verdict(goes_on, reason, survives if goes_on else 1 - survives)

    def observe(self, group: Group) -> None:
        """The gate learns first, also from what was overridden; then the account is kept."""
        self.gate.observe(group)
        keys = [(group.visit.number, s) for s in (None, *(r.sibling for r in group.rollouts))]
        overridden = {key[1]: self._overridden.pop(key) for key in keys if key in self._overridden}
        for key in keys:
            self._chance.pop(key, None)
        signal_G = squared_advantages(group, self.advantage)
        if signal_G is None:
            return
        at = self.at
        if not isinstance(at, Token):
            override = overridden.get(None)
            later = [turn for rollout in group.rollouts for turn in rollout.turns[override[1] if override else 0 :]]
            tokens = float(sum(turn.stop - turn.start for turn in later))
            self._book(override, float(signal_G.sum()), tokens)
            return
        for rollout, signal in zip(group.rollouts, signal_G.tolist(), strict=True):
            if rollout.fate != Fate.FAILED:
                override = overridden.get(rollout.sibling)
                start = rollout.turns[override[1]].start + at.n if override else 0
                self._book(override, signal, float(rollout.action_mask[start:].sum()))

    def _book(self, override: tuple[float, int] | None, signal: float, tokens: float) -> None:
        if override is None:
            self.audit.kept(signal)
        else:
            self.audit.audited(override[0], signal, tokens)

    def end_step(self) -> None:
        self.gate.end_step()
        self.audit.end_step()

    def metrics(self) -> dict[str, float]:
        return self.gate.metrics() | self.audit.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Taken between steps, when nothing is in flight; so what is remembered by visit is not part of it."""
        return {"gate": self.gate.state_dict(), "audit": self.audit.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gate.load_state_dict(state["gate"])
        self.audit.load_state_dict(state["audit"])
