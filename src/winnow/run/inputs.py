"""What the caller of `Trainer` gives: a model, a task, rows and rewards, as objects or names, and TRL's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..config import RunConfig, load_config, validate
from ..config.errors import answer_to, load_hints, suggestion
from ..config.options import MethodSpec, name_of, section_of
from ..config.paths import absolute_paths, as_saved, from_saved, missing_paths
from ..engine.initial_model import InitialModel
from ..engine.loading import quiet_transformers
from ..env.base import Task
from ..env.prompt_store import StoredPrompts
from ..learner.step import scheduled_lr
from ..methods.tables import task_options
from ..record.resume_keys import MAY_CHANGE_ON_RESUME, MEMORY_OPTIONS
from ..record.trackers import check_trackers
from ..types import Prompt
from .hub import check_hub
from .preflight import in_steps
from .resolve import resolve
from .resolved import AUTO, Machine, Options, Resolved, step_options


@dataclass(frozen=True)
class TrainerInputs:
    """Arguments of `Trainer`."""

    model: Any = None
    env: Any = None
    reward_funcs: Any = None
    """Once `normalized`, a list of functions, reward models or names; None: the task's own, or the configuration's."""
    processing_class: Any = None
    train_dataset: Iterable[Any] | None = None
    eval_dataset: Iterable[Any] | None = None

    def normalized(self) -> TrainerInputs:
        """Return them with reward functions in a list, and rows given as `env` in `train_dataset`. Raises ConfigError
        on other objects."""
        given, env = self.reward_funcs, self.env
        if callable(given) or isinstance(given, str):
            given = [given]
        elif not isinstance(given, Iterable | None):
            raise ConfigError(f"reward_funcs: expected a function, a reward model or their names, got {given!r}")
        inputs = replace(self, reward_funcs=None if given is None else list(given))
        if isinstance(env, Task) and self.train_dataset is not None:
            raise ConfigError("train_dataset: the task given as env brings its own prompts; give one of them")
        if isinstance(env, str | dict | None | Task):
            return inputs
        if callable(env) or (isinstance(env, list | tuple) and env and all(map(callable, env))):
            raise ConfigError("env: reward functions are not a task; give them as Trainer(reward_funcs=...)")
        if not isinstance(env, Iterable):
            missing = [name for name in ("train", "test", "make_env", "fingerprint") if not hasattr(env, name)]
            raise ConfigError(
                f"env: a {type(env).__name__} is neither rows of data nor a task (missing {', '.join(missing)})"
            )
        if self.train_dataset is not None:
            raise ConfigError("env: rows of data, but train_dataset has rows too; give one of them")
        return replace(inputs, env=None, train_dataset=env)

    def config(self, values: Mapping[str, Any], *, resumed: bool = False) -> RunConfig:
        """Return the whole configuration; these arguments override `values`.

        Paths become absolute, so that a run can be resumed from anywhere. Reward functions given as objects clear the
        names in `values`. A `resumed` run keeps its names, and compares fingerprints later.
        """
        values, functions = dict(values), self.reward_funcs
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
        return validate(absolute_paths(values, resumed=resumed))

    def _require_files(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError for a path of a run that is no longer there, unless an object was given in its place."""
        given = {"model": self.model, "reward_funcs": self.reward_funcs, "env": self.env or self.train_dataset}
        for key, path in missing_paths(values).items():
            if given.get(key) is None:
                moved = Path(path)
                while not moved.parent.exists():
                    moved = moved.parent
                raise ConfigError(
                    f"{key}: {path} was there when the run began and is there no longer; move {moved} back, or link to "
                    f"where it is now: ln -s NEW {moved}"
                )

    def prepare(self, c: RunConfig, *, resumed: bool) -> tuple[Task, Resolved]:
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
        machine = Machine.here(c.device, with_vllm=name_of(c.engine) == AUTO)
        model = model.read(c)
        if not resumed:
            model.require_names(c)
        return task, resolve(c, options, machine, model, resumed=resumed, several_turns=task.max_turns > 1)

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
        config = task_options(section | {"path": "train_dataset"})
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
            parts = (value or []) if name == "reward_funcs" else [value]
            if not all(isinstance(part, str | dict | None) for part in parts):
                raise ConfigError(
                    f"sync: {name_of(c.sync)} starts samplers that build everything by name, so {name} cannot be an "
                    f"object; give it {remedy}, or train with sync: in_process"
                )


