"""Configuration of a run: one flat YAML file whose method sections are owned by the methods themselves.

`RunConfig` holds the keys that belong to no single method. A method field (`selector: uniform`, or
`filter: {name: zero_variance, atol: 1e-6}`) is looked up in that folder's table and validated by its own dataclass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..base.errors import ConfigError
from ..base.files import not_json
from .errors import explain, suggestion, translated
from .options import (
    SECTION_KEYS,
    AuditConfig,
    LoraConfig,
    MethodSpec,
    Pairs,
    ReuseConfig,
    SaveDtype,
    SuccessConfig,
    TeacherConfig,
    in_a_list,
    name_of,
    refuse_truths,
    success_section,
    teacher_section,
    template_text,
)
from .schedule import OWN, Schedule, check_schedule
from .settings_yaml import load_yaml, read_yaml

LossType = Literal["dapo", "grpo", "dr_grpo", "sequence_sum"]
GroupWeighting = Literal["equal", "size"]
History = Literal["exact", "template"]
Optim = Literal["adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit", "adafactor", "muon", "sgd"]


RewardNames = Annotated[list[str], BeforeValidator(in_a_list, json_schema_input_type=str | list[str])]
"""Names of reward functions and reward models; a single name needs no list."""


COLDEST = 1e-4
"""Lowest temperature: lower ones may overflow float32 logits, and can only mean greedy sampling."""


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(f"must be 0 (greedy) or at least {COLDEST}")
    return temperature


CLIPPING = ("epsilon", "epsilon_high", "importance_sampling_level")
"""Keys that shape the clipped ratio."""
ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
"""Keys of optimizers that partly are AdamW."""
HUB = ("hub_model_id", "hub_strategy", "hub_private_repo")
"""Keys of the upload."""
REFERENCE = (
    *("beta", "kl_estimator", "kl_in_reward", "reference_kl_steps"),
    *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
)
"""Keys for which a run keeps its initial model."""


class RunConfig(BaseModel):
    """Everything a run needs. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # model and task
    model: str
    env: MethodSpec
    reward_funcs: RewardNames | None = None
    reward_weights: list[float] | None = None
    output_dir: str = "runs/winnow"
    seed: int = Field(0, ge=0, lt=2**63)
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: int | str | None = "auto"

    # batches and steps
    max_steps: int = Field(100, ge=1)
    num_train_epochs: float | None = Field(None, gt=0)
    prompts_per_step: int = Field(32, ge=1)
    num_generations: int = Field(8, ge=2)
    max_lag: int = Field(0, ge=0)
    num_iterations: int = Field(1, ge=1)
    reuse: ReuseConfig | None = None

    # generation
    max_prompt_length: int = Field(512, ge=1)
    max_completion_length: int = Field(256, ge=1)
    history: History = "exact"
    context_length: int | None = Field(None, ge=2)
    max_segments: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=COLDEST)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    stop: list[Annotated[str, Field(min_length=1)]] = []
    chat_template: Annotated[str, AfterValidator(template_text)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    mask_truncated_completions: bool = False
    speculative: bool = False
    reward_timeout_s: float = Field(30.0, gt=0, le=86_400)
    soft_overlong_cache: int | None = Field(None, ge=1)
    reward_memory_mb: int = Field(2_048, ge=64, le=1_000_000)
    reward_env: list[str] = []
    reward_sandbox: Literal["bwrap"] | None = None
    max_failed_share: float = Field(0.5, ge=0, le=1)
    max_skipped_steps: int = Field(20, ge=1)

    # methods, each a name or {name: ..., options}
    selector: MethodSpec = "uniform"
    rollout_batch: MethodSpec = "exact"
    group_size: MethodSpec = "fixed"
    gates: Annotated[list[MethodSpec], BeforeValidator(in_a_list)] = []
    audit: AuditConfig | None = None
    filter: MethodSpec | list[MethodSpec] = "keep_all"
    advantage: MethodSpec = "grpo"
    correction: MethodSpec = "none"
    step_scale: MethodSpec = "none"
    engine: MethodSpec = "auto"
    learner: MethodSpec = "local"
    sync: MethodSpec = "in_process"

    # the loss
    policy_loss: MethodSpec = "clip"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    loss_type: LossType = "dapo"
    group_weighting: GroupWeighting | None = None
    epsilon: float = Field(0.2, gt=0, lt=1)
    epsilon_high: float | None = Field(None, gt=0)
    beta: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in_reward: bool = False
    reference_kl_steps: int | None = Field(None, ge=1)
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = Field(0.6, gt=0, le=1)
    ref_model_sync_steps: int = Field(512, ge=1)
    entropy_coef: float = Field(0.0, ge=0)
    teacher: Annotated[TeacherConfig | None, BeforeValidator(teacher_section)] = None

    # the update
    learning_rate: float = Field(1e-6, ge=0)
    lr_scheduler_type: Schedule = "constant"
    warmup_steps: int | float = Field(0, ge=0)
    lr_end: float = Field(0.0, ge=0)
    lr_decay_steps: int | None = Field(None, ge=1)
    lr_scheduler_kwargs: dict[str, bool | int | float | str] = {}
    optim: Optim = "adamw_torch_fused"
    optim_args: Pairs = {}
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0)
    tokens_per_microbatch: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    torch_compile: bool = False
    deterministic: bool = False
    lora: LoraConfig | None = None

    # evaluation on held-out prompts
    eval_steps: int | None = Field(None, ge=1)
    eval_prompts: int = Field(128, ge=1)
    eval_generations: int = Field(8, ge=1)
    eval_temperature: Annotated[float, AfterValidator(_greedy_or_warm)] = Field(1.0, ge=0)
    eval_top_p: float = Field(1.0, gt=0, le=1)
    eval_top_k: int = Field(0, ge=0)
    eval_greedy: bool = True
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    success: Annotated[SuccessConfig | None, BeforeValidator(success_section)] = None

    # checkpoints, logs, hub and trackers
    save_steps: int = Field(50, ge=1)
    save_total_limit: int | None = Field(2, ge=1)
    resume: Literal["warn", "strict"] = "warn"
    save_dtype: Literal["auto"] | SaveDtype | dict[str, SaveDtype] = "auto"
    log_completions: int = Field(8, ge=0)
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_strategy: Literal["end", "every_save"] = "end"
    hub_private_repo: bool | None = None
    run_name: str | None = None
    report_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, values: Any) -> Any:
        """Convert `success_reward: x` of version 0.2 to `success: {at_least: x}`."""
        if not isinstance(values, dict) or "success_reward" not in values:
            return values
        older = values["success_reward"]
        rest = {key: value for key, value in values.items() if key != "success_reward"}
        if rest.get("success") is not None:
            raise ValueError("success_reward and success both say what counts as right; remove success_reward")
        return rest | {"success": {"at_least": older}}

    @model_validator(mode="after")
    def _cross_checks(self) -> RunConfig:
        if self.threads not in ("auto", None, *range(1, 257)):
            raise ValueError(f"threads must be auto, or a number from 1 to 256, not {self.threads!r}")
        if name_of(self.policy_loss) != "clip":
            loss = name_of(self.policy_loss)
            self._refuse(CLIPPING, f"with policy_loss: {loss}; remove it, or use policy_loss: clip or its own options")
        if self.optim in ("sgd", "adafactor"):
            self._refuse(ADAM, f"with optim: {self.optim}; remove it, or see optim_args")
        if self.metric_for_best_model is None:
            self._refuse(("greater_is_better",), "without metric_for_best_model; remove it")
        elif self.eval_steps is None:
            self._refuse(("metric_for_best_model",), "without eval_steps; set eval_steps, or remove it")
        if not self.push_to_hub:
            self._refuse(HUB, "without push_to_hub; remove it or set push_to_hub: true")
        if self.context_length is not None and self.context_length <= self.max_prompt_length:
            raise ValueError(
                f"context_length: {self.context_length} leaves no room behind a prompt of max_prompt_length="
                f"{self.max_prompt_length} tokens; raise it, or lower max_prompt_length"
            )
        self._check_kl()
        self._check_schedule()
        return self

    def changed(self, names: Sequence[str]) -> str:
        """Return the first of these keys that is not at its default, as `key: value`, or empty text."""
        for name in names:
            value = getattr(self, name)
            plain = value["name"] if isinstance(value, dict) and [*value] == ["name"] else value
            if plain != type(self).model_fields[name].default:
                return f"{name}: {value}"
        return ""

    def same_keys(self, cls: type) -> dict[str, Any]:
        """Return the values of a dataclass's fields that are keys of the configuration."""
        return {f.name: getattr(self, f.name) for f in fields(cls) if f.name in type(self).model_fields}

    def _refuse(self, names: Sequence[str], why: str) -> None:
        """Raise ValueError if one of these keys was changed, for it has no effect."""
        changed = self.changed(names)
        if changed:
            raise ValueError(f"{changed} has no effect {why}")

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, its prompt included."""
        both = self.max_prompt_length + self.max_completion_length
        return both if self.context_length is None else min(both, self.context_length)

    @property
    def keeps_reference(self) -> bool:
        """Return whether the initial model is kept next to the policy."""
        return self.beta > 0 or self.reference_kl_steps is not None

    @property
    def adapters_alone(self) -> LoraConfig | None:
        """The adapters, if they are published alone; None: whole weights are."""
        return None if self.lora is None or self.lora.merge else self.lora

    def _check_kl(self) -> None:
        if self.beta > 0:
            self._refuse(("reference_kl_steps",), "with beta > 0, where every step logs `kl`; remove one of them")
        else:
            self._refuse(("kl_estimator", "kl_in_reward"), "with beta: 0; remove it or set beta, e.g. 0.001")
        if self.kl_in_reward:
            penalty = "with kl_in_reward, where the penalty is the log ratio of the rollout"
            self._refuse(("kl_estimator",), f"{penalty}; remove it, or kl_in_reward")
        if not self.sync_ref_model:
            moving = ("ref_model_mixup_alpha", "ref_model_sync_steps")
            self._refuse(moving, "without sync_ref_model; remove it or set sync_ref_model: true")
        elif self.beta == 0:
            raise ValueError("sync_ref_model has no effect with beta: 0; remove it or set beta, e.g. 0.001")
        elif self.lora is not None:
            raise ValueError(
                "sync_ref_model needs a reference of its own, and with lora it is the model without its adapters, "
                "which never changes; remove one of them"
            )

    @property
    def warmup(self) -> int:
        """Return the steps of the warm-up; `warmup_steps` below 1 is a share of all."""
        w = self.warmup_steps
        return math.ceil(w * self.max_steps) if w < 1 else int(w)

    def _check_schedule(self) -> None:
        kind, decay, warmup, steps = self.lr_scheduler_type, self.lr_decay_steps, self.warmup, self.max_steps
        if self.num_train_epochs is not None:
            if changed := self.changed(("max_steps",)):
                raise ValueError(f"{changed} and num_train_epochs both say how long to train; remove one")
            return  # until the data set their number
        if self.warmup_steps != warmup and self.warmup_steps >= 1:
            raise ValueError(f"warmup_steps must be a whole number, or a share below 1, not {self.warmup_steps}")
        own = kind in OWN and not self.lr_scheduler_kwargs
        if self.lr_end and (not own or kind.startswith("constant")):
            instead = "remove it or choose linear" if own else "its end is an option of lr_scheduler_kwargs"
            raise ValueError(f"lr_end has no effect with lr_scheduler_type: {kind}; {instead}")
        if decay is not None and (not own or kind != "warmup_stable_decay"):
            instead = "remove it or choose warmup_stable_decay" if own else "give all in lr_scheduler_kwargs"
            raise ValueError(f"lr_decay_steps has no effect with lr_scheduler_type: {kind}; {instead}")
        check_schedule(kind, self.lr_scheduler_kwargs, self.learning_rate, warmup, steps)
        if own and kind == "warmup_stable_decay":
            if decay is None:
                raise ValueError("lr_scheduler_type: warmup_stable_decay needs lr_decay_steps, the steps of the decay")
            if warmup + decay > steps:
                raise ValueError(f"warmup_steps ({warmup}) + lr_decay_steps ({decay}) exceed max_steps ({steps})")


METHODS = tuple(name for name, kind in RunConfig.__annotations__.items() if "MethodSpec" in kind)
"""Keys whose values are methods."""


def validate(values: Mapping[str, Any], where: str = "config") -> RunConfig:
    """Return a checked configuration. Raises ConfigError naming every bad key. Translates TRL's unambiguous values."""
    values = translated(values)
    try:
        config = RunConfig.model_validate(dict(values))
        json.dumps(config.model_dump(), allow_nan=False)
    except ValidationError as error:
        raise ConfigError(explain(error, list(RunConfig.model_fields), where, SECTION_KEYS)) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {not_json(values)} cannot be saved as JSON: {error}") from None
    refuse_truths(values, config.model_dump(), where)
    return config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a YAML file with `key=value` overrides. Raises ConfigError naming file, and line or key."""
    return validate(read_settings(path, overrides), str(path))


def read_settings(
    path: str | Path | None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return settings from `defaults`, then a YAML file, then `key=value` overrides.

    Dots reach into sections (`env.count=4`); values are YAML. An override of a whole section applies before those of
    its keys, in any order given. A recipe may have `variants: {name: {key: value}}`; `variant=name` selects one, and
    other overrides win over it. Raises ConfigError naming the file, and the line or key.
    """
    values = dict(defaults or {}) | (read_yaml(path) if path is not None else {})
    variants = values.pop("variants", {})
    sections = variants.values() if isinstance(variants, dict) and all(isinstance(k, str) for k in variants) else [None]
    if not all(isinstance(section, dict) for section in sections):
        raise ConfigError(f"{path}: variants: expected names with settings, {{name: {{key: value}}}}")
    chosen = [o.removeprefix("variant=") for o in overrides if path is not None and o.startswith("variant=")]
    for name in chosen:
        if name not in variants:
            raise ConfigError(f"{path}: variant: unknown name {name!r}.{suggestion(name, list(variants))}")
        values |= variants[name]
    keys = [o for o in overrides if path is None or not o.startswith("variant=")]
    for override in sorted(keys, key=lambda o: o.partition("=")[0].count(".")):
        apply_override(values, override)
    return values


SHORT_FORMS = {"teacher": teacher_section, "success": success_section}
"""Sections that may be written as a single value, and the function that expands it."""


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one `key=value`; `filter.atol=1e-6` turns `filter: zero_variance` into a section first."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override '{override}': expected key=value")
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"override '{override}': the value is not valid YAML: {problem}") from None
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents):
        section, top = values.get(parent), depth == 0
        if section is None and top and parent in METHODS:
            default = RunConfig.model_fields[parent].default
            section = default if isinstance(default, str) else None
        if top and parent in SHORT_FORMS:
            section = SHORT_FORMS[parent](section)
        elif isinstance(section, str) and (parent in METHODS or not top):
            section = {"name": section}
        if section is None:
            section = {}
        if not isinstance(section, dict):
            raise ConfigError(f"override '{override}': '{parent}' is not a section")
        values[parent] = section
        values = section
    values[last] = value
