"""Callbacks around the steps of a run, with the names of transformers and TRL, whose callbacks work too."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import ConfigError
from ..config import RunConfig
from ..config.options import new_groups
from ..config.paths import as_saved


@dataclass
class TrainerState:
    """Progress of a run. A resume restores it."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    """Prompts rolled out, divided by the training prompts; counted as in `num_train_epochs`."""
    log_history: list[dict[str, float]] = field(default_factory=list)
    """The rows of metrics.jsonl, as `on_log` gets them."""
    best_metric: float | None = None
    """Best value of `metric_for_best_model` so far; set after `on_evaluate`, as in transformers."""
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    """None: a run keeps its last checkpoints, not its best."""
    logging_steps: int = 1
    eval_steps: int = 1
    save_steps: int = 1
    train_batch_size: int = 0
    """Rollouts of a step."""
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    """Tokens sampled, as `num_tokens`."""
    total_flos: float = 0.0
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None

    def log(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Append a row of metrics to the history; return it with `epoch`, and evaluations under TRL's names, too."""
        row = {sys.intern(str(k)): v for k, v in {**metrics, **trl_names(metrics), "epoch": self.epoch}.items()}
        self.log_history.append(row)
        return row


def trl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an evaluation under TRL's names: `eval_pass@1`, and `eval_reward` for `eval/avg@n`."""
    names = {f"eval_{key.removeprefix('eval/')}": x for key, x in metrics.items() if key.startswith("eval/")}
    return names | ({"eval_reward": metrics["eval/avg@n"]} if "eval/avg@n" in metrics else {})


@dataclass
class TrainerControl:
    """Requests of a callback to the run."""

    should_training_stop: bool = False
    """End after this step as at `max_steps`: save, and write `model/`."""
    should_save: bool = False
    """Save a checkpoint after this step."""
    should_evaluate: bool = False
    """Evaluate after this step, unless it was evaluated already."""
    should_log: bool = False
    """Without effect: every step is logged."""
    should_epoch_stop: bool = False
    """Refused: steps do not belong to epochs."""


class TrainerCallback:
    """Base class of callbacks. All methods are optional, and a class with some of them need not derive from it.

    Each is called with `args` (the configuration, also under TRL's names), `state`, `control`, and by keyword `model`
    and `optimizer` (None if they are in other processes) and `processing_class`; `lr_scheduler` and the data loaders
    are None. An exception in a callback ends the run; its last checkpoint stays.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called before the first step, also of a resume."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called before the prompts of a step are selected."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called after an update. `groups`: all groups that finished in the step, with fates, rewards, advantages."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called with `logs`, a step's metrics as in metrics.jsonl, and evaluations under TRL's names, too.

        Step 0 has the evaluation at the start.
        """

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called with `metrics` of an evaluation: `eval/pass@1`, ..., and under TRL's names: `eval_pass@1`, ..."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called after a checkpoint is written."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called at the end of a run, also if it is closed before `max_steps`; not after an error."""


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


NOT_HERE = {
    "SyncRefModelCallback": "set sync_ref_model: true",
    "LogCompletionsCallback": "set log_completions; samples.jsonl and the run's page show them",
    "WeaveCallback": "set log_completions; samples.jsonl and the run's page show them",
    "JITCheckpointCallback": "leave it out: a run saves itself when it is interrupted",
    "ClearMLCallback": "log to ClearML in an on_log of your own",
    "DagsHubCallback": "set report_to: [mlflow] and MLFLOW_TRACKING_URI",
    "FlyteCallback": "use push_to_hub, or an on_save of your own",
    "NeptuneCallback": "log to Neptune in an on_log of your own",
}
"""Callbacks of transformers and TRL that need their trainers or folders, and what to write instead."""
UPLOADS = {
    "WandbCallback": "WANDB_LOG_MODEL",
    "MLflowCallback": "HF_MLFLOW_LOG_ARTIFACTS",
    "DVCLiveCallback": "HF_DVCLIVE_LOG_MODEL",
}
"""Callbacks that upload transformers' checkpoint folders if this environment variable asks for it."""


