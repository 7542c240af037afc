"""Every setting of the sweep, read off the method tables: a new method or option is covered without being named here.

A variant is one setting by itself. Of each method there are its defaults, every other value of its options that are
literals or switches, and what `VALUES` adds. `OPTIONS` makes methods act in a run as small as those of the sweep, and
`NEEDS` gives what a setting cannot be without; both are the only things that a new method may have to be added to.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from winnow.config import RunConfig
from winnow.run.resolved import TABLES

from .reading import Reading
from .rising import Rising

LISTS = ("gates",)
"""Fields that hold several methods."""
EXTRAS = {("engine", "vllm"), ("sync", "ray"), ("sync", "server"), ("learner", "fsdp")}
"""Methods that need what `make test` does not install: tests/scale composes them with others."""
ELSEWHERE = ("env",)
"""Tables that are no part of the sweep: an environment is what the others act in."""
PROFILE = "<profile>"
"""Stands for the file of pass rates, whose place is known when the sweep runs."""
MODEL = "<model>"
"""Stands for the model's directory."""

Settings = dict[str, Any]

REFILL: Settings = {"filter": "zero_variance"}
CARRY: Settings = REFILL | {"max_lag": 1}
PLAIN: Settings = {"policy_loss": "plain"}
LAGGED: Settings = {"max_lag": 2}
ANY_GATE: Settings = {"gates": [{"name": "divergence", "k": 1, "threshold": 0.6}]}

OPTIONS: dict[tuple[str, str], Settings] = {
    ("selector", "greso"): {"p_easy": 0.2, "p_hard": 0.2},
    ("selector", "ordered"): {"by": "number"},
    ("selector", "pass_rate"): {"profile": PROFILE},
    ("group_size", "sequential"): {"probe": 2},
    ("group_size", "adaptive_k"): {"window": 1, "tau": 0.1, "high": 6},
    ("gates", "divergence"): {"k": 1, "threshold": 0.6},
    ("gates", "random"): {"k": 1},
    ("gates", "arrol"): {"at": 2, "cold_start": 1},
    ("advantage", "max_at_k"): {"k": 2},
    ("engine", "local"): {"fused_kernels": False},  # which only a GPU can have
}
"""By field and name: options that every variant of a method starts from, besides its defaults."""

VALUES: dict[tuple[str, str], list[Settings]] = {
    ("selector", "greso"): [{"keep_floor": 0.5}, {"target": 1.0}],
    ("selector", "ordered"): [{"by": "task_type", "levels": ["y", "x"]}],
    ("selector", "pass_rate"): [{"refresh_steps": 1, "n": 2, "low": 0.0}],
    ("group_size", "adaptive_k"): [{"tau_down": 0.05, "dwell": 1}],
    ("group_size", "sequential"): [{"hard_size": 6}],
    ("gates", "divergence"): [
        {"k": 10, "threshold": 0.12, "steps": {1: 0.6, 2: 0.7}},
        {"termination": 0.5},
        {"progress": 0.3},
        {"per_task_type": {"x": 0.7, "y": 0}},
        {"per_task_type": {"x": {"signal": "action_entropy", "steps": {1: 0.7, 2: 0.5}}}},
        {"signal": "action_entropy", "threshold": 0.45},
    ],
    ("gates", "arrol"): [{"at": None, "quantile": 0.9}, {"min_survivors": 0}],
    ("correction", "mask"): [{"level": "geometric", "low": 0.9, "high": None, "only_negative": True, "weigh": False}],
    ("step_scale", "ess"): [{"reference": "measured"}],
    ("engine", "local"): [{"slots": 3}],
    ("sync", "in_process"): [{"lag": "continuous", "overlap": True}],
}
"""By field and name: further variants of a method. A literal or switch needs no entry, unless it needs others."""

NEEDS: dict[str, Settings] = {
    "group_size=sequential(unbiased:True)": REFILL,
    "rollout_batch=fixed": CARRY,
    "rollout_batch=fixed(surplus:discard)": REFILL,
    "rollout_batch=adaptive": CARRY,
    "rollout_batch=adaptive(surplus:discard)": REFILL,
    "advantage=opob": PLAIN,
    "advantage=otb": PLAIN,
    "sync=in_process": LAGGED,
    "sync=in_process(overlap:True)": {"max_lag": 2},
    "sync=in_process(lag:continuous": {"max_lag": 2, "save_steps": 2},  # or none would be in flight between steps
    "audit": ANY_GATE,
    "epsilon": {"num_iterations": 2},
    "importance_sampling_level": {"num_iterations": 2},
    "kl_estimator": {"beta": 0.05},
    "kl_in_reward": {"beta": 0.05},
    "reuse": {"correction": "truncate"},
}
"""By the beginning of a variant's name (the longest that fits): what it cannot be without."""