def build_task(spec: MethodSpec | Task) -> Task:
    """Return a task by name, or the object itself. Raises ConfigError if it is unknown or cannot be used."""
    task: Task = spec if isinstance(spec, Task) else task_options(spec).build()
    if isinstance(task.stop, str):  # each of its characters would end a turn
        raise ConfigError(f"env: task {task.name}: stop must be a tuple of texts, e.g. ({task.stop!r},)")
    if not task.train:
        raise ConfigError(f"env: task {task.name} has no training prompts")
    for name, prompts in (("train", task.train), ("test", task.test)):
        if not isinstance(prompts, StoredPrompts):
            _require_places(name, prompts)
    return task


def _require_places(name: str, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for a prompt that selectors, samplers and checkpoints would take for another."""
    for place, prompt in enumerate(prompts):
        if prompt.ordinal != place:
            raise ConfigError(
                f"env: prompt '{prompt.id}' is {name}[{place}], but its ordinal is {prompt.ordinal}; number prompts by "
                "their place after a split: dataclasses.replace(prompt, ordinal=i)"
            )
        if not isinstance(prompt.messages, tuple | None):
            raise ConfigError(f"env: the messages of prompt '{prompt.id}' must be a tuple; write messages=tuple(...)")


# ---------------------------------------------------------------- TRL's arguments

OWN = frozenset({"config", "callbacks", *(field.name for field in dataclasses.fields(TrainerInputs))})
"""Arguments of `Trainer`."""
OF_BATCH = ("per_device_train_batch_size", "generation_batch_size", "steps_per_generation")
WITHOUT_EFFECT = ("logging_", "log_level", "log_on_", "dataloader_", "disable_tqdm", "remove_unused_columns", "debug")
"""Prefixes of fields that change neither the training nor what is saved."""


def config_from(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration, from whichever of TRL's arguments it came in.

    `given`: arguments that `Trainer` does not name; `args` and `peft_config` are used. Raises ConfigError with what to
    write for arguments without a clear meaning here, TypeError for unknown names.
    """
    others = dict(given)
    args, peft_config = others.pop("args", None), others.pop("peft_config", None)
    for name, value in others.items():
        _refuse(name, value, f"write Trainer(config={{'{name}': ...}})")
    if args is not None and config is not None:
        raise ConfigError("args: `config` is given too; give one of them")
    source = config if args is None else args
    # `TrainingArguments` of transformers, as `GRPOConfig` is; they are not imported here
    if any(cls.__name__ == "TrainingArguments" for cls in type(source).__mro__):
        values = _from_arguments(source, "config" if args is None else "args")
    elif isinstance(source, str | Path):
        values = load_config(source).model_dump()
    elif isinstance(source, RunConfig):
        values = source.model_dump()
    elif isinstance(source, Mapping | None):
        values = dict(source or {})
    else:
        raise ConfigError(f"config: expected a RunConfig, a dict or a YAML file, not a {type(source).__name__}")
    if peft_config is None:
        return values
    if values.get("lora") is not None:
        raise ConfigError("peft_config: the configuration has `lora` too; give one of them")
    return values | {"lora": _lora(peft_config)}


def given_again(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object arguments of `Trainer.resume`; ConfigError or TypeError for others, as `config_from`."""
    for name in ("args", "config", "peft_config"):
        if given.get(name) is not None:
            raise ConfigError(
                f"{name}: a resumed run keeps its configuration; keys that may change are the second argument, "
                "Trainer.resume(run_dir, {'max_steps': ...})"
            )
    for name, value in given.items():
        if name not in OWN and name not in ("args", "peft_config"):
            _refuse(name, value, f"write Trainer.resume(run_dir, {{'{name}': ...}})")
    return {name: value for name, value in given.items() if name in OWN - {"config"}}


def refuse_resume(checkpoint: Any, run_dir: Path, *, resumed: bool, latest: Path | None) -> None:
    """Raise ConfigError if `resume_from_checkpoint` is not the run that this trainer resumes, or not its `latest`."""
    if not checkpoint:
        return
    asked_for = run_dir
    if checkpoint is not True:
        named = Path(checkpoint)
        asked_for = named.parent.parent if named.parent.name == "checkpoints" else named
        ours = resumed and asked_for.resolve() == run_dir.resolve()
        if ours and latest is not None and named.parent.name == "checkpoints" and named.name != latest.name:
            raise ConfigError(
                f"resume_from_checkpoint: {named.name} is not the newest, which is {latest.name} and where a run goes "
                "on; to go back, remove the newer ones first"
            )
    if resumed and asked_for.resolve() == run_dir.resolve():
        return
    raise ConfigError(
        f"resume_from_checkpoint: this Trainer starts a new run ({run_dir}); to resume a run, use "
        f"Trainer.resume('{asked_for}', ...).train() or `winnow resume {asked_for}`; without checkpoints, leave it out"
    )


def _refuse(name: str, value: Any, remedy: str) -> None:
    if name in RunConfig.model_fields:
        raise ConfigError(f"{name}: a key of the configuration; {remedy}")
    hints = load_hints("flat")
    if name not in hints:
        raise TypeError(f"Trainer: there is no argument '{name}'.{suggestion(name, sorted(OWN))}")
    if value is not None and value != (None, None):
        raise ConfigError(f"Trainer: there is no argument '{name}'. Here {hints[name]}.")


def _from_arguments(args: Any, where: str) -> dict[str, Any]:
    """Return the configuration keys that correspond to a `GRPOConfig`, its defaults included.

    Raises ConfigError naming every changed field without a certain counterpart.
    """
    usual = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu)
    fields = [field.name for field in dataclasses.fields(args) if field.init]
    changed = {name for name in fields if getattr(args, name) != getattr(usual, name)}
    given = {name: value for name, value in args.to_dict().items() if name in fields}
    values = {name: value for name, value in given.items() if name in RunConfig.model_fields and value is not None}
    settled = _translate(values, changed, args)
    hints, answers = load_hints("flat"), []
    for name in sorted(changed - values.keys() - settled):
        if not name.startswith(WITHOUT_EFFECT):
            answer = hints.get(name) or answer_to(name, given.get(name)) or "there is nothing like it; leave it out"
            answers.append(f"{name}={given.get(name)!r}: here {answer}")
    if answers:
        raise ConfigError("\n".join(f"{where}: {line}" for line in answers))
    return values


def _translate(values: dict[str, Any], changed: set[str], args: Any) -> set[str]:
    """Set keys whose names differ but whose meaning is certain, and drop those that depend on others that are not set.

    Returns the fields that this settles.
    """
    settled = {"use_cpu", "bf16", "fp16", "num_train_epochs", "hub_strategy", "eval_steps"}
    settled |= {"gradient_checkpointing", "activation_checkpointing"}
    if values["max_steps"] > 0:
        values.pop("num_train_epochs", None)
    if not args.push_to_hub:
        values.pop("hub_strategy", None)
    if "gradient_checkpointing" not in changed:  # only about memory, which `auto` decides
        values.pop("gradient_checkpointing", None)
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if strategy == "no":
        values.pop("eval_steps", None)
    if strategy in ("no", "steps"):
        settled |= {"eval_strategy", "do_eval"}
    if args.torch_compile:  # which sets it
        settled |= {"torch_compile_backend"} if args.torch_compile_backend == "inductor" else set()
    values["save_total_limit"] = args.save_total_limit  # None: all, as here
    if args.use_cpu:
        values["device"] = "cpu"
    if args.fp16:
        values["dtype"] = "float16"
    elif "bf16" in changed and not args.bf16:
        values["dtype"] = "float32"
    steps = getattr(args, "steps_per_generation", None)
    if steps is not None and steps == args.gradient_accumulation_steps:  # a generation batch is one update, as here
        values["prompts_per_step"] = args.generation_batch_size // args.num_generations
        settled |= {*OF_BATCH, "gradient_accumulation_steps"}
    if getattr(args, "scale_rewards", None) in ("none", False):
        values["advantage"] = "dr_grpo"
        settled.add("scale_rewards")
    return settled


def _lora(peft_config: Any) -> dict[str, Any]:
    """Return the section `lora` for a `peft.LoraConfig`. Raises ConfigError for settings that it does not have."""
    if type(peft_config).__name__ != "LoraConfig":
        raise ConfigError(
            f"peft_config: a {type(peft_config).__name__}; only a peft.LoraConfig has a counterpart, "
            "`lora: {r: ..., alpha: ...}`"
        )
    usual, free = type(peft_config)(), {"r", "lora_alpha", "lora_dropout", "target_modules", "task_type"}
    fields = [field.name for field in dataclasses.fields(peft_config) if field.init]
    other = [n for n in fields if n not in free and getattr(peft_config, n) != getattr(usual, n)]
    if other:
        raise ConfigError(
            f"peft_config: {', '.join(f'{n}={getattr(peft_config, n)!r}' for n in other)}: `lora` has r, alpha, "
            "dropout, target_modules and merge only; give Trainer a PeftModel as model, and lora: {resume: true}"
        )
    targets = peft_config.target_modules
    if targets is None:
        raise ConfigError(
            "peft_config: without target_modules peft chooses layers by the model's type; name them, e.g. "
            "LoraConfig(target_modules='all-linear'), which is the default of `lora`"
        )
    return {
        "r": peft_config.r,
        "alpha": peft_config.lora_alpha,
        "dropout": peft_config.lora_dropout,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
    }


# ---------------------------------------------------------------- changes on a resume


def refuse_changes(run_dir: Path, saved: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError with the difference if `config` would change what the rest of the run computes."""
    begun = validate(absolute_paths(from_saved(saved), resumed=True))
    before, now = as_saved(begun), as_saved(config)
    free = MAY_CHANGE_ON_RESUME | {"output_dir"}
    options = [Options.from_config(c) for c in (begun, config)]
    repeatable = any("repeatable" in each.sync.provides for each in options)
    if before["sync"] != now["sync"] and (repeatable or name_of(before["sync"]) != name_of(now["sync"])):
        free -= {"sync"}
    if any(each.continuous for each in options):  # rollouts in flight end where one is due
        free -= {"save_steps", "eval_steps"}
    elastic = all("elastic" in getattr(each.learner, "provides", ()) for each in options)
    if not elastic or name_of(before["learner"]) != name_of(now["learner"]):
        free -= {"learner"}
    if _without_memory_options(before["engine"]) != _without_memory_options(now["engine"]):
        free -= {"engine"}
    if not _same_rates(begun, config, *options):
        free -= {"max_steps"}
    changed = [k for k in now if before.get(k) != now[k] and k not in free]
    if changed:
        shown = "; ".join(f"{k}: was {before.get(k)!r}, is {now[k]!r}" for k in changed)
        if "max_steps" in changed:
            own = "lr_scheduler_type" if begun.warmup == config.warmup else "warmup_steps, a share of it"
            shown += f" (learning rates depend on it, by {own}; start a new run)"
        raise ConfigError(f"{run_dir}: the configuration has changed since the checkpoint: {shown}")


def _same_rates(begun: RunConfig, now: RunConfig, *options: Options) -> bool:
    """Whether the learning rates of the steps that both configurations have are the same, and the one after them."""
    before, after = (step_options(c, each) for c, each in zip((begun, now), options, strict=True))
    steps = range(min(begun.max_steps, now.max_steps) + 1)
    return begun.max_steps == now.max_steps or all(scheduled_lr(n, before) == scheduled_lr(n, after) for n in steps)


def _without_memory_options(engine: MethodSpec) -> dict[str, Any]:
    return {key: value for key, value in section_of(engine).items() if key not in MEMORY_OPTIONS}
