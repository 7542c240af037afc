"""Builds the methods of a run and the loss from configuration values."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..base.files import from_json
from ..collect import Collector
from ..config import RunConfig
from ..config.errors import suggestion
from ..config.options import section_of
from ..env.base import Task
from ..env.rewards.rewarder import Rewarder
from ..methods.advantage import Advantage
from ..methods.base import Chart, RunFacts
from ..methods.correct import StepScale
from ..methods.filter import AllOf, Filter
from ..methods.gate import Gate, GateContext, NamedRule, RuleError, check_rule
from ..methods.gate.audit import Audits, SkipAudit, StopAudit
from ..methods.group_kind import GroupJudge
from ..methods.select import StreamSelector
from ..methods.size import GroupSize
from ..methods.success import AGENT, PUNISHMENT, Success, default_success
from ..record.account import Account
from ..record.stop_conditions import Limits
from ..reuse import Reuse
from ..sampler.base import GroupSource
from ..sampler.buffer import Buffer
from ..sampler.codec import Prompts
from ..sampler.drafts import Drafts
from ..sampler.scheduling import AsyncPace, SyncPace
from ..types import Prompt, Purpose
from .conflicts import require_loss
from .resolved import Options, sampling_params


@dataclass(frozen=True)
class Methods:
    options: Options
    selector: StreamSelector
    group_size: GroupSize
    gates: dict[str, Gate]
    audits: Audits
    filter: Filter
    judge: GroupJudge
    advantage: Advantage
    step_scale: StepScale

    def save(self, directory: Path) -> None:
        """Write what gates store with the weights."""
        for gate in self.gates.values():
            gate.save(directory)


def build_success(c: RunConfig, task: Task, functions: Mapping[str, str], weights: Sequence[float] | None) -> Success:
    """Return what counts as a right answer.

    `functions`: alias -> name of each reward function. `weights`: theirs, if given. Raises ConfigError when `success`
    names an unknown function, or the environment's reward of a task that has none.
    """
    names = list(dict.fromkeys(functions.values()))
    if c.success is None:
        return default_success(names, weights)
    decides = c.success.function
    if decides is None:  # the whole reward; but the punishment of a length makes no answer wrong
        judges = [name for name in names if name != PUNISHMENT]
        alone = len(judges) == 1 < len(names) and set(weights or [1.0]) == {1.0}
        return Success(judges[0] if alone else None, c.success.at_least)
    if decides in functions:
        return Success(functions[decides], c.success.at_least)
    if decides != "env" and not decides.startswith(AGENT):
        known = ["env", *functions]
        raise ConfigError(f"success: function: unknown reward function '{decides}'.{suggestion(decides, known)}")
    if getattr(task, "needs_reward_funcs", False) or task.make_env((task.train or task.test)[0]) is None:
        raise ConfigError(
            f"success: function: '{decides}' is the reward of an environment, and this task has none for some or "
            f"all prompts; name one of reward_funcs: {', '.join(names)}"
        )
    return Success(decides, c.success.at_least)


def build_methods(c: RunConfig, methods: Options, prompts: Sequence[Prompt], success: Success | None = None) -> Methods:
    """Build the methods of a run. `success`: what counts as right; default: a reward of 1.

    Raises ConfigError naming the field and the nearest valid name.
    """
    options, names = methods.methods, methods.names
    require_loss(c, methods)
    with _errors_of("group_size"):
        group_size: GroupSize = options["group_size"][0].build(c.num_generations)
    _require(GroupSize, group_size, "group_size", names["group_size"][0])
    if not hasattr(group_size, "smallest"):
        raise ConfigError(f"group_size: {names['group_size'][0]} has no smallest; set it where it is built")
    advantage: Advantage = options["advantage"][0]
    if advantage.smallest_group > group_size.smallest:
        raise ConfigError(
            f"advantage: {names['advantage'][0]} needs groups of at least {advantage.smallest_group} rollouts, but "
            f"they may have only {group_size.smallest}; lower its k, or raise num_generations or the sizes of "
            "group_size"
        )
    filters, filter_ = _filter_of(methods, c.seed)
    judge = GroupJudge(success or Success(), filter_.atol, advantage)
    of_advantage = advantage.group_relative, advantage.greedy_baseline
    facts = RunFacts(c, prompts, options, names, filters, *of_advantage, group_size.smallest, judge.least)
    for problem in facts.problems():
        raise ConfigError(problem)
    with _errors_of("group_size"):
        group_size.begin(prompts, judge)
    if not hasattr(group_size, "largest"):
        raise ConfigError(f"group_size: {names['group_size'][0]} has no largest; set it in `begin` or before")
    with _errors_of("selector"):
        selector: StreamSelector = options["selector"][0].build(prompts, c.seed, judge)
    _require(StreamSelector, selector, "selector", names["selector"][0])
    if group_size.in_parts:
        selector.probe = group_size.smallest
    audits = _audits(c, methods, selector)
    return Methods(
        options=methods,
        selector=selector,
        group_size=group_size,
        gates=build_gates(methods, c.seed, judge),
        audits=audits,
        filter=filter_,
        judge=judge,
        advantage=advantage,
        step_scale=options["step_scale"][0].build(),
    )


def _require(base: type, built: object, key: str, name: str) -> None:
    """Raise ConfigError where a method of the user's own builds something else than its kind's class."""
    if not isinstance(built, base):
        package = ".".join(base.__module__.split(".")[:3])
        raise ConfigError(
            f"{key}: {name} builds a {type(built).__name__}, not a {base.__name__}; derive from "
            f"{package}.{base.__name__}"
        )


@contextmanager
def _errors_of(key: str) -> Iterator[None]:
    """Turn a ValueError of a method into a ConfigError that names its key."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def method_charts(options: Options) -> list[dict[str, Any]]:
    """Return the charts that the methods of a run define, as JSON values."""
    charts: list[Chart] = []
    for key, methods in {**options.methods, "sync": [options.sync], "learner": [options.learner]}.items():
        names = options.gate_names if key == "gates" else [key] * len(methods)
        for name, each in zip(names, methods, strict=True):
            if hasattr(each, "charts"):
                charts += each.charts(name)
    return [asdict(chart) for chart in charts]


