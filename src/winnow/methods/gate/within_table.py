"""What `balance: within` knows of prompts, and how a rule uses it; the arithmetic is in `within`.

Outcomes of a prompt's earlier visits, decayed, are added to a prior with the mean success of all prompts: a Beta
distribution of its pass rate. A rule carries those of the prompts seen of late; all others have the prior.
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
"""Outcomes that the prior is worth."""
DECAY = 0.99
"""Share of an outcome's weight that an optimizer step leaves: after 70 it counts half."""
FORGOTTEN = 0.05
"""Outcomes below which a prompt is as good as new."""
PROMPTS = 4096
"""Remembered; those visited last."""


@dataclass(frozen=True)
class WithinTable:
    """Chances of survival by prompt and score, fixed for a step."""

    failure_B: Annotated[np.ndarray, Packed("f8", "bins")]
    """float64 [bins]: P(bin | failure)."""
    success_B: Annotated[np.ndarray, Packed("f8", "bins")]
    """float64 [bins]: P(bin | success)."""
    size: float
    """Siblings a group."""
    p_min: float
    price: Price
    prior: tuple[float, float]
    """Wins and losses that a prompt begins with, both above 0."""
    ordinals_N: Annotated[np.ndarray, Packed("i8", "seen")]
    """int64 [N], ascending: prompts seen of late."""
    outcomes_N2: Annotated[np.ndarray, Packed("f8", "seen", 2)]
    """float64 [N, 2]: their wins and losses beside the prior."""
    factor: float
    """Factor on the chances, so that they come out at the keep rate."""

    @cached_property
    def _rules(self) -> ScoreModel:
        return ScoreModel(self.failure_B, self.success_B, self.size, self.p_min)

    def beta_of(self, ordinal: int) -> tuple[float, float] | None:
        """Parameters of the Beta distribution of a prompt's pass rate; None if it was not seen of late."""
        at = int(np.searchsorted(self.ordinals_N, ordinal))
        if at == len(self.ordinals_N) or self.ordinals_N[at] != ordinal:
            return None
        return self.prior[0] + float(self.outcomes_N2[at, 0]), self.prior[1] + float(self.outcomes_N2[at, 1])

    @cached_property
    def _rows(self) -> dict[tuple[float, float], np.ndarray]:
        return {}

    def survival(self, ordinal: int, number: int) -> float:
        """Chance to survive of a sibling whose score lies in bin `number`."""
        beta = self.beta_of(ordinal) or self.prior
        if beta not in self._rows:  # prompts one by one, since a product of matrices rounds by the number of its rows
            self._rows[beta] = survival_within(self._rules, rate_weights(*beta), self.price)[0]
        return min(max(self.factor * float(self._rows[beta][number]), self.p_min), 1.0)


class PromptsState(State):
    seen: list[Annotated[tuple[Count, float, float], Loose]]
    asked: Annotated[list[np.ndarray], Columns(INTS, BINS, INTS)]
    new: Annotated[tuple[Count, Count, Probability], Loose]
    table: dict[str, Any] | None


class PromptOutcomes:
    """Wins and losses by prompt, and whose siblings were asked about."""

    def __init__(self, keep_rate: float, p_min: float, capacity: int) -> None:
        self._keep_rate, self._p_min = keep_rate, p_min
        self._seen: dict[int, tuple[float, float]] = {}
        """Prompts by ordinal, last visit last."""
        self._asked = Window(capacity)
        """Ordinal, bin and size of the group."""
        self._new, self._all = 0, 0
        """Siblings asked about in this step, and how many of them of a prompt that was not known."""
        self._share_new = 1.0
        """Share of new ones in the last step."""
        self.table: WithinTable | None = None
        """None until somebody was asked about."""

    def asked(self, ordinal: int, number: int, size: int, *, known: bool) -> None:
        """A sibling came to its token with a score in bin `number`; `known`: the rule had seen its prompt."""
        self._asked.append(ordinal, number, size)
        self._new, self._all = self._new + (not known), self._all + 1

    def visited(self, ordinal: int, judged: Sequence[tuple[bool, float]]) -> None:
        """Outcomes of a visit, at least one: success, and its weight, 1 / (the chance with which it came to be seen).

        They count as much as their weights are worth, (sum w)^2 / sum w^2: a survivor for twenty is one observation.
        """
        label_N, weight_N = np.array(judged, np.float64).T
        worth = float(weight_N.sum() ** 2 / (weight_N**2).sum())
        share = min(float(weight_N @ label_N / weight_N.sum()), 1.0)
        wins, losses = self._seen.pop(ordinal, (0.0, 0.0))
        self._seen[ordinal] = wins + share * worth, losses + (1 - share) * worth
        if len(self._seen) > PROMPTS:
            del self._seen[next(iter(self._seen))]

    def end_step(self, posterior: BinnedPosterior) -> None:
        """Forget a little, and fix what the next step goes by."""
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
        # the next siblings as the last ones, with what is known of their prompts today, and some of them of new prompts
        recent_U, row_M, count_U = np.unique(ordinal_M, return_inverse=True, return_counts=True)
        beta_U2 = np.array([np.add(prior, self._seen.get(n, (0.0, 0.0))) for n in recent_U.tolist()])
        weight_UP = rate_weights(*np.vstack([beta_U2, prior]).T)
        mix_2 = np.array([1 - self._share_new, self._share_new])
        price = price_of(rules, weight_UP, self._keep_rate, np.append(mix_2[0] * count_U, mix_2[1] * len(row_M)))
        survival_UB = survival_within(rules, weight_UP, price)
        # prompt and score tell partly the same, so what is expected to survive is made to be what does
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
