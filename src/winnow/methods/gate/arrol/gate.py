"""Prune rollouts while they are generated, so that survivors are half right and half wrong (ARRoL)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from ....base.state import Count, Probability, State
from ....config.options import CHECKED
from ....types import Decision, Fate, Group, Rollout, Token
from ...base import Chart, RunFacts, refuse_unused
from ..base import Gate, GateContext
from .calibration import (
    BINS,
    FLOATS,
    INTS,
    BinnedPosterior,
    Columns,
    PosteriorState,
    Window,
    bin_of,
    survival_factor,
    survival_probabilities,
)
from .head import LEARNING_RATE, WIDTH, HeadState, QualityHead, mean_logp
from .rule import ArrolRule
from .stats import Realised

MAX_ROLLOUTS = 2048
"""Rollouts whose scores and lengths are kept, pruned ones included."""
FIRST_DETECTION_TOKEN = 16
"""Detection token of the first step, before any length is known; nothing is pruned yet."""


@dataclass(frozen=True, config=CHECKED)
class Arrol:
    """Prune single rollouts at a token, by their predicted chance of success, towards a balanced group (ARRoL)."""

    head_width: PositiveInt = WIDTH
    head_lr: Annotated[float, Field(gt=0, lt=1)] = LEARNING_RATE
    bins: Annotated[int, Field(ge=2, le=1000)] = 20
    """Number of bins of scores' ranks, each with a chance of success."""
    at: PositiveInt | None = None
    """Tokens of a turn after which the gate decides; None: `share` of a quantile of recent lengths."""
    quantile: Annotated[float, Field(gt=0, le=1)] = 0.5
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    keep_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    target: Probability = 0.5
    """Wanted share of right answers among survivors."""
    strength: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    p_min: Probability = 0.05
    balance: Literal["target", "distinct"] = "target"
    """`distinct`: ignore success; prune less often the more siblings are expected to have sampled the same tokens so
    far."""
    cold_start: PositiveInt = 20
    """Optimizer steps in which the predictor learns and nothing is pruned."""
    min_survivors: NonNegativeInt | None = None
    """Fewest survivors of a group; None: as many as the advantage needs (2 if unknown)."""

    def __post_init__(self) -> None:
        if self.p_min > self.keep_rate:
            raise ValueError(f"p_min={self.p_min} must not be above keep_rate={self.keep_rate}: it would replace it")
        if self.at is not None:
            refuse_unused(self, ("quantile", "share"), f"with at: {self.at}; remove one of them")
        if self.balance == "distinct":
            refuse_unused(self, ("target", "strength"), f"with balance: {self.balance}; remove it")

    def problems(self, run: RunFacts) -> Iterator[str]:
        """Yield settings that leave nothing to prune."""
        c, needed = run.config, run.least_rewards
        least = needed if self.min_survivors is None else self.min_survivors
        if sum(isinstance(gate, Arrol) for gate in run.options["gates"]) > 1:
            yield "arrol: only one is allowed, as two would draw the same numbers; remove one"
        if self.at is not None and self.at >= c.max_completion_length:
            yield (
                f"arrol: at: {self.at} comes after max_completion_length={c.max_completion_length}, so nothing would "
                "be pruned; lower it, or leave it out"
            )
        if least >= run.smallest_group:
            yield (
                f"arrol: min_survivors: {least} of groups that may have only {run.smallest_group} rollouts leaves "
                "nothing to prune; lower it, or raise num_generations"
            )

    def charts(self, name: str) -> list[Chart]:
        def chart(title: str, lines: dict[str, str], *, share: bool = False, percent: bool = False) -> Chart:
            full = {f"gate/{name}/{metric}": label for metric, label in lines.items()}
            return Chart(title, full, share=share, percent=percent, section="Pruned while generated")

        kept = {"keep_rate": "kept", "expected_keep_rate": "expected"}
        told_apart = {"auroc": "AUROC", "auroc_within": "AUROC among siblings", "accuracy": "accuracy"}
        right = {"positive_share": "of those trained", "success": "of all asked", "target": "target"}
        survivors = {"survivors/none": "none", "survivors/one": "one", "survivors/all": "all"}
        undecided = {"ended_early": "ended before it", "not_finite": "score not finite"}
        return [
            chart("Share of rollouts kept", kept, share=True, percent=True),
            chart("Right answers", right, share=True, percent=True),
            chart("Balance of trained groups, mean p (1 - p)", {"balance": "balance"}),
            chart("How well success is predicted", told_apart, share=True),
            chart("Brier score", {"brier": "mean squared error"}),
            chart("Tokens saved", {"tokens_saved": "a step, estimated"}),
            chart("Where the decision falls", {"detection_length": "token"}),
            chart("Groups by survivors", survivors),
            chart("Rollouts without a decision", undecided),
        ]

    def build(self, context: GateContext) -> ArrolGate:
        """Build the gate. Raises ConfigError when right answers are unknown, since the gate learns from them."""
        if self.balance != "distinct":
            context.judge.success.require("gates: arrol learns which answers are right")
        return ArrolGate(self, context)