def rule_types(options: Options) -> dict[str, type]:
    """Return the classes of the rules that gates publish, by gate."""
    contexts = [GateContext(name) for name in options.gate_names]
    gates = [each.build(context) for each, context in zip(options.methods["gates"], contexts, strict=True)]
    return {context.name: type(gate.rule()) for context, gate in zip(contexts, gates, strict=True)}


def build_gates(options: Options, seed: int, judge: GroupJudge) -> dict[str, Gate]:
    """Build the gates of a run, by name. Raises ConfigError naming the option."""
    gates: dict[str, Gate] = {}
    given, written = options.methods["gates"], options.names["gates"]
    for each, as_written, name in zip(given, written, options.gate_names, strict=True):
        with _errors_of("gates"):
            gate = each.build(GateContext(name, seed, judge))
        _require(Gate, gate, "gates", as_written)
        try:
            check_rule(NamedRule(name, gate.rule()))
        except RuleError as error:
            raise ConfigError(f"gates: {error}") from None
        gates[name] = gate
    return gates


def _filter_of(options: Options, seed: int) -> tuple[list[Filter], Filter]:
    """Build every filter that `filter` names, and the one that is all of them."""
    given, names = options.methods["filter"], options.names["filter"]
    if not given:
        raise ConfigError("filter: the list is empty; name a filter, or leave filter out")
    with _errors_of("filter"):
        filters = [each.build(seed) if hasattr(each, "build") else each for each in given]
    for name, each in zip(names, filters, strict=True):
        _require(Filter, each, "filter", name)
    if len(filters) == 1:
        return filters, filters[0]
    with _errors_of("filter"):
        return filters, AllOf([(name.rpartition(":")[2], each) for name, each in zip(names, filters, strict=True)])


