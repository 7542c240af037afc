"""Python objects that `Trainer` accepts instead of names: model, tokenizer, task, rows of data, rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.files import absolute_paths, missing_paths
from ..config import METHODS, ConfigError, MethodSpec, RunConfig, method, name_of, section_of, validate
from ..engine.loading import quiet_transformers
from ..env.base import Demonstrator, Task
from ..env.rewards.rewarder import RewardSpec
from ..methods.tables import task_options
from ..record.trackers import check_trackers
from ..tasks import ENVS
from .hub import check_hub
from .initial_model import InitialModel
from .preflight import in_steps
from .resolve import resolve
from .resolved import Machine, Options, Resolved


@dataclass(frozen=True)
class TrainerInputs:
    """Arguments of `Trainer`, unchanged."""

    model: Any = None
    env: Any = None
    reward_funcs: Sequence[RewardSpec] | RewardSpec | None = None
    processing_class: Any = None
    train_dataset: Iterable[Any] | None = None
    eval_dataset: Iterable[Any] | None = None

    @property
    def reward_list(self) -> Sequence[RewardSpec] | None:
        one = callable(self.reward_funcs) or isinstance(self.reward_funcs, str)
        return [self.reward_funcs] if one else self.reward_funcs  # type: ignore[list-item, return-value]

    def normalized(self) -> TrainerInputs:
        """Move rows given as `env` to `train_dataset`. Raises ConfigError on other objects, and on invalid rewards."""
        if not (callable(self.reward_funcs) or isinstance(self.reward_funcs, Iterable | None)):
            raise ConfigError(
                f"reward_funcs: expected a function, a reward model or their names, got {self.reward_funcs!r}"
            )
        env = self.env
        if isinstance(env, Task) and self.train_dataset is not None:
            raise ConfigError("train_dataset: the task given as env brings its own prompts; give one of them")
        if isinstance(env, str | dict | None | Task):
            return self
        if callable(env) or (isinstance(env, list | tuple) and env and all(map(callable, env))):
            raise ConfigError("env: reward functions are not a task; give them as Trainer(reward_funcs=...)")
        if not isinstance(env, Iterable):
            missing = [name for name in ("train", "test", "make_env", "fingerprint") if not hasattr(env, name)]
            raise ConfigError(
                f"env: a {type(env).__name__} is neither rows of data nor a task (missing {', '.join(missing)})"
            )
        if self.train_dataset is not None:
            raise ConfigError("env: rows of data, but train_dataset has rows too; give one of them")
        return replace(self, env=None, train_dataset=env)

    def config(self, values: Mapping[str, Any], *, resumed: bool = False) -> RunConfig:
        """Return the whole configuration; these arguments override `values`.

        Paths become absolute, so that a run can be resumed from anywhere. Reward functions given as objects clear the
        names in `values`. A `resumed` run keeps its names, and compares fingerprints later.
        """
        values, functions = dict(values), self.reward_list
        if functions and all(isinstance(function, str) for function in functions):
            values["reward_funcs"] = list(functions)
        elif functions and not resumed:
            values["reward_funcs"] = None  # objects, which no name stands for
        if isinstance(self.model, str):
            values["model"] = self.model
        elif self.model is not None:
            values["model"] = str(getattr(self.model, "name_or_path", "") or "given object")
        if isinstance(self.env, str | dict):
            values["env"] = self.env
        elif self.env is not None:
            values["env"] = getattr(self.env, "name", type(self.env).__name__)
        elif self.train_dataset is not None:
            values.setdefault("env", "dataset")
        if resumed:
            self._require_files(values)
        return validate(absolute_paths(values, METHODS, resumed=resumed))

    def _require_files(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError for a path of a run that is no longer there, unless an object was given in its place."""
        given = {"model": self.model, "reward_funcs": self.reward_list, "env": self.env or self.train_dataset}
        for key, path in missing_paths(values, METHODS).items():
            if given.get(key) is None:
                moved = Path(path)
                while not moved.parent.exists():
                    moved = moved.parent
                raise ConfigError(
                    f"{key}: {path} was there when the run began and is there no longer; move {moved} back, or link to "
                    f"where it is now: ln -s NEW {moved}"
                )

    def resolve(self, c: RunConfig, *, resumed: bool) -> tuple[Task, Resolved]:
        """Return the task and the run that `c` describes on this machine, with nothing loaded but the data and the
        model's names and shapes. Raises ConfigError."""
        options = Options.from_config(c)  # names and options of methods come first
        check_trackers(c.report_to)
        check_hub(c)
        quiet_transformers()
        task = self.task(c, options)
        c = in_steps(c, len(task.train))
        if c.eval_steps and not task.test:
            raise ConfigError("eval_steps: the task has no held-out prompts; give it some, or remove eval_steps")
        model = InitialModel.from_config(c, None if isinstance(self.model, str) else self.model)
        machine = Machine.here(c.device)
        model = model.read(c)
        if not resumed:
            model.require_names(c)
        return task, resolve(c, options, machine, model, resumed=resumed)

    def task(self, c: RunConfig, options: Options) -> Task:
        """Return the configured task, the object, or a task of the rows with the options of `env: dataset`."""
        self._require_names(c, options)
        if self.train_dataset is None:
            if self.eval_dataset is not None:
                raise ConfigError("eval_dataset: needs train_dataset; held-out data of a path is `env: {test: ...}`")
            return build_task(self.env if isinstance(self.env, Task) else c.env)
        section = section_of(c.env)
        taken = [key for key in ("path", "test", "split", "test_split", "subset") if key in section]
        name = name_of(c.env)
        if name != "dataset" or taken:
            excess = f"`{taken[0]}`" if taken else f"name: {name}"
            raise ConfigError(f"train_dataset: rows are given, so env cannot have {excess}; leave it out")
        config = method(ENVS, section | {"path": "train_dataset"}, "env")
        return build_task(config.with_rows(self.train_dataset, self.eval_dataset))

    def _require_names(self, c: RunConfig, options: Options) -> None:
        """Raise ConfigError if something that samplers build themselves was given as an object."""
        if not options.own_engines:
            return
        remedies = {
            "model": "by its name or path",
            "env": "by its name or path",
            "reward_funcs": "a reward as 'file.py:function'",
            "processing_class": "by its name or path",
            "train_dataset": "as `env: {name: dataset, path: ...}` (Dataset.save_to_disk or to_json writes it)",
        }
        for name, remedy in remedies.items():
            value = getattr(self, name)
            parts = value if name == "reward_funcs" and isinstance(value, list | tuple) else [value]
            if not all(isinstance(part, str | dict | None) for part in parts):
                raise ConfigError(
                    f"sync: {name_of(c.sync)} starts samplers that build everything by name, so {name} cannot be an "
                    f"object; give it {remedy}, or train with sync: in_process"
                )


def build_task(spec: MethodSpec | Task) -> Task:
    """Return a task by name, or the object itself. Raises ConfigError if unknown or without training prompts."""
    task: Task = spec if isinstance(spec, Task) else task_options(spec).build()
    if not task.train:
        raise ConfigError(f"env: task {task.name} has no training prompts")
    return task


def build_demonstrator(spec: MethodSpec) -> Demonstrator:
    """Return a task with demonstrations for a warm start. Raises ConfigError if it has none."""
    task = build_task(spec)
    if not isinstance(task, Demonstrator):
        raise ConfigError(f"env: task {task.name} has no demonstrations; start from a pretrained model instead")
    return task
