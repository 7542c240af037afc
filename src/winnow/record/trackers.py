"""Trackers: send a run's metrics to other programs. A tracker that fails never ends a run."""

from __future__ import annotations

import json
import os
import posixpath
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..base.errors import ConfigError
from ..base.files import write_json
from ..base.machine import install

Settings = Mapping[str, Any]

PROJECT = "winnow"
TRACKER_IDS = "trackers.json"
"""Ids that a resume continues under, by tracker."""
STEP = "train/global_step"
"""W&B's x axis of the metrics, as transformers names it."""


class Tracker(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self, *, failed: bool) -> None:
        """Flush, and end the tracker's run unless the user opened it. `failed`: the training ended with an error."""
        ...


class TensorBoard:
    """Event files in the run's folder `tensorboard`; a resume hides later steps than its checkpoint."""

    def __init__(self, run_dir: Path, settings: Settings, step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=0 if step is None else step + 1)
        self._writer.add_text("config", f"```json\n{json.dumps(settings, indent=1)}\n```", step or 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases: the run that the user opened, else one in project `winnow` or WANDB_PROJECT.

    Its own step metric, not W&B's step, is the x axis: W&B drops rows whose step is below one logged before, which any
    `wandb.log` of the user's raises. Offline files of a run opened here are in the run's folder `wandb`.
    """

    _opened: ClassVar[set[str]] = set()
    """Ids of runs that trainers of this process have open: they are not the user's."""

    def __init__(self, run_dir: Path, settings: Settings, step: int | None) -> None:
        wandb, kept = import_module("wandb"), _kept(run_dir)
        self._defined: set[str] = set()
        self._own = wandb.run is None or wandb.run.id in self._opened
        if self._own:
            self._run = wandb.init(
                entity=kept.get("wandb_entity"),
                project=kept.get("wandb_project") or os.environ.get("WANDB_PROJECT", PROJECT),
                name=settings["run_name"] or run_dir.name,
                config=dict(settings),
                dir=str(run_dir),
                id=kept.get("wandb"),
                resume="allow" if "wandb" in kept else None,
                reinit="create_new" if wandb.run else "default",
            )
            self._opened.add(self._run.id)
        else:
            self._run = wandb.run
            self._run.config.update(_missing(settings, self._run.config))
        self._run.define_metric(STEP)
        _keep(run_dir, wandb=self._run.id, wandb_project=self._run.project, wandb_entity=self._run.entity)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name in metrics.keys() - self._defined:
            self._run.define_metric(name, step_metric=STEP)
            self._defined.add(name)
        self._run.log({**metrics, STEP: step})

    def close(self, *, failed: bool) -> None:
        if self._own:
            self._opened.discard(self._run.id)
            self._run.finish(exit_code=int(failed))


class Trackio:
    """Trackio: the run that the user opened, else one in project `winnow`; TRACKIO_DIR sets the folder of its files."""

    _opened: ClassVar[list[Any]] = []
    """Runs that trainers of this process opened: they are not the user's."""

    def __init__(self, run_dir: Path, settings: Settings, step: int | None) -> None:
        trackio, kept = import_module("trackio"), _kept(run_dir)
        self._current = trackio.context_vars.current_run
        self._run = self._current.get()
        over = self._run is None or self._run._stop_flag.is_set()
        self._own = over or any(self._run is run for run in self._opened)
        if self._own:
            self._current.set(None)  # `init` finishes the current run, which another trainer has open
            name, project = kept.get("trackio"), kept.get("trackio_project", PROJECT)
            resume = "allow" if name else "never"
            name = name or settings["run_name"] or run_dir.name
            self._run = trackio.init(project=project, name=name, config=dict(settings), resume=resume, embed=False)
            self._opened.append(self._run)
        elif missing := _missing(settings, self._run.config):
            self._wait_for_rows()  # of rows that are sent together, the first one's configuration is kept
            self._run.config.update(trackio.utils.to_json_safe(missing))
            self._run._config_logged = False  # it is sent with the next row
        _keep(run_dir, trackio=self._run.name, trackio_project=self._run.project)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def _wait_for_rows(self) -> None:
        deadline = time.monotonic() + 2.0  # they are sent twice a second
        while self._run._queued_logs and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self, *, failed: bool) -> None:
        if not self._own:
            return
        self._opened[:] = [run for run in self._opened if run is not self._run]
        if self._current.get() is self._run:
            self._current.set(None)
        self._run.finish()


