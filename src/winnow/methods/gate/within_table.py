"""State of `balance: within`: outcomes by prompt and the table a rule uses; the arithmetic is in `within`.

A prompt's earlier outcomes, decayed, are added to a prior with the mean success of all prompts: a Beta distribution of
its pass rate. A rule carries the distributions of recent prompts; all others have the prior.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import TypeAdapter

from ...base.array_json import Packed
from ...base.state import Count, Loose, Probability, State, at
from .calibration import BINS, BinnedPosterior, survival_factor
from .window import INTS, Columns, Window
from .within import Price, ScoreModel, price_of, rate_weights, survival_within

PRIOR = 4.0
"""Weight of the prior, in outcomes."""
DECAY = 0.99
"""Share of an outcome's weight left after an optimizer step: half after 70."""
FORGOTTEN = 0.05
"""Outcomes below which a prompt counts as new."""
PROMPTS = 4096
"""Prompts kept, by last visit."""


@dataclass(frozen=True)
class WithinTable:
    """Chances of survival by prompt and score, fixed for a step."""

    failure_B: Annotated[np.ndarray, Packed("f8", "bins")]
    """float64 [bins]: P(bin | failure)."""
    success_B: Annotated[np.ndarray, Packed("f8", "bins")]
    """float64 [bins]: P(bin | success)."""
    size: float
    """Siblings per group."""
    p_min: float
    price: Price
    prior: tuple[float, float]
    """Wins and losses that a prompt begins with, both above 0."""
    ordinals_N: Annotated[np.ndarray, Packed("i8", "seen")]
    """int64 [N], ascending: recent prompts."""
    outcomes_N2: Annotated[np.ndarray, Packed("f8", "seen", 2)]
    """float64 [N, 2]: their wins and losses, without the prior."""
    factor: float
    """Factor on the chances that makes them meet the keep rate."""

    @cached_property
    def _rules(self) -> ScoreModel:
        return ScoreModel(self.failure_B, self.success_B, self.size, self.p_min)

    def beta_of(self, ordinal: int) -> tuple[float, float] | None:
        """Return the Beta parameters of a prompt's pass rate; None if it is not recent."""
        at = int(np.searchsorted(self.ordinals_N, ordinal))
        if at == len(self.ordinals_N) or self.ordinals_N[at] != ordinal:
            return None
        return self.prior[0] + float(self.outcomes_N2[at, 0]), self.prior[1] + float(self.outcomes_N2[at, 1])

    @cached_property
    def _rows(self) -> dict[tuple[float, float], np.ndarray]:
        return {}

    def survival(self, ordinal: int, number: int) -> float:
        """Return the survival chance of a sibling whose score lies in bin `number`."""
        beta = self.beta_of(ordinal) or self.prior
        if beta not in self._rows:  # prompts one by one, since a matrix product rounds by its number of rows
            self._rows[beta] = survival_within(self._rules, rate_weights(*beta), self.price)[0]
        return min(max(self.factor * float(self._rows[beta][number]), self.p_min), 1.0)


class PromptsState(State):
    seen: list[Annotated[tuple[Count, float, float], Loose]]
    asked: Annotated[list[np.ndarray], Columns(INTS, BINS, INTS)]
    new: Annotated[tuple[Count, Count, Probability], Loose]
    table: dict[str, Any] | None


