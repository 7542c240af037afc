"""Runs groups on an engine: asks the gates, steps the environments, has finished groups scored.

Every sibling that is launched comes back in its group exactly once, with its tokens as sampled. A stopped or failed
sibling stays in the group with `reward = None` and a fate. Groups come back in launch order, and each a fixed number of
engine steps after its last token (at once when the engine is idle); a reward that is slower is waited for. The same
goes for the answers of environments that work elsewhere. So what runs together, and with it every rounding, does not
depend on how long rewards and environments take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from ..base.noise import noise_key
from ..engine.base import Engine, Finished, Reached, Request, SamplingParams
from ..env.base import OverlappingEnv, StepResult, Task
from ..env.prompting import PromptError, cut_at_stop, decode, encode_observation, encode_prompt
from ..env.rewards.rewarder import Rewarder
from ..env.rewards.scores import LARGEST
from ..methods.gate import Gate, decide_many, env_steps
from ..types import KEEP, EnvStep, Fate, Group, GroupView, Token, Turn, Verdict, Visit
from .flight import Awaited, Flight, Sibling

OVERLAP = 8
"""Engine steps that an environment which works elsewhere is given before it is waited for."""


@dataclass(frozen=True)
class RolloutOptions:
    """`params.max_tokens` bounds a whole completion: sampled tokens and observations of all turns together."""

    params: SamplingParams
    max_prompt_length: int
    seed: int
    stream: int = 0
    """Keeps the noise of training (0), evaluation (1) and profiles (2) apart."""
    report: frozenset[str] = frozenset()
    """What rollouts carry beside what gates need: a subset of {"confidence", "last_hidden"}."""
    greedy_baseline: bool = False
    """Launch one more rollout a group, at temperature 0. No gate is asked about it, waits for it or sees it."""


class RolloutRunner:
    """See the module's docstring. A reward given by the environment wins over reward functions."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        tokenizer: Any,
        rewarder: Rewarder,
        options: RolloutOptions,
        gates: Sequence[Gate] = (),
    ) -> None:
        for gate in gates:
            if missing := gate.needs - engine.provides:
                raise ValueError(
                    f"gate {type(gate).__name__} needs {sorted(missing)}, but engine {type(engine).__name__} "
                    f"does not provide it (only {sorted(engine.provides)})"
                )
        self.engine = engine
        self.task = task
        self.tokenizer = tokenizer
        self.rewarder = rewarder
        self.options = options
        self.gates = list(gates)
        self._turn_length: int | None = getattr(task, "max_turn_length", None)
        if self._turn_length is not None and not (isinstance(self._turn_length, int) and self._turn_length > 0):
            raise ValueError(f"task {task.name}: max_turn_length must be at least 1 or None, not {self._turn_length!r}")
        self._stop = tuple(dict.fromkeys((*options.params.stop, *task.stop)))
        self._report = options.report.union(*(g.needs for g in self.gates))
        self._step_gates = sorted(((k, g) for g in self.gates for k in env_steps(g.at)), key=itemgetter(0))
        if self._step_gates and self._step_gates[-1][0] >= task.max_turns:
            raise ValueError(
                f"a gate is to be asked after {self._step_gates[-1][0]} environment steps, but nobody is running by "
                f"then: task {task.name} has at most {task.max_turns} turns"
            )
        self._flights: dict[int, Flight] = {}
        self._awaited: list[Awaited] = []
        self._patience = options.params.max_tokens // 16
        self._clock = 0
        """Engine steps so far."""

    @property
    def pending(self) -> int:
        """Groups launched and not yet returned."""
        return len(self._flights)

    def launch(self, visit: Visit, size: int) -> None:
        """Start `size` siblings of a visit. A prompt that cannot be encoded gives a group of failed rollouts."""
        if visit.number in self._flights:
            raise ValueError(f"visit {visit.number} is already in flight")
        siblings = [Sibling(i, greedy=i == size) for i in range(size + self.options.greedy_baseline)]
        flight = Flight(visit, siblings, list(self._step_gates))
        for gate in self.gates:
            if isinstance(gate.at, Token):  # asked anew for each group: a gate may move its checkpoint between steps
                flight.token_gates.setdefault(gate.at.n, []).append(gate)
        self._flights[visit.number] = flight
        shared: tuple[int, ...] | None = None
        for sibling in flight.siblings:
            try:
                sibling.env = self.task.make_env(visit.prompt)
                if isinstance(sibling.env, OverlappingEnv):
                    self._await(flight, sibling, sibling.env.start_reset())
                    continue
                if sibling.env is not None:
                    sibling.prompt_ids = self._encode(visit, sibling.env.reset())
                else:
                    shared = sibling.prompt_ids = shared or self._encode(visit, None)
            except (Exception, SystemExit) as error:
                self._fail(sibling, f"could not start: {error}")
                continue
            self._submit(flight, sibling)
        self._settle(flight)

    def _encode(self, visit: Visit, observation: str | None) -> tuple[int, ...]:
        if not isinstance(observation, str | None):
            raise TypeError(f"reset() must return a text or None, not {type(observation).__name__}")
        ids = encode_prompt(self.tokenizer, visit.prompt, observation)
        if len(ids) > self.options.max_prompt_length:
            raise PromptError(
                f"prompt '{visit.prompt.id}' has {len(ids)} tokens, over "
                f"max_prompt_length={self.options.max_prompt_length}"
            )
        return ids

    def _submit(self, flight: Flight, sibling: Sibling) -> None:
        visit, o = flight.visit, self.options
        key = noise_key(o.seed, o.stream, visit.prompt.ordinal, visit.epoch, sibling.index, len(sibling.turns))
        left = o.params.max_tokens - sibling.length
        params = replace(o.params, max_tokens=min(left, self._turn_length or left), stop=self._stop)
        if sibling.greedy:
            params = replace(params, temperature=0.0, top_p=1.0, top_k=0)
        request = Request(
            id=(visit.number, sibling.index),
            prompt_ids=(*sibling.prompt_ids, *sibling.tokens()),
            params=params,
            key=key,
            checkpoints=() if sibling.greedy else tuple(sorted(flight.token_gates)),
            keep=sibling.env is not None and len(sibling.turns) + 1 < self.task.max_turns,
            confidence="confidence" in self._report,
            last_hidden="last_hidden" in self._report,
        )
        try:
            self.engine.submit([request])
        except ValueError as error:
            cause = str(error).removeprefix(f"request {request.id!r}: ")  # so that equal causes are counted together
            self._fail(sibling, f"the engine refused the prompt: {cause}")

    def poll(self) -> list[Group]:
        """One engine step; returns the groups that are finished and scored, in launch order."""
        events = self.engine.step()
        self._ask_token_gates([event for event in events if isinstance(event, Reached)])
        self._advance([event for event in events if isinstance(event, Finished)])
        self._clock += 1
        self._take_answers()
        self._scores(wait=False)
        return self._in_order()

    def _scores(self, *, wait: bool) -> None:
        for group in self.rewarder.done(wait):
            self._flights[group.visit.number].scored = True

    def _in_order(self) -> list[Group]:
        groups = []
        for number in list(self._flights):
            flight = self._flights[number]
            if flight.group is None or (self.engine.pending and self._clock < flight.ended + self._patience):
                break
            while not flight.scored:
                self._scores(wait=True)
            groups.append(flight.group)
            del self._flights[number]
        for group in groups:
            for gate in self.gates:
                gate.observe(group)
        return groups

    def _advance(self, finished: list[Finished]) -> None:
        """Take what the engine sampled: end the rollout, or step its environment and go on."""
        texts = decode(self.tokenizer, [f.token_ids for f in finished]) if finished else []
        for f, text in zip(finished, texts, strict=True):
            flight = self._flights[f.id[0]]  # type: ignore[index]
            sibling = flight.siblings[f.id[1]]  # type: ignore[index]
            if not sibling.running:
                continue
            action = cut_at_stop(text, self._stop) if f.stop_reason == "stop" else text
            turn = Turn(action, None, sibling.length, sibling.length + len(f.token_ids), f.stop_reason)
            sibling.append(f.token_ids, True, f.logp, f.versions)
            sibling.turns.append(turn)
            sibling.seconds += f.seconds
            sibling.last_hidden = f.hidden
            if f.confidence is not None:
                sibling.confidences.append(f.confidence)
            if sibling.env is None:
                sibling.finish(f.stop_reason)
            elif f.stop_reason == "length" and sibling.length >= self.options.params.max_tokens:
                self._end_episode(flight, sibling, "length")  # the action may be half of what was meant
            else:
                self._step_env(flight, sibling, turn)
        for number in dict.fromkeys(f.id[0] for f in finished):  # type: ignore[index]
            self._settle(self._flights[number])

    def _await(self, flight: Flight, sibling: Sibling, answer: Any) -> None:
        self._awaited.append(Awaited(flight, sibling, answer, self._clock + OVERLAP))

    def _take_answers(self) -> None:
        """Of environments that work elsewhere: those that are due, or all when the engine has nothing else to do."""
        idle = self.engine.pending == 0
        due = [a for a in self._awaited if idle or a.due <= self._clock]
        self._awaited = [a for a in self._awaited if not (idle or a.due <= self._clock)]
        for flight, sibling, answer in ((a.flight, a.sibling, a.answer) for a in due):
            try:
                result = answer.result()
                if sibling.running and not sibling.turns:
                    sibling.prompt_ids = self._encode(flight.visit, result)  # type: ignore[arg-type]
                    self._submit(flight, sibling)
                elif sibling.running:
                    self._observed(flight, sibling, result)
            except Exception as error:
                if sibling.running:
                    self._fail(sibling, f"the environment failed: {type(error).__name__}: {error}")
        for flight in {a.flight.visit.number: a.flight for a in due}.values():
            self._settle(flight)

    def _step_env(self, flight: Flight, sibling: Sibling, turn: Turn) -> None:
        env = sibling.env
        try:
            if isinstance(env, OverlappingEnv):
                self._await(flight, sibling, env.start_step(turn.action))
                return
            self._observed(flight, sibling, env.step(turn.action))  # type: ignore[union-attr]
        except (Exception, SystemExit) as error:
            self._fail(sibling, f"the environment raised {type(error).__name__}: {error}")

    def _observed(self, flight: Flight, sibling: Sibling, result: Any) -> None:
        """The environment has answered the sibling's last turn. TypeError or ValueError when that is no answer."""
        if not isinstance(result, StepResult):
            raise TypeError(f"step() must return a StepResult, not {type(result).__name__}")
        if not isinstance(result.observation, str | None):
            raise TypeError(f"an observation must be a text or None, not {type(result.observation).__name__}")
        turn = sibling.turns[-1]
        turn.observation, turn.canonical = result.observation, result.action
        try:
            turn.progress = result.progress
        except (TypeError, ValueError) as error:
            self._fail(sibling, f"the environment gave a progress that is none: {error}")
            return
        if result.reward is not None:
            sibling.reward = float(result.reward)
            if not abs(sibling.reward) <= LARGEST:
                self._fail(sibling, f"the environment gave a reward of {sibling.reward}")
                return
        if result.done or len(sibling.turns) >= self.task.max_turns:
            self._end_episode(flight, sibling, "env" if result.done else "turns")
            return
        ids = encode_observation(self.tokenizer, flight.visit.prompt, result.observation or "", sibling.segments[-1][0])
        n = len(ids)
        if sibling.length + n >= self.options.params.max_tokens:
            self._end_episode(flight, sibling, "length")
            return
        sibling.append(np.array(ids, np.int64), False, np.zeros(n, np.float32), np.full(n, -1, np.int32))
        if not sibling.greedy and any(k == len(sibling.turns) for k, _ in flight.undecided):
            sibling.waiting_since = time.monotonic()
        else:
            self._submit(flight, sibling)

    def _end_episode(self, flight: Flight, sibling: Sibling, stop_reason: str) -> None:
        """The environment's last reward counts; one that gave none leaves it to the reward functions, or to 0."""
        rollout = sibling.finish(stop_reason)
        self.engine.cancel([(flight.visit.number, sibling.index)])  # no turn follows
        if sibling.reward is None and not self.rewarder.names:
            sibling.reward = 0.0
        if sibling.reward is not None:
            rollout.reward, rollout.rewards = sibling.reward, {"env": sibling.reward}

    def _ask_token_gates(self, events: Sequence[Reached]) -> None:
        """Of all who came to a checkpoint in the same engine step; what is pruned leaves before the next one."""
        running = self._at_tokens(events)
        pruned: list[tuple[Flight, Sibling, str]] = []
        for gate in self.gates:
            asked = [reached for reached in running if gate in reached[3]]
            verdicts = decide_many(gate, [view for _, _, view, _ in asked]) if asked else []
            for (flight, sibling, _, gates), verdict in zip(asked, verdicts, strict=True):
                sibling.survive(verdict.probability)
                if not verdict.keep:
                    gates.clear()
                    pruned.append((flight, sibling, verdict.reason))
        self._cancel([(flight, sibling) for flight, sibling, _ in pruned])
        for _, sibling, reason in pruned:
            sibling.finish("cancelled", fate=Fate.PRUNED, reason=reason)
        for flight in {flight.visit.number: flight for flight, *_ in pruned}.values():
            self._settle(flight)

    def _at_tokens(self, events: Sequence[Reached]) -> list[tuple[Flight, Sibling, GroupView, list[Gate]]]:
        """Who came to a checkpoint, what gates see of it, and which ones are to."""
        found: list[tuple[Flight, Sibling, GroupView, list[Gate]]] = []
        groups: dict[tuple[int, int], GroupView] = {}
        for event in events:
            flight = self._flights[event.id[0]]  # type: ignore[index]
            sibling = flight.siblings[event.id[1]]  # type: ignore[index]
            number = flight.visit.number
            if (number, event.n) not in groups:
                groups[number, event.n] = flight.view(Token(event.n))
            group = groups[number, event.n]
            view = GroupView(  # `replace` takes three times as long
                visit=group.visit,
                checkpoint=group.checkpoint,
                actions=group.actions,
                observations=group.observations,
                running=group.running,
                sibling=sibling.index,
                hidden=event.hidden,
                logp=event.logp,
                confidence=event.confidence,
                failed=group.failed,
                progress=group.progress,
            )
            found.append((flight, sibling, view, [*flight.token_gates[event.n]]))
        return found

    def _cancel(self, siblings: Sequence[tuple[Flight, Sibling]]) -> None:
        """Take from the engine what they have sampled of the turns under way, if any."""
        by_id = {(flight.visit.number, sibling.index): sibling for flight, sibling in siblings}
        partials = self.engine.cancel(by_id)
        texts = decode(self.tokenizer, [partial.token_ids for partial in partials]) if partials else []
        for partial, text in zip(partials, texts, strict=True):
            sibling = by_id[partial.id]  # type: ignore[index]
            sibling.append(partial.token_ids, True, partial.logp, partial.versions)
            sibling.seconds += partial.seconds
            start = sibling.length - len(partial.token_ids)
            sibling.turns.append(Turn(text, None, start, sibling.length, "cancelled"))

    def abandon(self) -> list[Group]:
        """Stop for good; returns the groups in flight, in launch order, with what was sampled and without rewards."""
        for flight in self._flights.values():
            running = [s for s in flight.siblings if s.running]
            self._cancel([(flight, s) for s in running])
            for sibling in running:
                sibling.finish("cancelled")
        groups = [
            f.group or Group(f.visit, [s.rollout for s in f.siblings if s.rollout is not None], f.verdict)
            for f in self._flights.values()
        ]
        self._flights, self._awaited = {}, []
        return groups

    def _settle(self, flight: Flight) -> None:
        """Open a barrier that everybody has reached; close the group when nobody runs."""
        while flight.undecided and any(s.running for s in flight.gated):
            k = flight.undecided[0][0]
            if any(s.running and not s.waiting for s in flight.gated):
                return
            verdict = KEEP
            while verdict.keep and flight.undecided and flight.undecided[0][0] == k:
                verdict = flight.undecided.pop(0)[1].decide(flight.view(EnvStep(k)))
                for sibling in flight.gated:
                    sibling.survive(verdict.probability)
            if not verdict.keep:
                self._cut(flight, verdict)
                break
            for sibling in flight.gated:
                if sibling.running:
                    sibling.leave_barrier()
                    self._submit(flight, sibling)
        if flight.group is None and not any(s.running for s in flight.siblings):
            self.engine.cancel((flight.visit.number, s.index) for s in flight.siblings)
            rollouts = [s.rollout for s in flight.siblings if s.rollout is not None]
            flight.group, flight.ended = Group(flight.visit, rollouts, flight.verdict), self._clock
            if any(r.fate is None and r.reward is None for r in rollouts):
                self.rewarder.start(flight.group, [s.environment for s in flight.siblings])
            else:
                flight.scored = True

    def _cut(self, flight: Flight, verdict: Verdict) -> None:
        """Stop the whole group. What had ended keeps its rewards for display, but takes no part any more."""
        flight.verdict = verdict
        self._cancel([(flight, s) for s in flight.siblings if s.greedy and s.running])
        for sibling in flight.siblings:
            rollout = sibling.rollout or sibling.finish("cancelled")
            rollout.reward = None
            if rollout.fate is None:
                rollout.fate, rollout.reason = Fate.CUT, verdict.reason

    @staticmethod
    def _fail(sibling: Sibling, reason: str) -> None:
        sibling.finish("failed", fate=Fate.FAILED, reason=reason)
