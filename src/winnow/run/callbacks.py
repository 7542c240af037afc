"""Callbacks around the steps of a run, with the names of transformers and TRL, whose callbacks work too."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..config import ConfigError, RunConfig


@dataclass
class TrainerState:
    """Progress of a run. A resume restores it."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    """Prompts trained on, divided by the training prompts; counted as in `num_train_epochs`."""
    log_history: list[dict[str, float]] = field(default_factory=list)
    """Metrics of the last step only; earlier ones are in metrics.jsonl."""
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


@dataclass
class TrainerControl:
    """Requests of a callback to the run."""

    should_training_stop: bool = False
    """End after this step as at `max_steps`: save, and write `model/`."""
    should_save: bool = False
    """Save a checkpoint after this step."""
    should_evaluate: bool = False
    """Evaluate at the end of the running step, or of the next one if set between two."""


class TrainerCallback:
    """Base class of callbacks. All methods are optional, and a class with some of them need not derive from it.

    Each is called with `args` (the RunConfig), `state`, `control`, and by keyword `model` (None if it is in other
    processes) and `processing_class`. An exception in a callback ends the run; its last checkpoint stays.
    """

    def on_train_begin(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called before the first step, also of a resume."""

    def on_step_begin(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called before the prompts of a step are selected."""

    def on_step_end(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called after an update. `groups`: all groups that finished in the step, with fates, rewards, advantages."""

    def on_log(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called with `logs`, a step's metrics as in metrics.jsonl. Step 0 has the evaluation at the start."""

    def on_evaluate(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called with `metrics` of an evaluation: `eval/pass@1`, ..."""

    def on_save(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called after a checkpoint is written."""

    def on_train_end(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called at the end of a run, also if it is closed before `max_steps`; not after an error."""


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of a run, in order."""

    def __init__(self, callbacks: Iterable[Any], max_steps: int) -> None:
        self.state = TrainerState(max_steps=max_steps)
        self.control = TrainerControl()
        self._all: list[Any] = []
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Add an object or a class. Raises ConfigError when it has none of the methods; warns of unknown ones."""
        callback = callback() if isinstance(callback, type) else callback
        name = type(callback).__name__
        if not any(hasattr(callback, event) for event in EVENTS):
            raise ConfigError(f"callbacks: {name} has none of the methods {', '.join(EVENTS)}")
        unknown: set[str] = set()
        for kind in type(callback).__mro__:
            if not kind.__module__.startswith("transformers."):
                unknown |= {key for key in vars(kind) if key.startswith("on_")} - set(EVENTS)
        if unknown:
            names = ", ".join(sorted(unknown))
            warnings.warn(f"callbacks: {name}.{names} is never called; a run calls {', '.join(EVENTS)}", stacklevel=3)
        self._all.append(callback)

    def remove(self, callback: Any) -> None:
        """Remove a callback, by itself or its class."""
        self._all = [one for one in self._all if one is not callback and type(one) is not callback]

    def call(self, event: str, args: RunConfig, **kwargs: Any) -> None:
        """Call an event of all callbacks; one may return the control to set it, as in transformers."""
        for callback in self._all:
            method = getattr(callback, event, None)
            if method is not None:
                self.control = method(args, self.state, self.control, **kwargs) or self.control

    def take(self, request: str) -> bool:
        """Return and clear a callback's request: `should_save` or `should_evaluate`."""
        requested = bool(getattr(self.control, request))
        setattr(self.control, request, False)
        return requested
