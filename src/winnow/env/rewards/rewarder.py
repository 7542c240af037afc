"""Scoring of groups with reward functions, concurrent with generation.

Functions have TRL's signature, `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, or verl's
`compute_score`. Any fault - an exception, a deadline, NaN, the wrong length - makes its rollouts `failed`, with the
cause as their reason; it never becomes a reward of 0.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...base.dotted import TargetError
from ...base.sanitize import redact
from ...config.errors import reward_hint
from ...config.paths import REWARDS
from ...types import Fate, Group, Rollout
from ..private import private
from ..workers.calls import Deadlines, noticing_signals
from ..workers.functions import (
    LOGGERS,
    VERL_ARGUMENTS,
    RewardLogs,
    awaited,
    compares_siblings,
    describe_error,
    function_name,
    is_own,
    load_function,
    parameters_of,
    resolved,
)
from ..workers.worker import WorkerError
from .pending import PendingRewards, RewardFunction, ScoredGroup, numbered
from .pooled import PooledReward, arguments_each, verl_arguments
from .scores import MAX_REWARD, STANDARD, Outcome, arguments_of, check_columns
from .workers import RewardWorkers

if TYPE_CHECKING:
    from .reward_model import RewardModel

QUICK = ("countdown", "exact")
"""Those called at once: a thread takes longer."""
NO_SIGNALS = (
    "it sets a signal handler, as math-verify does, which fails in the thread of a function given as an object, so its "
    "rewards may be wrong; give it by name: 'module:function' or 'path/to/file.py:function'"
)

RewardSpec = Callable[..., Any] | str

OF_THE_RUN = ("audit/", "eval/", "eval_", "rewards/", "seconds/", "seconds_", "tokens/")
"""Beginnings of names that a run gives a meaning, which `log_metric` cannot have."""


def without_taken(logged: Mapping[str, float], taken: Collection[str]) -> dict[str, float]:
    """Return what rewards have logged under names of their own; warns of those of the run's metrics, `taken`."""
    own = {name: value for name, value in logged.items() if name not in taken and not name.startswith(OF_THE_RUN)}
    for name in sorted(logged.keys() - own.keys()):
        warnings.warn(
            f"log_metric: '{name}' is a metric of the run, or begins like one, so it is left out; rename it",
            stacklevel=2,
        )
    return own


