"""Data types that all layers share: prompts, visits, rollouts, groups, verdicts. No logic.

Shapes: T is the number of completion tokens of a rollout, counted from the first token after the first prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np

Message = dict[str, Any]
"""One chat message, `{"role": ..., "content": ...}`."""


class Fate(StrEnum):
    """The end of a rollout (or, for `SKIPPED`, of a prompt visit that never became one)."""

    TRAINED = "trained"
    """Its group was in an update that was made, and it was not left out."""
    FILTERED = "filtered"
    """Dropped after the reward: its group, e.g. because all rewards were equal, or it alone, or the update."""
    PRUNED = "pruned"
    """A gate stopped it alone, at a token."""
    CUT = "cut"
    """A gate stopped its whole group, at an environment step."""
    STALE = "stale"
    """Its oldest token exceeded the lag bound when the batch was formed."""
    SURPLUS = "surplus"
    """The batch was already full, or the run was over."""
    FAILED = "failed"
    """Error of environment, agent, reward or engine, or no reward at all. Never a reward of 0."""
    SKIPPED = "skipped"
    """The visit was skipped before generation."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set. Exactly one of `text` and `messages` is set."""

    id: str
    """Stable and unique in its data set."""
    ordinal: int
    """Place in the task's `train` or `test`; keys the sampling noise."""
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns; forwarded to reward functions and environments by name."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of tools for the chat template, where the model may call some."""
    template_values: Mapping[str, Any] = field(default_factory=dict)
    """The row's variables for the chat template: those of `chat_template_kwargs`, and `tools`, shown but not run."""


