"""Groups in flight in the rollout runner: siblings, their tokens and turns so far, their open gate points."""

from __future__ import annotations

import asyncio
import inspect
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..base.sanitize import redact
from ..engine.base import Finished
from ..env.base import Env, EnvReport, OverlappingEnv
from ..env.prompting import ANY_TURN, TurnSettings
from ..env.rewards.scores import MAX_REWARD
from ..env.workers.calls import shared_calls
from ..methods.agents import agents_of, named
from ..types import (
    LIMITS,
    Decision,
    Fate,
    GatePoint,
    Group,
    Job,
    Message,
    Rollout,
    Segment,
    Visit,
    sum_known,
)
from .drafts import likeliest

OF_ENVIRONMENTS = (Exception, SystemExit, asyncio.CancelledError)
"""Errors of an environment that fail its rollout; a client library may let a cancellation out."""
ALL_ABANDONED = (
    "the agent gave up every request before its answer (its client timed out, or its task was cancelled); give its "
    "client more time, or limit answers with max_turn_length"
)


@dataclass
class Sibling:
    """A rollout in flight, and what it needs until it ends."""

    rollout: Rollout
    """Its arrays are filled when it ends."""
    running: bool = True
    env: Env | OverlappingEnv | None = None
    environment: Any = None
    """State of the environment for reward functions, after it is closed."""
    closing: tuple[str, Future[Any]] | None = None
    """Class of the environment, and its async `close` that may still run."""
    messages: list[Message] | None = None
    """Messages of the current segment with those since, where the chat template renders every turn again."""
    begun: str = ""
    """Beginning of the assistant's turn in the prompt, which the next action continues."""
    pieces: list[tuple[np.ndarray, bool, np.ndarray, np.ndarray]] = field(default_factory=list)
    """(token ids, sampled?, log-probs, versions), in order."""
    raw_logps: list[np.ndarray] = field(default_factory=list)
    turn_tokens: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens of each turn."""
    length: int = 0
    settings: TurnSettings = ANY_TURN
    """Of its next turn."""
    reward: float | None = None
    """Last reward from the environment."""
    waiting_since: float | None = None
    """Time of arrival at the barrier of an environment-step gate, where it holds no engine slot, or None."""

    @property
    def report(self) -> EnvReport:
        """Report of its environment. Any other attribute is the user's own."""
        report = getattr(self.env, "winnow_report", None)
        return report if isinstance(report, EnvReport) else EnvReport()

    @property
    def progress(self) -> float | None:
        """Last progress its environment reported."""
        return next((t.progress for t in reversed(self.rollout.turns) if t.progress is not None), None)

    def leave_barrier(self) -> None:
        if self.waiting_since is not None:
            self.rollout.barrier_wait_s += time.monotonic() - self.waiting_since
            self.waiting_since = None

    def append(self, ids: np.ndarray, sampled: bool, logp: np.ndarray, versions: np.ndarray) -> None:
        self.pieces.append((ids, sampled, logp, versions))
        self.length += len(ids)

    def sampled(self, turn: Finished) -> None:
        """Add what the engine sampled in a turn."""
        self.append(turn.token_ids, True, turn.logp, turn.versions)
        self.turn_tokens.append(tuple(turn.token_ids.tolist()))
        if turn.raw_logp is not None:
            self.raw_logps.append(turn.raw_logp)
        self.rollout.seconds += turn.seconds
        self.rollout.num_reused_tokens += turn.num_reused_tokens
        self.rollout.num_computed_tokens = sum_known(self.rollout.num_computed_tokens, turn.num_computed_tokens)

    def withdraw(self, length: int) -> None:
        """Take back what was added since the rollout had this length: an observation, or a segment without tokens."""
        if self.rollout.later_segments and self.rollout.later_segments[-1].start == self.length:
            self.rollout.later_segments.pop()
        while self.length > length:
            self.length -= len(self.pieces.pop()[0])

    def sampled_logp(self) -> float:
        """Return the log-probability of all tokens sampled in finished turns."""
        return float(sum(logp.sum() for _, sampled, logp, _ in self.pieces if sampled))

    def context(self, segment: int = -1) -> tuple[int, ...]:
        """Return the prompt and tokens of a segment, -1 the last."""
        if not (self.pieces or self.rollout.later_segments):
            return self.rollout.prompt_ids
        segments = self.rollout.segments
        stops = [*[later.start for later in segments[1:]], self.length]
        tokens_N = _joined([ids for ids, *_ in self.pieces], np.int64)
        return (*segments[segment].prompt_ids, *tokens_N[segments[segment].start : stops[segment]].tolist())

    @property
    def current_agent(self) -> str:
        return self.rollout.segments[-1].agent

    @property
    def context_length(self) -> int:
        """Tokens of the current segment, its prompt included."""
        last = self.rollout.segments[-1]
        return len(last.prompt_ids) + self.length - last.start

    def last_sampled(self, segment: int = -1) -> np.ndarray:
        """Return the tokens of a segment's last action, -1 the last."""
        later = self.rollout.later_segments
        stop = later[segment].start if 0 <= segment < len(later) else self.length
        turn = next(turn for turn in reversed(self.rollout.turns) if turn.stop <= stop)
        starts = accumulate((len(ids) for ids, *_ in self.pieces), initial=0)
        pieces = zip(starts, self.pieces, strict=False)
        return next(ids for start, (ids, sampled, *_) in pieces if sampled and start == turn.start)

    def restart(self, prompt_ids: tuple[int, ...], agent: str) -> None:
        """Begin a segment."""
        self.rollout.later_segments.append(Segment(self.length, prompt_ids, agent))

    def set_reward(self, given: float | Mapping[str, float]) -> None:
        """Set the environment's reward, a mapping by agent. Raises ValueError on an unusable one."""
        by_agent = given if isinstance(given, Mapping) else {"": given}
        if not by_agent:
            raise ValueError("rewards of no agent ({})")
        rewards = {agent: float(reward) for agent, reward in by_agent.items()}
        shown = rewards if by_agent is given else rewards[""]
        if not all(abs(reward) <= MAX_REWARD for reward in rewards.values()):
            raise ValueError(f"an unusable reward ({shown})")
        self.rollout.agent_rewards = rewards if by_agent is given else {}
        self.reward = sum(rewards.values()) / len(rewards)

    def _unknown_agents(self, stop_reason: str) -> str:
        """Return the agents that have a reward and did not ask, with those that did; empty if there are none.

        Where a limit ended the rollout, agents whose turn did not come may have one, too: an environment's, or those
        next to all that asked.
        """
        asked = self.report.agents
        if asked is None and stop_reason not in LIMITS:
            asked = {segment.agent for segment in self.rollout.segments}
        unknown = [] if asked is None else [name for name in self.rollout.agent_rewards if name not in asked]
        if not unknown or (stop_reason in LIMITS and asked and asked <= self.rollout.agent_rewards.keys()):
            return ""
        return (
            f"{named(unknown)}: these keys are no agents of this rollout (asked as {named(sorted(asked or ()))}); use "
            "the names that requests have in `model` (policy/NAME), leave out agents that did not ask, or return one "
            "number"
        )

    def end_episode(self, stop_reason: str, *, judged: bool) -> Rollout:
        """Close the rollout with the environment's last reward; without one it is 0, unless it will be `judged`."""
        report = self.report
        label, is_agent = report.label, report.agents is not None
        unknown = self._unknown_agents(stop_reason)
        ended = self.finish(stop_reason)
        if ended.fate is not None:  # every answer was abandoned
            return ended
        if unknown:
            ended.stop_reason, ended.fate, ended.agent_rewards = "failed", Fate.FAILED, {}
            ended.reason = redact(f"{label} returned rewards for {unknown}")
            return ended
        if self.reward is None and not judged:
            self.reward = 0.0
            if stop_reason in ("env", "turn_length") or (is_agent and not ended.notes):
                ended.notes.append(f"{label} returned None, and no reward function is given: its reward is 0")
        if self.reward is not None:
            ended.reward = self.reward
            ended.rewards = {"env": self.reward, **{f"env/{a}": r for a, r in ended.agent_rewards.items()}}
        missed = [name for name in agents_of(ended) if name not in ended.agent_rewards]
        if ended.agent_rewards and missed:
            ended.notes.append(
                f"{label} returned no reward for {named(missed)}, so what was sampled as such is not trained; return "
                "one for each agent that is to learn"
            )
        return ended

    def fail(self, reason: str) -> None:
        self.finish("failed", fate=Fate.FAILED, reason=redact(reason))

    def _leave_out(self, abandoned: Sequence[int]) -> bool:
        """Take the tokens of abandoned turns for context, so that they are not trained; return whether all are."""
        if not abandoned:
            return False
        turns = self.rollout.turns
        left_out = [turns[number] for number in abandoned if number < len(turns)]
        starts = {turn.start for turn in left_out}
        at = 0
        for i, (ids, *_) in enumerate(self.pieces):
            if at in starts:
                self.pieces[i] = (ids, False, np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32))
            at += len(ids)
        self.raw_logps = [logp for i, logp in enumerate(self.raw_logps) if i not in abandoned]
        for turn in left_out:
            turn.abandoned = True
        return bool(turns) and len(left_out) == len(turns)

    def _close_env(self) -> None:
        if self.env is None:
            return
        report = self.report
        self.environment = report.environment
        self.rollout.notes += report.notes
        close = getattr(self.env, "close", None)
        if close is not None:
            try:
                closed = close()
                if inspect.isawaitable(closed):
                    self.closing = type(self.env).__name__, shared_calls().awaited(closed)
            except OF_ENVIRONMENTS as error:  # the rollout is over; its reward does not depend on this
                _warn_unclosed(type(self.env).__name__, error)
        self.env = None

    def await_closed(self) -> None:
        """Wait for an async `close`; those of a group run at the same time."""
        if self.closing is not None:
            (name, closed), self.closing = self.closing, None
            try:
                closed.result()
            except OF_ENVIRONMENTS as error:
                _warn_unclosed(name, error)

    def finish(self, stop_reason: str, *, fate: Fate | None = None, reason: str = "") -> Rollout:
        """Close the rollout: after this it is only scored and booked."""
        self.leave_barrier()
        if self._leave_out(self.report.abandoned) and fate is None:
            fate, reason = Fate.FAILED, ALL_ABANDONED
        self._close_env()
        self.withdraw(self.length)  # a segment in which nothing was sampled
        self.running = False
        ended = self.rollout
        token_ids, sampled, logp, versions = zip(*self.pieces, strict=True) if self.pieces else ((), (), (), ())
        ended.token_ids = _joined(token_ids, np.int64)
        ended.action_mask = _joined([np.full(len(ids), own) for ids, own in zip(token_ids, sampled, strict=True)], bool)
        ended.sampler_logp = _joined(logp, np.float32)
        ended.versions = _joined(versions, np.int32)
        ended.stop_reason, ended.fate, ended.reason = stop_reason, fate, reason
        ended.text = "".join(t.action + (t.observation or "") for t in ended.turns)
        ended.raw_logp = np.concatenate(self.raw_logps) if self.raw_logps else None
        return ended