class Rewarder:
    """Calls reward functions once per group and writes `rollout.rewards` and `rollout.reward`, or fate and reason.

    `reward_funcs` are callables, `"module:function"`, `"path/to/file.py:function"`, names in `REWARDS`, or reward
    models: a directory, a hub name `owner/model`, or a loaded model (see `RewardModel`). Functions given by name run in
    worker processes that are killed after `timeout_s`. Callables and reward models run in a thread of this process
    (coroutine functions on an event loop), which can be abandoned but not killed; Countdown's and the exact reward are
    called at once. Each function of a user gets its own copy of prompts, completions and columns (see `private`), but
    the environments themselves. The reward is the weighted sum of
    the functions' values; None means that a function does not apply. A rollout whose environment has already set a
    reward keeps it. An element of a returned list may be an exception: it fails that rollout alone.

    Raises TargetError (a ValueError) with the nearest name when a function does not exist, ValueError when weights
    do not match.
    """

    def __init__(
        self,
        reward_funcs: RewardSpec | Sequence[RewardSpec],
        weights: Sequence[float] | None = None,
        timeout_s: float = 30.0,
        *,
        workers: RewardWorkers | None = None,
        device: str | None = "auto",
    ) -> None:
        specs = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else list(reward_funcs)
        self._device = device
        if weights is None:
            weights = [1.0] * len(specs)
        if len(weights) != len(specs) or not all(math.isfinite(w) for w in weights):
            raise ValueError(f"reward_weights: {list(weights)} given for {len(specs)} reward functions; give one each")
        self.trainer_state = SimpleNamespace(global_step=0, max_steps=0)
        """Passed to functions that name it; the attributes are those of TRL's that exist here."""
        self._workers = workers or RewardWorkers()
        self._pool = self._workers.pool(specs, timeout_s)
        self._calls = Deadlines(timeout_s)
        self._work: list[ScoredGroup] = []
        self._metrics: list[tuple[str, float]] = []
        self._signals: set[str] = set()
        """Names of functions that have set a signal handler in their thread."""
        self._warned: set[str] = set()
        try:
            functions = [self._function(spec, w) for spec, w in zip(specs, weights, strict=True)]
        except BaseException:
            self.close()
            raise
        for function, name in zip(functions, numbered(f.name for f in functions), strict=True):
            function.name = name
        self._functions = functions
        self.specs = specs

    @property
    def aliases(self) -> dict[str, str]:
        """Return the name of each function, by that name and by the text it was given as."""
        given = {spec: name for spec, name in zip(self.specs, self.names, strict=True) if isinstance(spec, str)}
        return given | {name: name for name in self.names}

    @property
    def names(self) -> list[str]:
        return [f.name for f in self._functions]

    @property
    def parameters(self) -> set[str]:
        """Return the names of all arguments that functions ask for."""
        return {name for f in self._functions for name in f.parameters}

    @property
    def comparing(self) -> dict[str, bool | None]:
        """Return for each function whether it compares siblings; None: its author does not say."""
        return {f.name: f.compares for f in self._functions}

    @property
    def in_threads(self) -> list[str]:
        """Return the names of user functions that run in a thread of this process."""
        called = [(f.name, f.call) for f in self._functions if f.call is not None and f.model is None]
        return [name for name, call in called if not (_is_async(call) or is_own(call))]

    def fingerprint(self) -> str:
        """Return the names of the functions; a reward model's with a digest of its weights."""
        return ", ".join(f"{f.name}@{f.model.digest()}" if f.model else f.name for f in self._functions)

    def check(self, columns: Collection[str], conversational: bool = False) -> None:
        """Raise ValueError when a function needs a column missing from the data, or a reward model cannot score
        messages."""
        for function in self._functions:
            check_columns(function.name, function.parameters, columns)
            if function.model is not None and conversational:
                function.model.require_chat_template()

    def start(self, group: Group, environments: Sequence[Any] | None = None) -> None:
        """Start scoring the rollouts without fate or reward, a greedy baseline in a call of its own.

        Raises ValueError if the group is being scored.
        """
        if any(work.group is group for work in self._work):
            raise ValueError(f"group of visit {group.visit.number} is being scored already")
        work = ScoredGroup(group, [], [])
        for greedy in (False, True):
            unscored = [i for i, r in enumerate(group.rollouts) if r.fate is None and r.reward is None]
            if not (chosen := [i for i in unscored if group.rollouts[i].greedy == greedy]):
                continue
            rollouts = [group.rollouts[i] for i in chosen]
            arguments = arguments_of(group, rollouts)
            arguments["environments"] = None if environments is None else [environments[i] for i in chosen]
            arguments["trainer_state"] = self.trainer_state
            work.rollouts += rollouts
            work.pending += [self._begin(f, rollouts, arguments) for f in self._functions]
        self._work.append(work)

    def unfinished(self) -> list[Future[Any]]:
        """Return the pending results of functions."""
        return [future for work in self._work for future in work.unfinished()]

    def done(self, wait: bool = False, timeout_s: float | None = None) -> list[Group]:
        """Return the groups scored since the last call, in the order they were started.

        With `wait`, blocks until one is scored, unless nothing is being scored. Deadlines bound the wait; `timeout_s`
        ends it once no function has returned for that long.
        """
        while True:
            finished = [work for work in self._work if not work.unfinished()]
            if finished or not wait or not self._work:
                break
            if not wait_for(self.unfinished(), timeout_s, return_when=FIRST_COMPLETED).done:
                break
        self._warn_of_signals()
        self._work = [work for work in self._work if work not in finished]
        for work in finished:
            self._complete(work)
        return [work.group for work in finished]

    def _warn_of_signals(self) -> None:
        for name in self._signals - self._warned:
            self._warned.add(name)
            warnings.warn(f"reward {name}: {NO_SIGNALS}", stacklevel=3)

    def pop_logged(self) -> dict[str, float]:
        """Return means of the values logged with `log_metric` since the last call."""
        logged, self._metrics = self._metrics, []
        values: dict[str, list[float]] = {}
        for name, value in logged:
            if abs(value) <= MAX_REWARD:  # not NaN, as a mean of nothing is: see `Records.write`
                values.setdefault(name, []).append(value)
        return {name: sum(v) / len(v) for name, v in values.items()}

    def close(self) -> None:
        """Kill the workers. Groups in flight are no longer scored."""
        self._pool.close()
        self._calls.close()

    def _function(self, spec: RewardSpec, weight: float) -> RewardFunction:
        if isinstance(spec, str) and spec in REWARDS:
            spec = load_function(REWARDS[spec])
        if (model := _reward_model(spec, self._device)) is not None:
            parameters = dict.fromkeys(("prompts", "completions"), True)
            return RewardFunction(function_name(model), weight, parameters, call=model, model=model)
        if isinstance(spec, PooledReward):
            parameters = {**dict.fromkeys(spec.columns, True), "**": False}
            return RewardFunction(function_name(spec), weight, parameters, target=spec.target, arguments=spec.arguments)
        if isinstance(spec, str):
            return self._by_name(spec, weight)
        if not callable(spec):
            raise ValueError(f"reward_funcs: expected a function or its name, got {spec!r}")
        if self._workers.sandbox and not is_own(spec):
            raise ValueError(
                f"reward_sandbox: {function_name(spec)} was given as a Python object, which runs in this process; give "
                "it by name: 'module:function' or 'path/to/file.py:function'"
            )
        parameters = parameters_of(spec)
        if set(VERL_ARGUMENTS) <= set(parameters):
            return RewardFunction(function_name(spec), weight, {"**": False}, call=spec, arguments=verl_arguments)
        compares, quick = compares_siblings(spec), any(spec is load_function(REWARDS[name]) for name in QUICK)
        return RewardFunction(function_name(spec), weight, parameters, call=spec, compares=compares, quick=quick)

    def _by_name(self, target: str, weight: float) -> RewardFunction:
        if ":" not in target:
            known, hint = ", ".join(REWARDS), reward_hint(target, REWARDS)
            raise TargetError(
                f"reward_funcs: unknown name '{target}'.{hint} Built in: {known}; your own are given "
                "as 'module:function' or 'path/to/file.py:function', reward models as a directory or "
                "'owner/model' of the hub"
            )
        try:
            inspect_function = "winnow.env.workers.functions:inspect_function"
            known = self._pool.call(inspect_function, {"target": target}, called=target).result()
        except WorkerError as error:
            cause = self._workers.with_hidden(error.detail).removeprefix(f"{TargetError.__name__}: ")
            raise TargetError(f"reward_funcs: cannot load {cause}") from None
        if set(VERL_ARGUMENTS) <= set(known["parameters"]):
            return RewardFunction(known["name"], weight, {"**": False}, target=target, arguments=verl_arguments)
        return RewardFunction(known["name"], weight, known["parameters"], target=target, compares=known["compares"])

    def _begin(self, function: RewardFunction, rollouts: list[Rollout], arguments: dict[str, Any]) -> PendingRewards:
        n = len(rollouts)
        pending = PendingRewards(function, rollouts, [], RewardLogs(n))
        columns = {name: value for name, value in arguments.items() if name not in STANDARD}
        try:
            check_columns(function.name, function.parameters, columns)
            if function.arguments is None:
                pending.futures = [self._call(function, arguments, n, pending.logs)]
            else:
                calls = arguments_each(function.arguments, arguments["completions"], columns)
                pending.futures = [self._call_one(function, each) for each in calls]
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            pending.futures = [failed] * n
        return pending

    def _call_one(self, function: RewardFunction, arguments: dict[str, Any]) -> Future[Any]:
        """Call a function for one completion."""
        if function.target is not None:
            return self._pool.call(function.target, arguments)
        return self._in_process(function, {name: private(value) for name, value in arguments.items()})

    def _call(self, function: RewardFunction, arguments: dict[str, Any], n: int, logs: RewardLogs) -> Future[Any]:
        """Call a function for the n completions of a group."""
        accepted = function.parameters
        loggers = [name for name in LOGGERS if name in accepted or "**" in accepted]
        chosen = {k: v for k, v in arguments.items() if k in accepted or "**" in accepted}
        if function.target is not None:
            if "environments" not in accepted:
                chosen.pop("environments", None)
            if "trainer_state" in chosen:
                chosen["trainer_state"] = vars(self.trainer_state)
            call = {"target": function.target, "kwargs": chosen, "n": n, "loggers": loggers}
            return self._pool.call("winnow.env.workers.functions:call_function", call, called=function.target)
        if function.quick:
            assert function.call is not None
            done: Future[Any] = Future()
            done.set_result(function.call(**chosen))
            return done
        for name, values in chosen.items():
            if name == "environments" and values is not None:
                chosen[name] = list(values)
            elif name not in ("environments", "trainer_state"):
                chosen[name] = [private(value) for value in values]
        return self._in_process(function, chosen | {name: getattr(logs, name) for name in loggers})

    def _in_process(self, function: RewardFunction, arguments: dict[str, Any]) -> Future[Any]:
        assert function.call is not None
        bound, notice = partial(function.call, **arguments), partial(self._signals.add, function.name)

        def call() -> Any:
            with noticing_signals(notice):
                return awaited(bound())

        async def call_async() -> Any:
            with noticing_signals(notice):
                return await resolved(bound())

        return self._calls.submit_async(call_async) if _is_async(bound) else self._calls.submit(call)

    def _complete(self, work: ScoredGroup) -> None:
        by_rollout: dict[int, list[Outcome]] = {id(rollout): [] for rollout in work.rollouts}
        for pending in work.pending:
            outcomes = pending.outcomes()
            if work.group.purpose == "train" and not pending.rollouts[0].greedy:
                self._metrics.extend((name, value) for name, value in pending.logs.metrics)
            for column, values in pending.logs.extra.items():
                for rollout, value in zip(pending.rollouts, values, strict=True):
                    rollout.extra[column] = value
            for rollout, outcome in zip(pending.rollouts, outcomes, strict=True):
                by_rollout[id(rollout)].append(outcome)
            printed = self._workers.printed(self._pool, pending.function.target)
            for rollout in pending.rollouts if printed else ():
                rollout.printed[pending.function.name] = printed
        for rollout in work.rollouts:
            self._write(rollout, by_rollout[id(rollout)])

    def _cause(self, function: RewardFunction, error: Exception) -> str:
        if isinstance(error, WorkerError):
            return self._workers.with_hidden(error.detail)
        return describe_error(error) + (f"; {NO_SIGNALS}" if function.name in self._signals else "")

    def _write(self, rollout: Rollout, outcomes: Sequence[Outcome]) -> None:
        """Write the reward, or fate and reason, of one rollout."""
        rollout.rewards, values, cause = {}, [], ""
        for function, outcome in zip(self._functions, outcomes, strict=True):
            rollout.rewards[function.name] = None if isinstance(outcome, Exception) else outcome
            if isinstance(outcome, float):
                values.append(function.weight * outcome)
            elif outcome is not None and not cause:
                cause = f"reward {function.name}: {self._cause(function, outcome)}"
        reward = sum(values)
        if not cause and not values:
            cause = "no reward function applied"
        if not cause and not abs(reward) <= MAX_REWARD:
            cause = f"the weighted sum of rewards is {reward}"
        if cause:
            rollout.fate, rollout.reason = Fate.FAILED, redact(cause, self._workers.env)
        else:
            rollout.reward = reward


def _reward_model(spec: Any, device: str | None) -> RewardModel | None:
    """Return the reward model given or named (a directory, or a hub name of two parts). Raises ConfigError."""
    path = isinstance(spec, str) and ":" not in spec and not spec.endswith(".py")
    named = path and (Path(spec).is_dir() or spec.count("/") == 1)
    if not named and "torch" not in sys.modules:
        return None
    from .reward_model import RewardModel, is_model

    if isinstance(spec, RewardModel):
        return spec
    return RewardModel(spec, device=device) if named or is_model(spec) else None


def _is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call gives a coroutine, also for an instance whose class has `async def __call__`."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