class GroupKind(StrEnum):
    """What a finished group can teach."""

    SIGNAL = "signal"
    """Some advantage is not 0."""
    EASY = "easy"
    """No signal, and right (`Success`): every sibling, or some where rewards differ (max@k with few failures)."""
    HARD = "hard"
    """No signal, and not easy; or cut because no sibling made progress."""
    UNKNOWN = "unknown"
    """No signal, and easy or hard is unknown: cut because all siblings did the same, or `success` is undecided."""
    NOT_JUDGED = "not judged"
    """Too few rewards (failures), or cut without evidence (a control arm)."""

    @property
    def zero_variance(self) -> bool:
        """Whether the group was judged and has no signal."""
        return self in (GroupKind.EASY, GroupKind.HARD, GroupKind.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A method's decision."""

    keep: bool
    reason: str = ""
    probability: float = 1.0
    """Chance with which a random decision came out as it did, overrides by an audit included."""
    override_probability: float | None = None
    """Chance with which an audit keeps what the method would have removed; None if it did not."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Evidence for a gate rule's decision (numbers, texts, arrays), from which the gate learns."""
    counts_as: GroupKind = GroupKind.NOT_JUDGED
    """Kind of a group that a gate cut with this verdict: unknown or hard on evidence, else not judged."""

    @property
    def removes(self) -> bool:
        """Whether the method would remove it, even if an audit kept it."""
        return not self.keep or self.override_probability is not None


KEEP = Verdict(True)


@dataclass(frozen=True, slots=True)
class Visit:
    """One visit to a prompt in the stream of prompts: rolled out, or skipped with a reason."""

    number: int
    """Serial number in the run, from 0; the ledger's key."""
    epoch: int
    prompt: Prompt
    verdict: Verdict = KEEP


@dataclass(frozen=True, slots=True)
class EnvStep:
    """Gate point: every sibling has taken `k` environment steps or ended."""

    k: int


@dataclass(frozen=True, slots=True)
class Token:
    """Gate point: one sibling has sampled its `n`-th token of a turn."""

    n: int


GatePoint = EnvStep | Token


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of a gate at a gate point; travels with its rollout or, about a whole group, with its group."""

    gate: str
    """The gate's name in this run."""
    at: GatePoint
    verdict: Verdict
    turn: int = 0
    """Finished turns of the rollout (or environment steps of the group) at that point."""


@dataclass(slots=True)
class Turn:
    """One action of the model and the environment's answer."""

    action: str
    """The sampled tokens as text, up to and with a stop string; see `env.prompting.decode` for special tokens."""
    observation: str | None
    start: int
    """Index into `Rollout.token_ids` of the action's first token."""
    stop: int
    """Index one past the action's last token."""
    stop_reason: str
    canonical: str | None = None
    """The action in the environment's normal form, or None."""
    progress: float | None = None
    """Progress reported by the environment, in [0, 1], or None."""
    stop_string: str = ""
    """The stop string that `action` ends with, or empty."""
    message: Message | None = None
    """The action as a chat message with its `tool_calls`; None if the environment parsed none."""
    taken: bool = False
    """Whether it counts as a step: the action is complete, and answered if there is an environment. An action cut short
    by the token budget, a gate or a failure does not count."""
    abandoned: bool = False
    """Whether its agent gave up the request before this answer. Its tokens are context and not trained."""

    @property
    def compared(self) -> str:
        """What gates compare: the normal form, or the action without its stop string."""
        return self.action.removesuffix(self.stop_string) if self.canonical is None else self.canonical


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rollout: a prompt as the policy got it, and the tokens on top of it."""

    start: int
    """Index into `Rollout.token_ids` of its first token."""
    prompt_ids: tuple[int, ...]
    agent: str = ""
    """Agent that asked for it, in a rollout of several."""


LIMITS = {
    "length": "max_completion_length",
    "context": "context_length",
    "turns": "max_turns",
    "segments": "max_segments",
    "turn_length": "max_turn_length",
}
"""Stop reasons of rollouts that a limit cut -> the key of the limit. `turn_length`: of the last turn."""


@dataclass(slots=True)
class Rollout:
    """One sibling of a group. Token ids are as sampled, never retokenized.

    It has one segment, or several when its history was rewritten, e.g. compacted. Everything about a rollout counts
    over all of its segments.
    """

    sibling: int
    prompt_ids: tuple[int, ...]
    """Prompt of the first segment."""
    token_ids: np.ndarray
    """int64 [T]: sampled tokens and, between turns, environment tokens; segment by segment."""
    action_mask: np.ndarray
    """bool [T]: True where the model sampled the token."""
    sampler_logp: np.ndarray
    """float32 [T]: log-probability (nats) under the distribution the token was drawn from; 0 outside the mask."""
    versions: np.ndarray
    """int32 [T]: policy version that sampled the token; -1 outside the mask."""
    turns: list[Turn] = field(default_factory=list)
    stop_reason: str = ""
    """Reason for its end: `eos` or `stop` (one turn), `env` (the environment ended it), `cancelled`, `failed`, or one
    of `LIMITS`."""
    text: str = ""
    """Actions and the environment's answers as one text, for display. Rewards get `completion_of`."""
    reward: float | None = None
    """Weighted sum of the reward functions; None when absent (failed, pruned, cut)."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Rewards by function name, before weighting."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values that reward functions passed to `log_extra`, by column."""
    notes: list[str] = field(default_factory=list)
    """What the user should know about it, in words that equal causes share: each is reported once in a run."""
    printed: dict[str, str] = field(default_factory=dict)
    """What reward functions printed in their worker while they judged it, by function: a cause of constant rewards."""
    fate: Fate | None = None
    reason: str = ""
    survival_p: float = 1.0
    seconds: float = 0.0
    """Its share of the engine's wall-clock time: step time divided by rows alive, summed over its steps."""
    barrier_wait_s: float = 0.0
    """Wall-clock seconds spent waiting for siblings at environment steps of gates, without an engine slot."""
    greedy: bool = False
    """Sampled at temperature 0 as a baseline (ReMax): scored and booked, but in no statistic and no batch."""
    raw_logp: np.ndarray | None = None
    """float32, one for each sampled token, if requested: log-probability (nats) under the model itself, before
    temperature, top-k and top-p."""
    last_hidden: np.ndarray | None = None
    """float32 [H]: last hidden state at its last token, if requested and the rollout ended by itself."""
    decisions: list[Decision] = field(default_factory=list)
    """Gate decisions about this rollout alone, in order."""
    agent: str = ""
    """Agent of the first segment."""
    later_segments: list[Segment] = field(default_factory=list)
    """Segments after the first, in order."""
    agent_rewards: dict[str, float] = field(default_factory=dict)
    """Reward of each agent, where they have rewards of their own; `reward` is then their mean."""
    num_reused_tokens: int = 0
    """Sampled tokens that took no decoding step of their own: of a draft, or decoded once for some siblings."""
    num_computed_tokens: int | None = 0
    """Positions that went through the model to sample it (`Finished.num_computed_tokens`); None: unknown."""

    @property
    def truncated(self) -> bool:
        """Whether a limit cut it."""
        return self.stop_reason in LIMITS

    @property
    def segments(self) -> list[Segment]:
        return [Segment(0, self.prompt_ids, self.agent), *self.later_segments]

    @property
    def abandoned_tokens(self) -> int:
        """Tokens sampled for answers that the agent had given up; `action_mask` excludes them."""
        return sum([turn.stop - turn.start for turn in self.turns if turn.abandoned])

    def parts(self) -> list[Rollout]:
        """Return each segment as a rollout of its own prompt and tokens, without turns; of one segment, itself."""
        if not self.later_segments:
            return [self]
        stops = [segment.start for segment in self.later_segments] + [len(self.token_ids)]
        return [
            replace(
                self,
                prompt_ids=segment.prompt_ids,
                token_ids=self.token_ids[segment.start : stop],
                action_mask=self.action_mask[segment.start : stop],
                sampler_logp=self.sampler_logp[segment.start : stop],
                versions=self.versions[segment.start : stop],
                turns=[],
                raw_logp=None,
                agent=segment.agent,
                later_segments=[],
            )
            for segment, stop in zip(self.segments, stops, strict=True)
        ]

    def decision_of(self, gate: str) -> Decision | None:
        """Return the decision of a gate, by its name; None if it made none."""
        return next((d for d in self.decisions if d.gate == gate), None)


def sum_known(a: int | None, b: int | None) -> int | None:
    """Return the sum; None if one is unknown."""
    return None if a is None or b is None else a + b


Purpose = Literal["train", "eval", "greedy", "profile", "probe"]
"""Purpose of rollouts: an update, an evaluation (sampled, or greedy), a profile of pass rates, or a comparison of the
engine with the learner. Each has its own sampling options and noise; gates decide about `train` alone."""


Draft = tuple[tuple[int, ...], ...]
"""Tokens of each turn of a rollout."""


@dataclass(frozen=True, slots=True)
class Job:
    """Work for a sampler: `size` rollouts of a visit. Each purpose numbers its visits separately."""

    visit: Visit
    size: int
    purpose: Purpose = "train"
    first: int = 0
    """Number of the first sibling; more than 0 where the others have been rolled out before."""
    drafts: tuple[Draft, ...] = ()
    """Rollouts of the prompt's last visit, or of this one's probe, for the engine to try; empty: none."""


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt at one visit: one object per group, no parallel lists."""

    visit: Visit
    rollouts: list[Rollout]
    decisions: list[Decision] = field(default_factory=list)
    """Gate decisions about the whole group, in order."""
    purpose: Purpose = "train"
    kind: GroupKind | None = None
    """None until it is judged (`GroupJudge.kind`)."""

    @property
    def verdict(self) -> Verdict:
        """Verdict of the gate that cut the group, else KEEP."""
        return next((d.verdict for d in self.decisions if not d.verdict.keep), KEEP)

    @property
    def prompt(self) -> Prompt:
        return self.visit.prompt

    @property
    def siblings(self) -> list[Rollout]:
        """The rollouts without the greedy one."""
        return [r for r in self.rollouts if not r.greedy]

    def rewards(self) -> np.ndarray:
        """float64 [G], aligned with `rollouts`; NaN where a rollout has no reward or is greedy."""
        values = [np.nan if r.reward is None or r.greedy else r.reward for r in self.rollouts]
        return np.array(values, dtype=np.float64)

    def known_rewards(self) -> list[float]:
        """Return the rewards of the siblings that have one."""
        return [r.reward for r in self.rollouts if r.reward is not None and not r.greedy]

    def greedy_reward(self) -> float | None:
        """Return the greedy rollout's reward; None without such a rollout or reward."""
        return next((r.reward for r in self.rollouts if r.greedy), None)


@dataclass(frozen=True, slots=True)
class GroupView:
    """Read-only view of a group in flight, given to a gate at a gate point."""

    visit: Visit
    at: GatePoint
    actions: tuple[tuple[str, ...], ...]
    """Per sibling, its actions, in the environment's normal form if it has one."""
    observations: tuple[tuple[str, ...], ...]
    """Per sibling, the answer to each of its actions."""
    running: tuple[bool, ...]
    """Per sibling, whether it is still being generated."""
    sibling: int | None = None
    """At a token, the sibling that reached it; None at an environment step."""
    hidden: np.ndarray | None = None
    """float32 [H]: last hidden state of `sibling` at this point, if the engine provides it."""
    logp: np.ndarray | None = None
    """float32 [n]: sampler log-probabilities of `sibling` in this turn, so far."""
    logp_before: float = 0.0
    """Log-probability of the tokens `sibling` sampled in earlier turns, in nats."""
    raw_logp: np.ndarray | None = None
    """float32 [n]: `logp` under the model itself, before temperature, top-k and top-p, if a gate needs it."""
    absent: tuple[bool, ...] = ()
    """Per sibling, whether it failed or was pruned, so it is no evidence about the policy."""
    progress: tuple[float | None, ...] = ()
    """Per sibling, the last progress its environment reported, or None."""
    text: str = ""
    """At a token, what `sibling` has sampled of this turn, if a rule needs it."""
    decisions: tuple[Decision, ...] = ()
    """Earlier decisions about the group or, at a token, about `sibling`."""
    turn: int = 0
    """Finished turns of `sibling`, or environment steps of the group."""
