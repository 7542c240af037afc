"""Run groups on an engine: apply gate rules, step environments, have finished groups scored.

Every launched sibling returns in its group once, with its tokens as sampled; a stopped or failed one with a fate and
`reward = None`. Groups return in launch order, each a fixed time after its last token by the engine's clock (at once
when the engine is idle); slower rewards are waited for. Which rollouts run together, and so all rounding, does not
depend on the speed of rewards. Overlapping environments: `answers.py`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..base.seconds import Seconds
from ..engine.base import Engine, Finished, Reached, engine_seconds
from ..env.base import ModelTurn, OverlappingEnv, StepResult, Task, has_no_environment
from ..env.private import private_prompt
from ..env.prompting import TurnTexts, cut_at_stop, decode, decode_whole, stop_string_of
from ..env.rewards.rewarder import Rewarder
from ..env.workers.calls import shared_calls
from ..methods.gate import NamedRule
from ..types import Fate, Group, Job, Purpose, Turn
from .answers import OVERLAP, PATIENCE_S, Answers, Awaited, described, require_future
from .gate_rules import ActiveRules
from .history import PromptTokens, append_or_restart, begin
from .in_flight import OF_ENVIRONMENTS, Flight, Sibling, siblings_of
from .options import RolloutOptions, check_drafts, room_of, turn_length_of, turn_requests, used_up, within


class RolloutRunner:
    """Runs groups; see the module's docstring. A reward from the environment overrides reward functions.

    `options` covers every purpose that is launched. Rules decide about training groups alone.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        tokenizer: Any,
        rewarder: Rewarder,
        options: Mapping[Purpose, RolloutOptions],
        rules: Sequence[NamedRule] = (),
    ) -> None:
        self.engine = engine
        self.task = task
        self.tokenizer = tokenizer
        self.rewarder = rewarder
        self.options = {purpose: within(o, getattr(engine, "max_length", None)) for purpose, o in options.items()}
        self._turn_length = turn_length_of(task)
        self._one_turn = has_no_environment(task)  # then no copy of a row is made for an environment
        self._prompts, self._texts = PromptTokens(tokenizer), TurnTexts(tokenizer)
        check_drafts(self.options.values(), engine.provides, getattr(engine, "no_drafts", ""))
        self._flights: dict[tuple[str, int], Flight] = {}
        self._answers = Answers(lambda: self.waits())
        self._rules = ActiveRules(rules, engine, task, tokenizer)
        self.seconds = Seconds("rewards", "environments")
        self.waits: Callable[[], None] = lambda: None  # called every second while rewards or environments take theirs

    def spent(self) -> dict[str, float]:
        """Return seconds by what they were spent on since the last call, those of the engine included."""
        spent = self.seconds.take()
        return spent | engine_seconds(self.engine, spent.pop("engine", 0.0))

    def set_rules(self, rules: Sequence[NamedRule]) -> None:
        """Replace the rules, checked as at the start; groups in flight keep the gate points of their launch."""
        self._rules = ActiveRules(rules, self.engine, self.task, self.tokenizer)

    @property
    def pending(self) -> int:
        """Number of groups launched and not yet returned."""
        return len(self._flights)

    def launch(self, job: Job) -> None:
        """Start the siblings of a job. If the prompt cannot be encoded, all of them fail."""
        visit, options = job.visit, self.options[job.purpose]
        alone = self._one_turn or job.purpose == "probe"
        flight = Flight(job, siblings_of(job, greedy=options.greedy_baseline), [])
        if flight.key in self._flights:
            raise ValueError(f"visit {visit.number} is already in flight")
        if job.purpose == "train":
            self._rules.assign(flight)
        self._flights[flight.key] = flight
        shared: tuple[int, ...] | None = None
        ready: list[Sibling] = []
        for sibling in flight.siblings:
            try:
                env = sibling.env = None if alone else self.task.make_env(private_prompt(visit.prompt))
                if env is None:
                    shared = sibling.rollout.prompt_ids = shared or self._prompts.of(job, None, options)
                else:
                    with self.seconds.phase("environments"):
                        answer = env.start_reset() if isinstance(env, OverlappingEnv) else env.reset()
                    if self._is_later(flight, sibling, answer):
                        continue
                    self._begin(job, sibling, answer)  # type: ignore[arg-type]
            except OF_ENVIRONMENTS as error:
                sibling.fail(f"could not start: {described(error)}")
                continue
            ready.append(sibling)
        self._submit(flight, ready)
        self._close_if_ended(flight)

    def _begin(self, job: Job, sibling: Sibling, observation: str | None) -> None:
        sibling.rollout.prompt_ids = self._prompts.of(job, observation, self.options[job.purpose])
        begin(sibling, job.visit.prompt, observation)

    def _submit(self, flight: Flight, siblings: Sequence[Sibling]) -> None:
        """Ask the engine for turns that begin together; what it refuses fails one by one."""
        o, train = self.options[flight.job.purpose], flight.job.purpose == "train"
        turns = [(sibling, self._stop(flight, sibling), self._may_go_on(sibling)) for sibling in siblings]
        report = o.report | (self._rules.needs if train else frozenset())
        requests = turn_requests(flight, turns, o, turn_length=self._turn_length, report=report)
        try:
            self.engine.submit(requests)
        except ValueError:  # it has queued none of them
            for sibling, request in zip(siblings, requests, strict=True):
                try:
                    self.engine.submit([request])
                except ValueError as error:  # equal causes are counted together
                    cause = str(error).removeprefix(f"request {request.id!r}: ")
                    sibling.fail(f"the engine refused the prompt: {cause}")

    def _may_go_on(self, sibling: Sibling) -> bool:
        """Return whether another turn may follow and the engine can keep keys and values for it."""
        more = sibling.env is not None and len(sibling.rollout.turns) + 1 < self.task.max_turns
        return more and "keep_kv" in self.engine.provides

    def _stop(self, flight: Flight, sibling: Sibling) -> tuple[str, ...]:
        stop = (*self.options[flight.job.purpose].params.stop, *self.task.stop, *sibling.settings.stop)
        return tuple(dict.fromkeys(stop)) if stop else ()

    def poll(self) -> list[Group]:
        """Run one engine step; return the finished and scored groups, in launch order."""
        with self.seconds.phase("engine"):
            events = self.engine.step()
        self._ask_token_gates([event for event in events if isinstance(event, Reached)])
        self._advance([event for event in events if isinstance(event, Finished)])
        with self.seconds.phase("environments"):
            self._take_answers()
        with self.seconds.phase("rewards"):
            self._scores(wait=False)
            return self._in_order()

    def _scores(self, *, wait: bool, timeout_s: float | None = None) -> bool:
        """Note the groups that have been scored; return whether there are any."""
        for group in (scored := self.rewarder.done(wait, timeout_s)):
            self._flights[group.purpose, group.visit.number].scored = True
        return bool(scored)

    def _in_order(self) -> list[Group]:
        """Return the groups that are due, each purpose in launch order.

        Once answers are taken as they arrive it is one group a call, so that what is launched next depends on the
        order of groups alone.
        """
        groups: list[Group] = []
        blocked: set[str] = set()
        for key, flight in list(self._flights.items()):
            if flight.job.purpose in blocked:
                continue
            due = flight.ended + self.options[flight.job.purpose].params.max_tokens // 16
            running = flight.group is None or (self.engine.pending and self.engine.clock < due)
            if running or not self._wait_for_scores(flight):
                blocked.add(flight.job.purpose)
                continue
            groups.append(flight.ended_group())
            del self._flights[key]
            if not self._answers.in_order:
                break
        return groups

    def _wait_for_scores(self, flight: Flight) -> bool:
        """Wait until a group is scored; return False where its rewards may wait for a rollout that still runs."""
        while not flight.scored:
            if not self._answers.pending:
                self._scores(wait=True, timeout_s=PATIENCE_S)
                self.waits()
            elif not self._answers.in_order:
                return False
            elif not self._scores(wait=True, timeout_s=PATIENCE_S):
                self._answers.in_order = False
        return True

    def _advance(self, finished: list[Finished]) -> None:
        """Add finished turns; end each rollout or step its environment."""
        texts = self._texts.of([(f.token_ids, f.stop_reason) for f in finished])
        whose = [self._whose(f.id) for f in finished]
        for f, text, (flight, sibling) in zip(finished, texts, whose, strict=True):
            if not sibling.running:
                continue
            turn = Turn(text, None, sibling.length, sibling.length + len(f.token_ids), f.stop_reason)
            if f.stop_reason == "stop":
                stop = self._stop(flight, sibling)
                turn.action = cut_at_stop(text, stop)
                turn.stop_string = stop_string_of(turn.action, stop)
            sibling.sampled(f)
            sibling.rollout.turns.append(turn)
            sibling.rollout.last_hidden = f.hidden
            limit = self._cut_by(flight, sibling, turn)
            if sibling.env is None:
                turn.taken = True
                sibling.finish(limit or f.stop_reason)
            elif limit not in ("", "turn_length"):
                self._use_up(flight, sibling, limit)  # the action may be incomplete
            else:
                self._step_env(flight, sibling, turn)
        for flight in {id(flight): flight for flight, _ in whose}.values():
            self._close_if_ended(flight)

    def _whose(self, request: Any) -> tuple[Flight, Sibling]:
        purpose, number, sibling = request
        flight = self._flights[purpose, number]
        return flight, flight.siblings[sibling - flight.job.first]

    def _cut_by(self, flight: Flight, sibling: Sibling, turn: Turn) -> str:
        """Return the stop reason if a limit cut the last turn, else empty; one that was given up, nobody misses."""
        if turn.stop_reason != "length" or len(sibling.rollout.turns) - 1 in sibling.report.abandoned:
            return ""
        at_limit = sibling.env is None or turn.stop - turn.start == self._turn_length
        return used_up(sibling, self.options[flight.job.purpose]) or ("turn_length" if at_limit else "")

    def _is_later(self, flight: Flight, sibling: Sibling, answer: Any, *, limit: str = "") -> bool:
        """Return whether an environment's answer is still to come; it is then taken when it is due."""
        if inspect.isawaitable(answer):
            answer = shared_calls().awaited(answer)
        elif not isinstance(sibling.env, OverlappingEnv):
            self.waits()
            return False
        require_future(sibling.env, answer)
        independent, due = getattr(sibling.env, "independent", False), self.engine.clock + OVERLAP
        self._answers.pending.append(Awaited(flight, sibling, answer, due, independent, limit))
        return True

    def _arrived(self) -> list[Awaited]:
        """Return the answers to take now. Opens barriers of gates if nothing else can go on."""
        if not self._answers.pending:
            return []
        if self.engine.pending:
            return self._answers.take(self.engine.clock)
        oldest = {flight.job.purpose: flight for flight in reversed(self._flights.values())}
        wait = not any(flight.scored for flight in oldest.values())
        arrived = self._answers.take_when_idle(self.rewarder.unfinished(), wait=wait)
        if self._answers.stuck:
            for flight in self._flights.values():
                for sibling in self._rules.give_up(flight):
                    sibling.leave_barrier()
                    self._submit(flight, [sibling])
        return arrived

    def _take_answers(self) -> None:
        """Take answers of overlapping environments."""
        due = self._arrived()
        for flight, sibling, answer, limit in ((a.flight, a.sibling, a.answer, a.limit) for a in due):
            try:
                result = answer.result()
                if sibling.running and limit:
                    if result is not None:
                        sibling.set_reward(result)
                    self._end_episode(flight, sibling, limit)
                elif sibling.running and not sibling.rollout.turns:
                    self._begin(flight.job, sibling, result)
                    self._submit(flight, [sibling])
                elif sibling.running:
                    self._observed(flight, sibling, result)
            except OF_ENVIRONMENTS as error:
                if sibling.running:
                    sibling.fail(f"the environment failed: {described(error)}")
        for flight in {a.flight.key: a.flight for a in due}.values():
            self._close_if_ended(flight)

    def _step_env(self, flight: Flight, sibling: Sibling, turn: Turn) -> None:
        env, whole = sibling.env, decode_whole(self.tokenizer, sibling.last_sampled())
        if turn.stop_reason == "stop":
            whole = cut_at_stop(whole, self._stop(flight, sibling))
        before, tokens = sibling.context_length - turn.stop + turn.start, turn.stop - turn.start
        action = ModelTurn(turn.action, turn.stop_reason, turn.stop_string, whole, before, tokens)
        try:
            with self.seconds.phase("environments"):
                answer = env.start_step(action) if isinstance(env, OverlappingEnv) else env.step(action)  # type: ignore[union-attr]
            if not self._is_later(flight, sibling, answer):
                self._observed(flight, sibling, answer)
        except OF_ENVIRONMENTS as error:
            sibling.fail(f"the environment raised {described(error)}")

    def _observed(self, flight: Flight, sibling: Sibling, result: Any) -> None:
        """Add the environment's answer to the last turn. Raises TypeError or ValueError on a malformed one."""
        if not isinstance(result, StepResult):
            raise TypeError(f"step() must return a StepResult, not {type(result).__name__}")
        if not isinstance(result.observation, str | None):
            raise TypeError(f"an observation must be a text or None, not {type(result.observation).__name__}")
        turn = sibling.rollout.turns[-1]
        turn.observation, turn.canonical, turn.message = result.observation, result.action, result.message
        try:
            turn.progress = result.progress
        except (TypeError, ValueError) as error:
            sibling.fail(f"the environment returned an invalid progress: {error}")
            return
        if result.reward is not None:
            try:
                sibling.set_reward(result.reward)
            except ValueError as error:
                sibling.fail(f"the environment returned {error}")
                return
        turn.taken = True
        if result.done:
            self._end_episode(flight, sibling, self._cut_by(flight, sibling, turn) or "env")
            return
        if len(sibling.rollout.turns) >= self.task.max_turns:
            self._use_up(flight, sibling, "turns", rewarded=result.reward is not None)
            return
        before, o = sibling.length, self.options[flight.job.purpose]
        observation = "" if result.observation is None else result.observation  # an empty one may have a role
        template, room = o.history == "template", room_of(sibling, o)
        append_or_restart(self.tokenizer, flight.visit.prompt, sibling, observation, template=template, room=room)
        over = o.max_segments is not None and len(sibling.rollout.later_segments) >= o.max_segments
        if limit := "segments" if over else used_up(sibling, o):
            sibling.withdraw(before)
            self._use_up(flight, sibling, limit, rewarded=result.reward is not None)
            return
        if not sibling.rollout.greedy and any(k == len(sibling.rollout.turns) for k, _ in flight.undecided):
            sibling.waiting_since = time.monotonic()
        else:
            self._submit(flight, [sibling])

    def _use_up(self, flight: Flight, sibling: Sibling, limit: str, *, rewarded: bool = False) -> None:
        """End a rollout at a limit, with the reward that its environment gives it then, unless it has just given it."""
        ask = None if rewarded else getattr(sibling.env, "start_reward", None)
        try:
            if ask is None or not self._is_later(flight, sibling, ask(), limit=limit):
                self._end_episode(flight, sibling, limit)
        except OF_ENVIRONMENTS as error:
            sibling.fail(f"the environment raised {described(error)}")

    def _end_episode(self, flight: Flight, sibling: Sibling, stop_reason: str) -> None:
        """End a rollout with the environment's last reward; without one reward functions decide, else it is 0."""
        rollout = sibling.end_episode(stop_reason, judged=bool(self.rewarder.names))
        self.engine.cancel([(*flight.key, rollout.sibling)])  # no turn follows

    def _ask_token_gates(self, events: Sequence[Reached]) -> None:
        """Decide about all rollouts at a gate point of this engine step; pruned ones leave before the next."""
        if not events:
            return
        pruned = self._rules.about_rollouts([(*self._whose(event.id), event) for event in events])
        self._cancel([(flight, sibling) for flight, sibling, _ in pruned])
        for _, sibling, reason in pruned:
            sibling.finish("cancelled", fate=Fate.PRUNED, reason=reason)
        for flight in {flight.key: flight for flight, *_ in pruned}.values():
            self._close_if_ended(flight)

    def _cancel(self, siblings: Sequence[tuple[Flight, Sibling]]) -> None:
        """Cancel siblings in the engine and keep the tokens of their unfinished turns."""
        by_id = {(*flight.key, sibling.rollout.sibling): sibling for flight, sibling in siblings}
        partials = self.engine.cancel(by_id)
        texts = decode(self.tokenizer, [partial.token_ids for partial in partials]) if partials else []
        for partial, text in zip(partials, texts, strict=True):
            sibling = by_id[partial.id]  # type: ignore[index]
            sibling.sampled(partial)
            start = sibling.length - len(partial.token_ids)
            sibling.rollout.turns.append(Turn(text, None, start, sibling.length, "cancelled"))

    def abandon(self, *, engine_works: bool = True) -> list[Group]:
        """Stop for good, close environments; return the groups in flight, with unfinished turns if `engine_works`."""
        running = [(flight, s) for flight in self._flights.values() for s in flight.siblings if s.running]
        if engine_works and running:
            self._cancel(running)
        for _, sibling in running:
            sibling.finish("cancelled")
        groups = [flight.ended_group() for flight in self._flights.values()]
        self._flights, self._answers = {}, Answers(lambda: self.waits())
        return groups

    def _close_if_ended(self, flight: Flight) -> None:
        """Open a barrier that all have reached; close the group when none runs."""
        while flight.undecided and any(s.running for s in flight.gated):
            k = flight.undecided[0][0]
            if any(s.running and s.waiting_since is None for s in flight.gated):
                return
            if (cut := self._rules.about_group(flight, k)) is not None:
                self._cancel([(flight, s) for s in flight.siblings if s.rollout.greedy and s.running])
                flight.cut(cut.verdict.reason)
                break
            for sibling in [s for s in flight.gated if s.running]:
                sibling.leave_barrier()
                self._submit(flight, [sibling])
        if flight.group is None and not any(s.running for s in flight.siblings):
            if self.task.max_turns > 1:  # else the engine has kept nothing for another turn
                self.engine.cancel((*flight.key, s.rollout.sibling) for s in flight.siblings)
            flight.group, flight.ended = flight.close(), self.engine.clock
            unscored = any(r.fate is None and r.reward is None for r in flight.group.rollouts)
            if unscored and flight.job.purpose != "probe":
                self.rewarder.start(flight.group, flight.environments())
            else:
                flight.scored = True