class PromptOutcomes:
    """Wins and losses by prompt, and the siblings decided on."""

    def __init__(self, keep_rate: float, p_min: float, capacity: int) -> None:
        self._keep_rate, self._p_min = keep_rate, p_min
        self._seen: dict[int, tuple[float, float]] = {}
        """Prompts by ordinal, last visit last."""
        self._asked = Window(capacity)
        """Ordinal, bin and size of the group."""
        self._new, self._all = 0, 0
        """Siblings decided on in this step: those of new prompts, and all."""
        self._share_new = 1.0
        """Share of new ones in the last step."""
        self.table: WithinTable | None = None
        """None until the first decision."""

    def asked(self, ordinal: int, number: int, size: int, *, known: bool) -> None:
        """Record a sibling at its token with a score in bin `number`; `known`: the rule had seen its prompt."""
        self._asked.append(ordinal, number, size)
        self._new, self._all = self._new + (not known), self._all + 1

    def visited(self, ordinal: int, judged: Sequence[tuple[bool, float]]) -> None:
        """Record outcomes of a visit, at least one: success, and its weight, 1 / (its chance to be seen).

        They count (sum w)^2 / sum w^2 observations: one survivor of twenty is one observation.
        """
        label_N, weight_N = np.array(judged, np.float64).T
        worth = float(weight_N.sum() ** 2 / (weight_N**2).sum())
        share = min(float(weight_N @ label_N / weight_N.sum()), 1.0)
        wins, losses = self._seen.pop(ordinal, (0.0, 0.0))
        self._seen[ordinal] = wins + share * worth, losses + (1 - share) * worth
        if len(self._seen) > PROMPTS:
            del self._seen[next(iter(self._seen))]

    def end_step(self, posterior: BinnedPosterior) -> None:
        """Decay outcomes, and fix the table of the next step."""
        decayed = {n: (DECAY * wins, DECAY * losses) for n, (wins, losses) in self._seen.items()}
        self._seen = {n: pair for n, pair in decayed.items() if sum(pair) > FORGOTTEN}
        if not len(self._asked):
            return
        self._share_new = self._new / self._all if self._all else self._share_new
        self._new = self._all = 0
        ordinal_M, bin_M, size_M = self._asked.columns()
        share = min(max(posterior.success, 0.02), 0.98)
        prior, known = (PRIOR * share, PRIOR * (1 - share)), sorted(self._seen)
        outcomes_N2 = np.array([self._seen[n] for n in known], np.float64).reshape(-1, 2)
        failure_B, success_B = posterior.likelihood(False), posterior.likelihood(True)
        rules = ScoreModel(failure_B, success_B, float(size_M.mean()), self._p_min)
        # model the next siblings on the last ones, with today's knowledge of their prompts and some new prompts
        recent_U, row_M, count_U = np.unique(ordinal_M, return_inverse=True, return_counts=True)
        beta_U2 = np.array([np.add(prior, self._seen.get(n, (0.0, 0.0))) for n in recent_U.tolist()])
        weight_UP = rate_weights(*np.vstack([beta_U2, prior]).T)
        mix_2 = np.array([1 - self._share_new, self._share_new])
        price = price_of(rules, weight_UP, self._keep_rate, np.append(mix_2[0] * count_U, mix_2[1] * len(row_M)))
        survival_UB = survival_within(rules, weight_UP, price)
        # prompt and score overlap, so expected survival is rescaled to the actual one
        raw_M2 = np.column_stack([survival_UB[row_M, bin_M], survival_UB[-1, bin_M]])
        self.table = WithinTable(
            failure_B=failure_B,
            success_B=success_B,
            size=rules.size,
            p_min=self._p_min,
            price=price,
            prior=prior,
            ordinals_N=np.array(known, np.int64),
            outcomes_N2=outcomes_N2,
            factor=survival_factor(raw_M2, self._keep_rate, self._p_min, np.broadcast_to(mix_2, raw_M2.shape)),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": [[n, *pair] for n, pair in self._seen.items()],
            "asked": self._asked.state_dict(),
            "new": [self._new, self._all, self._share_new],
            "table": None if self.table is None else _TABLE.dump_python(self.table, mode="json"),
        }

    def load_state_dict(self, state: Mapping[str, Any] | PromptsState, bins: int) -> None:
        saved = PromptsState.of(state, bins=bins)
        self._seen = {ordinal: (wins, losses) for ordinal, wins, losses in saved.seen}
        self._asked.load(saved.asked)
        self._new, self._all, self._share_new = saved.new
        with at("table"):
            self.table = None if saved.table is None else _TABLE.validate_python(saved.table, context={"bins": bins})


_TABLE = TypeAdapter(WithinTable)