class Callbacks:
    """The callbacks of a run, in order."""

    def __init__(self, callbacks: Iterable[Any], config: RunConfig, train_prompts: int) -> None:
        self.args = CallbackArguments(config)
        new = new_groups(config.prompts_per_step, config.reuse)
        self.state = TrainerState(
            max_steps=config.max_steps,
            eval_steps=config.eval_steps or config.max_steps,
            save_steps=config.save_steps,
            train_batch_size=config.prompts_per_step * config.num_generations,
            num_train_epochs=math.ceil(config.max_steps * new / train_prompts),
        )
        self.control = TrainerControl()
        self.callbacks: list[Any] = []
        for callback in callbacks:
            self.add_callback(callback)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    def add_callback(self, callback: Any) -> None:
        """Add an object or a class. Raises ConfigError when a run cannot call it; warns of methods never called."""
        callback = callback() if isinstance(callback, type) else callback
        name = type(callback).__name__
        if not any(hasattr(callback, event) for event in EVENTS):
            raise ConfigError(f"callbacks: {name} has none of the methods {', '.join(EVENTS)}")
        self._require_usable(callback)
        unknown: set[str] = set()
        for kind in type(callback).__mro__:
            if not kind.__module__.startswith(("transformers.", "trl.")):
                unknown |= {key for key in vars(kind) if key.startswith("on_")} - set(EVENTS)
        if unknown:
            names = ", ".join(sorted(unknown))
            warnings.warn(f"callbacks: {name}.{names} is never called; a run calls {', '.join(EVENTS)}", stacklevel=3)
        self.callbacks.append(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, given as itself or its class, and return it; None if it is not one of the run's."""
        for one in self.callbacks:
            if one is callback or (isinstance(callback, type) and isinstance(one, callback)):
                self.callbacks.remove(one)
                return one
        return None

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, given as itself or its class."""
        self.pop_callback(callback)

    def call(self, event: str, **kwargs: Any) -> None:
        """Call an event of all callbacks; one may return the control to set it, as in transformers."""
        kwargs |= {"lr_scheduler": None, "train_dataloader": None, "eval_dataloader": None}
        for callback in [*self.callbacks]:
            method = getattr(callback, event, None)
            if method is None:
                continue
            given = kwargs
            if _foreign(callback):  # it would show an evaluation twice
                given = {key: _only_trl_names(value) for key, value in kwargs.items()}
            self.control = method(self.args, self.state, self.control, **given) or self.control
            if self.control.should_epoch_stop:
                raise ConfigError(
                    f"callbacks: {type(callback).__name__} set should_epoch_stop, but steps do not belong to epochs; "
                    "set should_training_stop"
                )

    def report(self, logs: dict[str, float], notify: Callable[..., None]) -> None:
        """Pass a row of metrics to `on_log`, and those of an evaluation to `on_evaluate`."""
        notify("on_log", logs=dict(logs))
        evaluation = {key: value for key, value in logs.items() if key.startswith(("eval/", "eval_"))}
        if evaluation:
            notify("on_evaluate", metrics=evaluation)
            self.evaluated(logs)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Remember the best evaluation by `metric_for_best_model`.

        Raises ConfigError at the start of a run if the evaluation does not have that metric.
        """
        name, state = self.args.metric_for_best_model, self.state
        if name is None:
            return
        names = trl_names(metrics)
        if name not in names:
            if state.global_step == 0:
                raise ConfigError(
                    f"metric_for_best_model: the evaluation has no {name}; it has {', '.join(sorted(names))}"
                )
            return
        value, best = names[name], state.best_metric
        if best is None or (value > best if self.args.greater_is_better else value < best):
            state.best_metric, state.best_global_step = value, state.global_step

    def take(self, request: str) -> bool:
        """Return and clear a callback's request: `should_save` or `should_evaluate`."""
        requested = bool(getattr(self.control, request))
        setattr(self.control, request, False)
        return requested

    def _require_usable(self, callback: Any) -> None:
        """Raise ConfigError for a callback of transformers or TRL that would fail during the run."""
        for kind in _foreign(callback):
            name = kind.__name__
            if name in NOT_HERE:
                raise ConfigError(f"callbacks: {name} does not work here; {NOT_HERE[name]}")
            variable = UPLOADS.get(name, "")
            if os.environ.get(variable, "false").lower() not in ("", "0", "false", "no", "off"):
                raise ConfigError(
                    f"callbacks: {name} cannot upload checkpoints ({variable}={os.environ[variable]}); unset it, "
                    "and use push_to_hub or an on_save of your own"
                )
            if name == "EarlyStoppingCallback":
                c = self.args.config
                for key, example in (("eval_steps", "10"), ("metric_for_best_model", "eval_reward")):
                    if getattr(c, key) is None:
                        raise ConfigError(f"callbacks: {name} needs {key}; set it, e.g. {key}: {example}")


def _foreign(callback: Any) -> list[type]:
    """Return the classes of transformers' or TRL's own that a callback derives from; none for their base class."""
    kinds = [kind for kind in type(callback).__mro__ if kind.__module__.startswith(("transformers.", "trl."))]
    return [kind for kind in kinds if kind.__name__ not in ("TrainerCallback", "ExportableState")]


def _only_trl_names(value: Any) -> Any:
    is_metrics = isinstance(value, dict) and any(key.startswith("eval_") for key in value)
    return {k: v for k, v in value.items() if not k.startswith("eval/")} if is_metrics else value


# ---------------------------------------------------------------- arguments of callbacks


class CallbackArguments:
    """The keys of a RunConfig; TRL's names for what a run has; transformers' defaults for its other settings.

    Read-only: a run keeps the configuration that it started with.
    """

    def __init__(self, config: RunConfig) -> None:
        vars(self).update(config=config, _named=_named(config))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "config":  # also while a copy is made
            raise AttributeError(name)
        if name in self._named:
            return self._named[name]
        if hasattr(self.config, name):
            return getattr(self.config, name)
        from transformers import TrainingArguments

        for argument in dataclasses.fields(TrainingArguments):
            if argument.name == name:
                default, factory = argument.default, argument.default_factory
                return default if factory is dataclasses.MISSING else factory()
        raise AttributeError(f"args: neither Winnow nor transformers has a setting '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args.{name}: a run keeps the configuration that it started with; start another run")

    def __repr__(self) -> str:
        return repr(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as it is saved, without secrets."""
        return as_saved(self.config)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return it with values that every tracker takes."""
        return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in self.to_dict().items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def _named(c: RunConfig) -> dict[str, Any]:
    """Return the values of transformers' settings that follow from a run's keys."""
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    rollouts, best, greater = c.prompts_per_step * c.num_generations, c.metric_for_best_model, c.greater_is_better
    if greater is None:  # as in transformers
        greater = not (best or "").endswith("loss")
    return {
        "eval_strategy": IntervalStrategy.STEPS if c.eval_steps else IntervalStrategy.NO,
        "do_train": True,
        "do_eval": c.eval_steps is not None,
        "save_strategy": SaveStrategy.STEPS,
        "logging_strategy": IntervalStrategy.STEPS,
        "logging_steps": 1,
        "num_train_epochs": c.num_train_epochs or 0.0,
        "per_device_train_batch_size": rollouts,
        "per_device_eval_batch_size": c.eval_generations,
        "train_batch_size": rollouts,
        "generation_batch_size": rollouts,
        "steps_per_generation": 1,
        "bf16": c.dtype == "bfloat16",
        "fp16": c.dtype == "float16",
        "greater_is_better": greater,
        "metric_for_best_model": None if best is None else f"eval_{best.removeprefix('eval_').removeprefix('eval/')}",
        "world_size": 1,
        "process_index": 0,
        "local_process_index": 0,
        "n_gpu": 1,
        "should_log": True,
        "should_save": True,
    }
