"""Trackers: send a run's metrics to other programs. A tracker that fails never ends a run."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ..base.files import write_json
from ..base.install import install
from ..config import ConfigError, RunConfig, as_saved

PROJECT = "winnow"
KEPT = "trackers.json"
"""Ids that a resume continues under, by tracker."""


class Tracker(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder `tensorboard`; a resume hides later steps than its checkpoint."""

    def __init__(self, run_dir: Path, config: RunConfig, step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=0 if step is None else step + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, in project `winnow` or WANDB_PROJECT; offline files are in the run's folder `wandb`."""

    def __init__(self, run_dir: Path, config: RunConfig, step: int | None) -> None:
        wandb = import_module("wandb")
        kept = _kept(run_dir)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=config.run_name or run_dir.name,
            config=as_saved(config),
            dir=str(run_dir),
            id=kept.get("wandb"),
            resume="allow" if "wandb" in kept else None,
        )
        _keep(run_dir, "wandb", self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Wandb):
    """Trackio, whose runs log and finish like those of Weights & Biases; TRACKIO_DIR sets the folder of its files."""

    def __init__(self, run_dir: Path, config: RunConfig, step: int | None) -> None:
        trackio = import_module("trackio")
        kept, name = _kept(run_dir).get("trackio"), config.run_name or run_dir.name
        settings, resume = as_saved(config), "allow" if kept else "never"
        self._run = trackio.init(project=PROJECT, name=kept or name, config=settings, resume=resume, embed=False)
        _keep(run_dir, "trackio", self._run.name)


class MLflow:
    """MLflow, in experiment `winnow` or MLFLOW_EXPERIMENT_NAME, at MLFLOW_TRACKING_URI."""

    def __init__(self, run_dir: Path, config: RunConfig, step: int | None) -> None:
        self._mlflow = import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        if kept := _kept(run_dir).get("mlflow"):
            self._id: str = kept
            self._client.set_terminated(kept, "RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=config.run_name or run_dir.name).info.run_id
        _keep(run_dir, "mlflow", self._id)
        for key, value in as_saved(config).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics. MLflow's names have no `@`: `eval/pass@1` becomes `eval/pass_at_1`."""
        now = int(time.time() * 1000)
        entities = [
            self._mlflow.entities.Metric(name.replace("@", "_at_"), value, now, step) for name, value in metrics.items()
        ]
        self._client.log_batch(self._id, metrics=entities)

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[Path, RunConfig, int | None], Tracker]] = {
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

    `step`: that of the checkpoint to resume from; None for a new run.
    """

    def __init__(self, run_dir: Path, config: RunConfig, step: int | None) -> None:
        self._open: dict[str, Tracker] = {}
        for name in config.report_to:
            try:
                self._open[name] = TRACKERS[name](run_dir, config, step)
            except Exception as error:
                self.close()
                said = str(error).strip().partition("\n")[0] or type(error).__name__
                raise ConfigError(f"report_to: {name} could not be opened: {said}") from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one step's metrics to every tracker."""
        self._each("log", metrics, step)

    def close(self) -> None:
        """Close all trackers, which flushes them."""
        self._each("close")

    def _each(self, what: str, *args: Any) -> None:
        for name, tracker in list(self._open.items()):
            try:
                getattr(tracker, what)(*args)
            except Exception as error:
                del self._open[name]
                warnings.warn(
                    f"report_to: {name} failed and is off for the rest of the run ({type(error).__name__}: {error}); "
                    "metrics.jsonl has everything",
                    stacklevel=4,
                )


def _kept(run_dir: Path) -> dict[str, str]:
    file = run_dir / KEPT
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def _keep(run_dir: Path, tracker: str, identity: str) -> None:
    write_json(run_dir / KEPT, _kept(run_dir) | {tracker: identity}, private=True)