class ArrolState(State):
    steps: Count
    at: Annotated[int, Field(ge=1)]
    head: HeadState
    posterior: PosteriorState
    bins: Annotated[list[np.ndarray], Columns(BINS)]
    lengths: Annotated[list[np.ndarray], Columns(INTS, FLOATS)]
    survival: list[Probability]
    novelty: Annotated[list[np.ndarray], Columns(FLOATS)]
    factor: float


class ArrolGate(Gate):
    """Prunes by head, calibration and survival chances, which are fixed within a step and learn between steps.

    So neither arrival order nor concurrent rollouts change a decision. Rollouts that end before the detection token
    survive without a decision.
    """

    def __init__(self, options: Arrol, context: GateContext) -> None:
        self.options = options
        self.head = QualityHead(context.seed, options.head_width, options.head_lr)
        self.least = context.judge.least if options.min_survivors is None else options.min_survivors
        """Fewest survivors of a group."""
        self.name = context.name
        self._context = context
        self._steps = 0
        self._at = options.at or FIRST_DETECTION_TOKEN
        self._posterior = BinnedPosterior(options.bins, MAX_ROLLOUTS)
        self._bins = Window(maxlen=MAX_ROLLOUTS)
        self._scale_M = np.empty(0)
        """Scores of recent rollouts by the current predictor, ascending."""
        self._lengths = Window(maxlen=MAX_ROLLOUTS)
        """Length of a rollout's last turn, and the number of rollouts it represents."""
        self._q_B = self._posterior.table()
        self._survival_B = np.full(self._posterior.bins, options.keep_rate)
        self._novelty = Window(maxlen=MAX_ROLLOUTS)
        self._factor = 1.0
        self._realised = Realised()

    @property
    def cold(self) -> bool:
        """Whether nothing is pruned: the predictor only learns so far, or nothing tells right answers any more."""
        learns = self.options.balance == "distinct" or not self._context.judge.success.undecided
        return self._steps < self.options.cold_start or not learns

    def rule(self) -> ArrolRule:
        o, distinct = self.options, self.options.balance == "distinct"
        return ArrolRule(
            n=self._at,
            cold=self.cold,
            seed=self._context.seed,
            least=self.least,
            scale_M=self._scale_M,
            q_B=self._q_B,
            survival_B=np.empty(0) if distinct else self._survival_B,
            factor=self._factor,
            p_min=o.p_min,
            head=self.head.weights,
        )

    def observe_group(self, group: Group) -> None:
        """Learn from finished rollouts; outcomes count 1 / survival, since those of pruned rollouts are unseen."""
        decisions = [r.decision_of(self.name) for r in group.siblings]
        labels = [self._context.judge.success.right(r) for r in group.siblings]
        self._remember([d.verdict.evidence for d in decisions if d is not None], group)
        scored: list[tuple[float, bool, float]] = []
        for rollout, decision, label in zip(group.siblings, decisions, labels, strict=True):
            evidence = {} if decision is None else decision.verdict.evidence
            has_score = "score" in evidence
            if has_score:
                self._realised.returned += 1
                self._realised.pruned += rollout.fate == Fate.PRUNED
            if rollout.reward is None or not rollout.turns:
                continue
            weight = 1 / rollout.survival_p
            self._lengths.append((rollout.turns[-1].stop - rollout.turns[-1].start, weight))
            self._realised.ended_early += decision is None
            if label is None:  # nothing tells right answers; how long they are is known all the same
                continue
            self.head.observe(rollout.last_hidden, mean_logp(rollout), label, weight)  # its end, where votes score
            if decision is not None and has_score:
                self._posterior.observe(evidence["score"], label, weight)
                self.head.observe(evidence.get("hidden"), evidence.get("logp", 0.0), label, weight)
                saved = weight * (1 - decision.verdict.probability) * _sampled_after(rollout, decision)
                self._realised.outcomes.append((evidence["q"], label, weight, saved))
                scored.append((evidence["score"], label, weight))
        if scored:
            self._realised.siblings(scored)
        survivors = sum(r.fate != Fate.PRUNED for r in group.siblings)
        self._realised.group([label for label in labels if label is not None], survivors, len(group.siblings))

    def _remember(self, evidences: list[Mapping[str, Any]], group: Group) -> None:
        """Store a group's rollouts in their state at the detection token, whatever their fate."""
        scored = [evidence for evidence in evidences if "score" in evidence]
        self._realised.asked += len(scored)
        self._realised.not_finite += len(evidences) - len(scored)
        for evidence in scored:
            self._realised.survival += evidence["chance"]
            self._realised.novelty += evidence["novelty"]
            self._bins.append((bin_of(evidence["score"], self.options.bins),))
            self._novelty.append((evidence["novelty"],))
        if scored:
            hidden_NH = np.array([evidence["hidden"] for evidence in scored])
            self.head.remember(hidden_NH, np.array([evidence["logp"] for evidence in scored]))

    def end_step(self) -> None:
        """End an optimizer step: learn, and fix the rule of the next step."""
        o = self.options
        self._steps += 1
        self.head.fit()
        self._set_scale()
        self._q_B = self._posterior.table()
        buffer_M = self._q_B[self._bins.columns()[0]] if len(self._bins) else np.empty(0)
        if o.balance == "distinct":
            if len(self._novelty):
                self._factor = survival_factor(self._novelty.columns()[0], o.keep_rate, o.p_min)
        else:
            self._survival_B = survival_probabilities(self._q_B, buffer_M, o.keep_rate, o.target, o.strength, o.p_min)
        if o.at is None and len(self._lengths):
            length_N, weight_N = self._lengths.columns()
            order_N = np.argsort(length_N, kind="stable")
            reached = int(np.searchsorted(weight_N[order_N].cumsum(), o.quantile * weight_N.sum()))
            self._at = max(1, round(o.share * length_N[order_N[min(reached, len(length_N) - 1)]]))
        self._realised = Realised()

    def _set_scale(self) -> None:
        self._scale_M = np.sort(self.head.recent_scores().astype(np.float64))

    def metrics(self) -> dict[str, float]:
        metrics = self._realised.metrics() | {
            "detection_length": float(self._at),
            "cold": float(self.cold),
            "one_class": float(min(self._posterior.labels) == 0),
            "target": self.options.target,
            "head_resets": float(self.head.resets),
        }
        return {f"gate/{self.name}/{name}": value for name, value in metrics.items()}

    def save(self, directory: Path) -> None:
        """Write the head next to the weights of a checkpoint or of the finished model."""
        self.head.weights.save(directory)

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned; groups in flight carry their own decisions."""
        return {
            "steps": self._steps,
            "at": self._at,
            "head": self.head.state_dict(),
            "posterior": self._posterior.state_dict(),
            "bins": self._bins.state_dict(),
            "lengths": self._lengths.state_dict(),
            "survival": self._survival_B.tolist(),
            "novelty": self._novelty.state_dict(),
            "factor": self._factor,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        bins = self._posterior.bins
        saved = ArrolState.of(state, bins=bins)
        if len(saved.survival) != bins:
            raise ValueError(f"survival: has {len(saved.survival)} numbers, not {bins}")
        self._steps, self._at, self._factor = saved.steps, saved.at, saved.factor
        self.head.load_state_dict(saved.head)
        self._posterior.load_state_dict(saved.posterior)
        self._q_B = self._posterior.table()
        self._bins.load(saved.bins)
        self._lengths.load(saved.lengths)
        self._novelty.load(saved.novelty)
        self._set_scale()
        self._survival_B = np.array(saved.survival, np.float64)


def _sampled_after(rollout: Rollout, decision: Decision) -> int:
    """Return the number of tokens that the rollout sampled after the decision."""
    assert isinstance(decision.at, Token)
    start = rollout.turns[decision.turn].start
    return int(np.count_nonzero(rollout.action_mask[start + decision.at.n :]))
