"""Translates arguments of TRL's `GRPOTrainer` given to `Trainer`, or says what to write instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.config_errors import answer_to, load_hints
from ..config import ConfigError, RunConfig, load_config, suggestion
from .trainer_inputs import TrainerInputs

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


def refuse_resume(checkpoint: Any, run_dir: Path, resumed: bool) -> None:
    """Raise ConfigError if `resume_from_checkpoint` is not the run that this trainer resumes."""
    if not checkpoint:
        return
    asked_for = run_dir
    if checkpoint is not True:
        named = Path(checkpoint)
        asked_for = named.parent.parent if named.parent.name == "checkpoints" else named
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
