"""Trainer, the entry point for users. It builds every part from a configuration; a `Session` runs and saves.

Trainer(model="path/or/hub-name", env="countdown", config={"max_steps": 200}).train()
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import torch
from rich.console import Console

from ..base.errors import ConfigError
from ..base.files import private_directory, readable
from ..base.machine import heap_frozen
from ..config import RunConfig
from ..env.rewards.rewarder import RewardSpec
from ..learner import LearnerLostError
from ..record.account import is_hosted
from ..record.records import RunDirectoryError, lock
from ..record.resume_keys import resumed_config
from ..record.stop_conditions import RunStoppedError, TaskSolvedError, memory_errors
from . import checkpoint, serve
from .build import build, build_rewarder, require_held_out
from .callbacks import CallbackArguments, Callbacks, TrainerState
from .checkpoint import refuse_used_directory
from .inputs import TrainerInputs, config_from, given_again, refuse_changes, refuse_resume
from .session import Session


class Trainer:
    """Train one run: `train()` to its end, or `step()` in your own loop.

    - `model`: a Hugging Face directory or hub name, or a loaded causal LM with its tokenizer as `processing_class`.
    - `env`: a task's name, `{"name": ..., options}`, or a `Task` object.
    - `train_dataset`, `eval_dataset`: rows instead of `env`, as a `datasets.Dataset`, a pandas data frame or any
      iterable of mappings, read to its end. `env` may then be `{"name": "dataset", options}` without paths. The run
      does not store them: pass them to `resume` again.
    - `reward_funcs`: functions with TRL's signature, or their names `module:function`; default: the task's own.
    - `config`: a RunConfig, a dict of its keys, or a YAML file; `model` and `env` given here win. A `GRPOConfig` of TRL
      (also as `args`) and a `LoraConfig` as `peft_config` are translated.
    - `callbacks`: objects or classes with methods of `TrainerCallback`; those of transformers work too.

    Raises ConfigError if the run cannot work, before anything is written.
    """

    console: Console
    """Console for progress; nothing is shown unless it is set."""
    state: TrainerState
    """Progress of the run."""
    args: CallbackArguments
    """The configuration, also under TRL's names."""
    callback_handler: Callbacks
    """The run's callbacks, in `callbacks`."""
    processing_class: Any
    """The tokenizer, under TRL's name."""

    def __init__(
        self,
        model: Any = None,
        env: Any = None,
        reward_funcs: Sequence[RewardSpec] | RewardSpec | None = None,
        config: Any = None,
        processing_class: Any = None,
        *,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: Iterable[Any] | None = None,
        callbacks: Iterable[Any] | None = (),
        **of_trl: Any,
    ) -> None:
        config = config_from(config, of_trl)
        given = TrainerInputs(model, env, reward_funcs, processing_class, train_dataset, eval_dataset).normalized()
        self._set_up(given, given.config(config), callbacks or (), resume=False)

    @classmethod
    def resume(
        cls,
        run_dir: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        callbacks: Iterable[Any] | None = (),
        **given: Any,
    ) -> Trainer:
        """Return a trainer that continues from the last checkpoint of `run_dir`.

        `overrides`: changed keys, e.g. `{"max_steps": 400}`; most keys may not change. `given`: the arguments of
        `Trainer` that were objects (a model, rows, functions). Raises ConfigError naming what differs.
        """
        if not isinstance(overrides, Mapping | None):
            raise ConfigError(f"overrides: a dict of the keys to change, not {type(overrides).__name__}")
        trainer = cls.__new__(cls)
        again = TrainerInputs(**given_again(given)).normalized()
        saved = resumed_config(Path(run_dir), overrides or {})
        trainer._set_up(again, again.config(saved.model_dump(), resumed=True), callbacks or (), resume=True)
        return trainer

    def _set_up(self, given: TrainerInputs, config: RunConfig, callbacks: Iterable[Any], *, resume: bool) -> None:
        self._begun_at = time.monotonic()
        self.console = Console(quiet=True)
        self.run_dir = Path(config.output_dir).absolute()  # the working directory may change
        self._resumed, self._rewards = resume, given.reward_funcs
        self._session: Session | None = None
        self._stop_requested = self._ended = False
        torch.manual_seed(config.seed)
        self._held: IO[str] | None = lock(self.run_dir) if resume else None
        try:
            self._checkpoint = self._find_checkpoint(config) if resume else None
            if not resume:
                refuse_used_directory(self.run_dir)
            with memory_errors("before the first step"):
                task, resolved = given.prepare(config, resumed=resume)
                self.callback_handler = handler = Callbacks(callbacks, resolved.config, len(task.train))
                self._parts = parts = build(
                    resolved, task, given, self._checkpoint, resumed=resume, entry=serve.__name__
                )
        except BaseException:
            if self._held is not None:
                self._held.close()
            raise
        self.state, self.args = handler.state, handler.args
        self.resolved, self.config, self.task, self.engine = resolved, resolved.config, task, parts.engine
        self.tokenizer = self.processing_class = parts.tokenizer
        self.learner, self.methods = parts.learner, parts.methods
        self.rewarder, self.sampler = parts.rewarder, parts.sampler

    def _find_checkpoint(self, config: RunConfig) -> Path | None:
        """Return the checkpoint to resume; None to start from the beginning."""
        newest = checkpoint.latest(self.run_dir)
        if newest:
            state = checkpoint.load_run_state(newest)
            refuse_changes(self.run_dir, state["config"], config)
            step = state["loop"]["step"]
            if step > config.max_steps:
                raise ConfigError(f"{self.run_dir}: max_steps={config.max_steps}, but the run is at step {step}")
        elif is_hosted(self.run_dir):
            raise ConfigError(f"{self.run_dir}: is the account of a run inside TRL or verl; resume that there")
        return newest

    @property
    def model(self) -> Any:
        """The model that is trained, wrapped by peft under LoRA; after training with its last weights.

        Raises ConfigError if it is in other processes.
        """
        model = getattr(self.learner, "model", None)
        if model is None:
            raise ConfigError(f"model: it is in the learner's processes; load '{self.run_dir}/model' after training")
        return model

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an object or a class. Raises ConfigError if a run cannot call it."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, given as the object or its class, and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, given as the object or its class."""
        self.callback_handler.remove_callback(callback)

    def train(self, resume_from_checkpoint: Any = None) -> dict[str, float]:
        """Train to the end, once; return the last evaluation and totals.

        `resume_from_checkpoint`: the run that `Trainer.resume` got, or its newest checkpoint; else ConfigError. Raises
        RunStoppedError when the run cannot make progress, and KeyboardInterrupt, after saving, when it is interrupted.
        """
        refuse_resume(resume_from_checkpoint, self.run_dir, resumed=self._resumed, latest=self._checkpoint)

        def announce() -> None:
            self.console.print("finishing this step, then saving; once more to stop at once", style="yellow")

        with self._running() as session, StopSignals(self.stop, announce), heap_frozen():
            session.run()
        return self.finish()

    def step(self) -> dict[str, float]:
        """Run one optimizer step; return its metrics, as in metrics.jsonl. Saves every `save_steps`.

        End your loop with `finish()` or `close()`, or wrap it in `with trainer:`, which saves, and writes `model/` if
        `max_steps` was reached. Raises TaskSolvedError when all prompts are solved (the run is then finished),
        RunStoppedError when it cannot make progress, ConfigError after the last step. After an error the run is as it
        was last saved.
        """
        with self._running() as session:
            if session.loop.step < self.config.max_steps:
                return session.step()
        raise ConfigError(f"max_steps: the run has made its {self.config.max_steps} steps; call finish()")

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current policy, also after training; return held-out metrics such as `eval/pass@1`.

        They are logged like a step's metrics; after training, only callbacks and trackers' runs that you opened get
        them. Raises ConfigError without held-out data, or after training with samplers in other processes.
        """
        require_held_out(self.task)
        if self._ended and self._session is not None:
            rewarder = build_rewarder(self.config, self.task, self._rewards)
            try:
                return self._session.evaluate_after_end(rewarder)
            finally:
                rewarder.close()
        with self._running() as session:
            return session.evaluate()

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the current policy as a Hugging Face model directory, adapters merged.

        The run's folder has a config.json of its own, and the end of a run writes its `model/`. Without `output_dir`,
        or with one of these or a folder in `model/`, the model is therefore in `model-at-step-N/` while the run goes
        on, then in `model/`.
        """
        target, finished = Path(output_dir or self.run_dir), self.run_dir / "model"
        exported = self._ended and getattr(self.learner, "model", None) is None  # by ranks, which have ended
        if exported and not finished.is_dir():
            raise ConfigError(
                f"save_model: the run ended without {finished}; take the model of a checkpoint "
                f"({self.run_dir}/checkpoints/step-N/model), or end the run: Trainer.resume('{self.run_dir}').finish()"
            )
        inside = finished.resolve() in (target.resolve(), *target.resolve().parents)
        if target.resolve() == self.run_dir.resolve() or (inside and not self._ended):
            target = finished if self._ended else self.run_dir / f"model-at-step-{self.state.global_step}"
            warnings.warn(f"save_model: the model is in {target}; the run's own files are in its folder", stacklevel=2)
        if exported:
            if target.resolve() != finished.resolve():
                shutil.copytree(finished, target, dirs_exist_ok=True)
            return
        self._parts.export(target)
        readable(target)

    def stop(self) -> None:
        """Make `train()` save and end after the current step. May be called from another thread."""
        self._stop_requested = True
        if self._session is not None:
            self._session.stop_requested = True

    def finish(self) -> dict[str, float]:
        """End the run now: write `model/` and close the ledger; return the last evaluation and totals."""
        with self._running() as session:
            totals = session.finish()
        self._end()
        return totals

    def close(self) -> None:
        """Save a checkpoint and end, without `model/`; `Trainer.resume` continues from there."""
        self._leave(failed=False)

    def discard(self) -> None:
        """End without saving anything more."""
        self._end(failed=True)

    def _leave(self, *, failed: bool) -> None:
        if self._session is not None and not self._ended:
            with self._running() as session:
                session.leave()
        self._end(failed=failed)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        done = self._session is not None and self.state.global_step >= self.config.max_steps
        if done and kind is None and not self._ended:
            self.finish()
        else:  # an error between two steps loses nothing either
            self._leave(failed=kind is not None and not issubclass(kind, KeyboardInterrupt))

    @contextmanager
    def _running(self) -> Iterator[Session]:
        """Yield the session, opening it the first time; an error ends the run as it was last saved."""
        if self._ended:
            raise RunDirectoryError(f"a Trainer runs once; continue with Trainer.resume('{self.run_dir}', ...)")
        try:
            if self._session is None:
                self._session = self._open_session()
            yield self._session
        except TaskSolvedError:  # in a user's loop; `train` handles it itself
            if self._session is not None:
                self._session.solved()
                self._session.finish()
            self._end()
            raise
        except LearnerLostError as error:  # its weights are lost; only the last checkpoint is left
            self._end(failed=True)
            raise RunStoppedError(f"{error}\ngo on with: winnow resume {self.run_dir}") from None
        except BaseException as error:
            self._end(failed=not isinstance(error, KeyboardInterrupt))  # an interrupted run goes on later
            raise

    def _open_session(self) -> Session:
        with memory_errors("before the first step"):
            if self._held is None:
                private_directory(self.run_dir)
                self._held = lock(self.run_dir)
                refuse_used_directory(self.run_dir)  # again: another run may have come first
            session = Session(self._parts, self.callback_handler, self.console, self._checkpoint, self._begun_at)
            session.open()
            session.start()
        session.stop_requested = self._stop_requested
        return session

    def _end(self, *, failed: bool = False) -> None:
        if not self._ended:
            self._ended = True
            with ExitStack() as closing:  # all of them, also after one that fails
                if self._held is not None:
                    closing.callback(self._held.close)
                closing.callback(self._parts.close)
                if self._session is not None:
                    self._session.close(failed=failed)