def _warn_unclosed(name: str, error: BaseException) -> None:
    warnings.warn(f"closing {name} raised {type(error).__name__}: {error}", stacklevel=3)


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0].astype(dtype, copy=False)
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)


def zero_unrewarded_truncated(rollouts: Sequence[Rollout]) -> None:
    """Where the environment rewards some, give 0 to those that were truncated before it could, as without functions.

    Two kinds of rewards in a group would teach to be truncated, or not to be.
    """
    if not any("env" in rollout.rewards for rollout in rollouts):
        return
    for rollout in rollouts:
        if rollout.fate is None and "env" not in rollout.rewards and rollout.truncated:
            rollout.reward, rollout.rewards = 0.0, {"env": 0.0}


def siblings_of(job: Job, *, greedy: bool) -> list[Sibling]:
    """Return the siblings of a job, with a greedy one at the end if wanted."""
    stop, none = job.first + job.size, np.empty(0)
    return [Sibling(Rollout(i, (), none, none, none, none, greedy=i == stop)) for i in range(job.first, stop + greedy)]


@dataclass
class Flight:
    """One group in flight."""

    job: Job
    siblings: list[Sibling]
    undecided: list[tuple[int, str]]
    """Open decisions at environment steps, ascending: (step, gate)."""
    token_gates: dict[int, list[str]] = field(default_factory=dict)
    """Gates that decide at a token of a turn, by token."""
    decisions: list[Decision] = field(default_factory=list)
    """Decisions about the whole group."""
    group: Group | None = None
    ended: int = 0
    """The runner's clock when its last sibling ended."""
    scored: bool = False
    _draft: tuple[Any, tuple[int, ...]] = field(default=(None, ()), init=False)
    """The last draft, and what it was made of."""

    @property
    def visit(self) -> Visit:
        return self.job.visit

    @property
    def key(self) -> tuple[str, int]:
        """Key in the runner: purpose and number of the visit."""
        return self.job.purpose, self.job.visit.number

    @property
    def gated(self) -> list[Sibling]:
        """All but a greedy baseline."""
        return [s for s in self.siblings if not s.rollout.greedy]

    def draft(self, sibling: Sibling) -> tuple[int, ...]:
        """Return a guess of a sibling's next turn, from drafts and its group.

        It is the likeliest of those that followed the same turns, else the same last turn.
        """
        turn = len(sibling.rollout.turns)
        before = tuple(sibling.turn_tokens)
        made_of = before, sum(len(s.turn_tokens) for s in self.siblings)
        if self._draft[0] == made_of:
            return self._draft[1]
        rollouts = [*self.job.drafts, *(tuple(s.turn_tokens) for s in self.siblings)]
        alike = [turns[turn] for turns in rollouts if turns[:turn] == before and turn < len(turns)]
        if not alike and before:
            alike = [b for turns in rollouts for a, b in pairwise(turns) if a == before[-1]]
        readers = sum(tuple(s.turn_tokens) == before for s in self.siblings)
        self._draft = made_of, likeliest(alike, readers)
        return self._draft[1]

    def cut(self, reason: str) -> None:
        """End all rollouts. Those that had ended keep `rewards` for display, but no `reward`."""
        for sibling in self.siblings:
            rollout = sibling.finish("cancelled") if sibling.running else sibling.rollout
            rollout.reward = None
            if rollout.fate is None:
                rollout.fate, rollout.reason = Fate.CUT, reason

    def environments(self) -> list[Any]:
        """Return what reward functions see of the environments, which are closed before."""
        for sibling in self.siblings:
            if sibling.environment is not None:
                sibling.await_closed()
        return [sibling.environment for sibling in self.siblings]

    def ended_group(self) -> Group:
        """Return the group once all environments are closed."""
        for sibling in self.siblings:
            sibling.await_closed()
        return self.group or self.close()

    def close(self) -> Group:
        """Return the group of the rollouts that have ended, after `zero_unrewarded_truncated`."""
        rollouts = [s.rollout for s in self.siblings]
        zero_unrewarded_truncated(rollouts)
        return Group(self.visit, rollouts, self.decisions, self.job.purpose)

    def shared_view(self, at: GatePoint) -> dict[str, Any]:
        """Return the fields of a `GroupView` that are the same for all siblings."""
        gated = self.gated
        steps = [[t for t in s.rollout.turns if t.taken] for s in gated]
        return {
            "visit": self.visit,
            "at": at,
            "actions": tuple(tuple(t.compared for t in own) for own in steps),
            "observations": tuple(tuple(t.observation or "" for t in own) for own in steps),
            "running": tuple(s.running for s in gated),
            "absent": tuple(s.rollout.fate in (Fate.FAILED, Fate.PRUNED) for s in gated),
            "progress": tuple(s.progress for s in gated),
        }