def _audits(c: RunConfig, options: Options, selector: StreamSelector) -> Audits:
    """Build the audits of a run. Raises ConfigError when no rule of it removes anything."""
    if c.audit is None:
        return Audits()
    (selects,), gates = options.names["selector"], options.gate_names
    if not selector.skips and not gates:
        raise ConfigError(
            f"audit: nothing to audit (selector: {selects} skips nothing, no gates); remove audit, or "
            "choose e.g. selector: greso"
        )
    epsilon, max_signal_loss = c.audit.epsilon, c.audit.max_signal_loss
    stops = {name: StopAudit(name, epsilon, max_signal_loss, seed=c.seed) for name in gates}
    name = selects.rpartition(":")[2]  # without a path, as those of gates
    skips = SkipAudit(name, epsilon, max_signal_loss, seed=c.seed) if selector.skips else None
    return Audits(stops, skips)


def build_collector(
    c: RunConfig,
    m: Methods,
    sampler: GroupSource,
    ledger: Account,
    prompts: Mapping[Purpose, Prompts],
    *,
    asynchronous: bool = False,
    limits: Limits | None = None,
    reuse: Reuse | None = None,
) -> Collector:
    """Build the collector of a run. `limits`: by default the configuration's."""
    ledger.judge = m.judge
    rollout_batch, masks = m.options.rollout_batch, c.mask_truncated_completions
    own = Limits(c.max_steps, c.max_failed_share, c.max_skipped_steps, masks, teacher=c.teacher is not None)
    buffer = Buffer(c.prompts_per_step, c.max_lag, carry=rollout_batch.carry or asynchronous)
    return Collector(
        prompts=prompts,
        sampler=sampler,
        selector=m.selector,
        group_size=m.group_size,
        filter=m.filter,
        buffer=buffer,
        pace=AsyncPace(buffer, sampler) if asynchronous else SyncPace(buffer, sampler, rollout_batch),
        refill_round=max(rollout_batch.size, c.prompts_per_step),
        ledger=ledger,
        judge=m.judge,
        limits=limits or own,
        gates=m.gates,
        audits=m.audits,
        reuse=reuse,
        drafts=Drafts(c.speculative),
    )


# ---------------------------------------------------------------- settings of a profile


def profile_settings(c: RunConfig, task: Task, rewarder: Rewarder, success: Success) -> dict[str, Any]:
    """Return what decides a profile's rates, but for the model, the seed and the number of rollouts."""
    template = [c.chat_template, c.chat_template_kwargs]
    sampling = asdict(sampling_params(c))
    sampling["stop"] = list(dict.fromkeys((*sampling["stop"], *task.stop)))
    return {
        "task": task.fingerprint(),
        "sampling": sampling,
        "max_prompt_length": c.max_prompt_length,
        "success": [success.function, success.at_least],
        "reward functions": rewarder.names,
        "reward weights": None if set(c.reward_weights or ()) <= {1.0} else c.reward_weights,
        "chat template": template if any(template) else None,
    }


def meta_path(profile: Path) -> Path:
    """Return the file that says what a profile was made with."""
    return profile.with_name(profile.name + ".meta.json")


def differences(there: dict[str, Any], now: dict[str, Any]) -> str:
    """Return what differs between two settings, as text; empty if nothing does."""
    there, now = _by_key(there), _by_key(json.loads(json.dumps(now)))
    differs = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    return "; ".join(f"{name}: {_short(there.get(name))} there, {_short(now.get(name))} now" for name in differs)


def _by_key(settings: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:16] + "…"


def warn_of_profile(c: RunConfig, task: Task, rewarder: Rewarder, success: Success) -> None:
    """Warn where the profile that the selector reads was made with other settings than the run's.

    A profile without a file of its settings is taken as it is.
    """
    if not (profile := section_of(c.selector).get("profile")):
        return
    settings = profile_settings(c, task, rewarder, success)
    try:
        key = from_json(meta_path(Path(profile)).read_text(encoding="utf-8"))["key"]
        there = {name: key.get(name) for name in settings}
    except (OSError, ValueError, KeyError, TypeError):
        return
    if changed := differences(there, settings):
        warnings.warn(
            f"selector: {profile} was made with other settings ({changed}), so its pass rates may not be this run's; "
            "make it again with `winnow pass-rates`, or ignore this if they are close enough",
            stacklevel=2,
        )