# ---------------------------------------------------------------- signals

SPEAK_S = 5.0
"""Longest wait for the announcement at the end: the terminal may block."""


class StopSignals:
    """First SIGINT, SIGTERM or SIGHUP: finish the step and save. Second: stop at once (a resume redoes the step).

    A SIGHUP that is ignored, as under `nohup`, stays ignored. `request` runs in the signal handler, between any two
    instructions of the main thread, so it may only set a flag. `announce` prints from a separate thread: in a handler
    it could interrupt another line, or an import that printing needs.
    """

    def __init__(self, request: Callable[[], None], announce: Callable[[], None]) -> None:
        self._request = request
        self._announce = announce
        self._seen = False
        self._previous: dict[int, Any] = {}
        self._signalled: SimpleQueue[bool] = SimpleQueue()  # its put() is safe in a handler
        self._speaker = threading.Thread(target=self._speak, name="winnow-signals", daemon=True)

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._speaker.start()
            hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._previous[number] = signal.signal(number, self._handle)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            self._signalled.put(False)
            self._speaker.join(SPEAK_S)

    def _handle(self, number: int, frame: object) -> None:
        if self._seen:
            raise KeyboardInterrupt("stopped at once; the step under way was not saved")
        self._seen = True
        self._request()
        self._signalled.put(True)

    def _speak(self) -> None:
        while self._signalled.get():
            self._announce()