SWITCHES: list[Settings] = [
    {"filter": f"{Rising.__module__}:{Rising.__name__}"},
    {"gates": [f"{Reading.__module__}:{Reading.__name__}"]},
    {"seed": 1},
    {"num_generations": 2},
    {"max_lag": 1},
    {"max_lag": 2},
    {"num_iterations": 2},
    {"reuse": {"updates": 2, "audit": 0.5}},
    {"reuse": {"updates": 3, "max_age": 1, "min_ess": 0.9}},
    {"speculative": True},
    {"temperature": 0.7},
    {"top_p": 0.8},
    {"top_k": 10},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"stop": ["w2"]},
    {"audit": {"epsilon": 0.5}},
    {"audit": {"epsilon": 0.5, "max_signal_loss": 0.5}},
    {"epsilon": 0.01},
    {"epsilon_high": 0.28},
    {"beta": 0.05},
    {"reference_kl_steps": 2},
    {"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    {"dtype": "bfloat16"},
    {"entropy_coef": 0.01},
    {"teacher": {"model": MODEL}},
    {"teacher": {"model": MODEL, "reward_weight": 0}},
    {"soft_overlong_cache": 2},
    {"lr_scheduler_type": "linear", "warmup_steps": 1, "lr_end": 1e-3},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_decay_steps": 2},
    {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    {"weight_decay": 0.1},
    {"max_grad_norm": None},
    {"tokens_per_microbatch": 40},
    {"lora": {"r": 2}},
    {"eval_steps": 1, "eval_prompts": 2, "eval_generations": 2},
    {"success": {"at_least": 0.25}},
    {"history": "template", "max_segments": 2},
    {"history": "template", "context_length": 20},
]
"""Settings that belong to no method of Winnow. A literal or switch needs no entry, unless it needs others."""
NOT_SWEPT = frozenset(
    {"model", "env", "reward_funcs", "reward_weights", "output_dir", "device", "dtype", "threads", "max_steps"}
    | {"prompts_per_step", "max_prompt_length", "max_completion_length", "reward_timeout_s", "max_failed_share"}
    | {"reward_memory_mb", "reward_env", "reward_sandbox"}
    | {"max_skipped_steps", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "save_steps"}
    | {"save_total_limit", "log_completions", "report_to", "run_name", "num_train_epochs"}
    | {"chat_template", "chat_template_kwargs"}
    | {"eval_temperature", "eval_top_p", "eval_top_k", "eval_greedy", "matmul_precision", "optim", "optim_args"}
    | {"deterministic", "push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "metric_for_best_model"}
    | {"greater_is_better", "resume", "torch_compile"}
)
"""Fields whose value changes numbers but no path, or that make the place where a run happens."""


@dataclass(frozen=True)
class Variant:
    """One setting and what it cannot be without."""

    name: str
    settings: Settings = field(compare=False)
    needs: Settings = field(compare=False)

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(self.settings)

    def __repr__(self) -> str:
        return self.name


def variants() -> list[Variant]:
    """All of them, in a fixed order. Raises LookupError naming what has to be added here for a new method."""
    found = [variant for table in TABLES if table not in ELSEWHERE for variant in _of_field(table)]
    for settings in [*SWITCHES, *_of_configuration()]:
        key, value = next(iter(settings.items()))
        options = [f"{k}:{v}" for k, v in settings.items() if k != key]
        found.append(_variant(f"{key}={_shown(value)}" + (f"({', '.join(options)})" if options else ""), settings))
    return found


def together(*chosen: Variant) -> Settings:
    """The settings of several variants at once; of a field with several methods all that are wanted.

    What one needs gives way to what another sets.
    """
    merged: Settings = {}
    for variant in chosen:
        merged |= {key: value for key, value in variant.needs.items() if key not in merged}
    own: Settings = {}
    for variant in chosen:
        for key, value in variant.settings.items():
            own[key] = own[key] + value if key in LISTS and key in own else value
    return merged | own


def compatible(a: Variant, b: Variant) -> bool:
    """Whether both can be said at once: they set different fields, or a field that holds several methods."""
    return all(field in LISTS for field in a.fields & b.fields)


def _of_field(field: str) -> Iterator[Variant]:
    """Variants of the methods of one table."""
    if field not in RunConfig.model_fields:
        raise LookupError(f"the table '{field}' has no field of its name in the configuration; see ELSEWHERE")
    default = RunConfig.model_fields[field].default
    for name, cls in TABLES[field].items():
        if (field, name) in EXTRAS:
            continue
        given = OPTIONS.get((field, name), {})
        required = [f.name for f in dataclasses.fields(cls) if _required(f) and f.name not in given]
        if required:
            raise LookupError(f"{field}: {name} requires {required}: add values for them to OPTIONS in {__file__}")
        if not (default == name and not given):
            yield _method(field, name, {}, given)
        more = VALUES.get((field, name), [])
        for options in [o for o in _other_values(cls, given) if not any(o.items() <= m.items() for m in more)] + more:
            yield _method(field, name, options, given)


def _method(field: str, name: str, options: Settings, given: Settings) -> Variant:
    whole = {"name": name} | given | options
    own = ", ".join(f"{key}:{_shown(value)}" for key, value in options.items())
    return _variant(f"{field}={name}" + (f"({own})" if own else ""), {field: [whole] if field in LISTS else whole})


def _variant(name: str, settings: Settings) -> Variant:
    prefixes = [prefix for prefix in NEEDS if name.startswith(prefix)]
    return Variant(name, settings, NEEDS[max(prefixes, key=len)] if prefixes else {})


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}:{_shown(v)}" for k, v in value.items()) + "}"
    return str(value)


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _other_values(cls: type, given: Settings) -> Iterator[Settings]:
    """One option at a time: each literal that is not the default, and each switch turned."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if f.init and f.name not in given:
            yield from ({f.name: value} for value in _alternatives(hints[f.name]) if value != f.default)


def _of_configuration() -> Iterator[Settings]:
    """Literals and switches of the configuration itself."""
    for name, entry in RunConfig.model_fields.items():
        values = [{name: value} for value in _alternatives(entry.annotation) if value != entry.default]
        covered = [switch for switch in SWITCHES if name in switch]
        if name in TABLES or name in NOT_SWEPT:
            continue
        if not values and not covered:
            raise LookupError(f"'{name}' is in no variant: add a value to SWITCHES, or it to NOT_SWEPT, in {__file__}")
        yield from (v for v in values if not any(v.items() <= switch.items() for switch in covered))


def _alternatives(hint: Any) -> Iterator[Any]:
    if hint is bool:
        yield from (False, True)
    elif typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    elif typing.get_origin(hint) in (Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from _alternatives(part)