class MLflow:
    """MLflow: the active run, else one in experiment `winnow` or MLFLOW_EXPERIMENT_NAME, at MLFLOW_TRACKING_URI."""

    def __init__(self, run_dir: Path, settings: Settings, step: int | None) -> None:
        self._mlflow = import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        active, kept = self._mlflow.active_run(), _kept(run_dir).get("mlflow")
        self._own = active is None
        if active is not None:
            self._id: str = active.info.run_id
        elif kept is not None:
            self._id = kept
            self._client.set_terminated(kept, "RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            self._id = self._client.create_run(experiment, run_name=settings["run_name"] or run_dir.name).info.run_id
        _keep(run_dir, mlflow=self._id)
        for key, value in _missing(settings, self._client.get_run(self._id).data.params).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        entities = [
            self._mlflow.entities.Metric(mlflow_name(name), value, now, step) for name, value in metrics.items()
        ]
        self._client.log_batch(self._id, metrics=entities)

    def close(self, *, failed: bool) -> None:
        if self._own:
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def mlflow_name(name: str) -> str:
    """Return a name that MLflow takes: a normal relative path of letters, digits and `_.- :`, `_at_` in place of `@`.

    One name that it refuses would lose all metrics of the step.
    """
    return posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))).lstrip("./")


TRACKERS: dict[str, Callable[[Path, Settings, int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError with the install command when a tracker's package is missing."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"report_to: {name} is not installed; {install(name)}")


class Trackers:
    """All trackers of a run. One that cannot be opened is a ConfigError; one that fails later only warns.

    `settings`: the configuration as it is saved. `step`: that of the checkpoint to resume from; None for a new run.
    """

    def __init__(self, run_dir: Path, settings: Settings, step: int | None) -> None:
        self._open: dict[str, Tracker] = {}
        for name in settings["report_to"]:
            try:
                self._open[name] = TRACKERS[name](run_dir, settings, step)
            except Exception as error:
                self.close(failed=True)
                said = str(error).strip().partition("\n")[0] or type(error).__name__
                raise ConfigError(f"report_to: {name} could not be opened: {said}") from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one step's metrics to every tracker."""
        self._each("log", metrics, step)

    def close(self, *, failed: bool = False) -> None:
        """Close all trackers but the user's runs. `failed`: the training ended with an error."""
        self._each("close", failed=failed)
        self._open = {name: tracker for name, tracker in self._open.items() if not getattr(tracker, "_own", True)}

    def _each(self, what: str, *args: Any, **kwargs: Any) -> None:
        for name, tracker in list(self._open.items()):
            try:
                getattr(tracker, what)(*args, **kwargs)
            except Exception as error:
                del self._open[name]
                with suppress(Exception):  # or its run would seem to go on
                    tracker.close(failed=True)
                warnings.warn(
                    f"report_to: {name} failed and is off for the rest of the run ({type(error).__name__}: {error}); "
                    "metrics.jsonl has everything",
                    stacklevel=4,
                )


def _kept(run_dir: Path) -> dict[str, str]:
    file = run_dir / TRACKER_IDS
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def _keep(run_dir: Path, **values: str | None) -> None:
    write_json(run_dir / TRACKER_IDS, _kept(run_dir) | {k: value for k, value in values.items() if value}, private=True)


def _missing(settings: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a tracker's run does not have; what the user set stays."""
    return {key: value for key, value in settings.items() if key not in known}
