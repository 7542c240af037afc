"""Options of methods, built from `name` or `{name: ..., option: value}`, and sections that belong to no method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from ..base.dotted import TargetError, class_for
from ..base.errors import ConfigError
from .errors import explain, suggestion
from .settings_yaml import load_yaml

MethodSpec = str | dict[str, Any]
"""A name from a method table or a class of your own (`my_pkg.rules:AtLeast`, `rules.py:AtLeast`), or, with options,
`{name: ..., option: value}`."""

UNLIMITED = 2**31
"""`max_prompt_length` where only the model limits prompts."""
Scalar = bool | int | float | str
CHECKED = ConfigDict(extra="forbid")
"""Configuration of options whose fields carry their bounds: `@dataclass(frozen=True, config=CHECKED)` of pydantic."""


def in_a_list(given: Any) -> Any:
    """Return a single name in a list, anything else as it is."""
    return [given] if isinstance(given, str) else given


def _pairs(given: Any) -> Any:
    """Parse `a=1, b=x` into a mapping; return anything else unchanged."""
    if not isinstance(given, str):
        return given
    parts = [part.partition("=") for part in given.split(",") if part.strip()]
    if not all(key.strip() and separator for key, separator, _ in parts):
        raise ValueError(f"expected `key=value, ...` or a section, not {given!r}")
    try:
        return {key.strip(): load_yaml(value) for key, _, value in parts}
    except yaml.YAMLError:
        raise ValueError(f"the values of {given!r} are not valid YAML") from None


Pairs = Annotated[dict[str, Scalar], BeforeValidator(_pairs, json_schema_input_type=str | dict[str, Scalar])]
"""Arguments as a section, or as text in transformers' form: `momentum=0.9,nesterov=true`."""


def name_of(spec: MethodSpec) -> str:
    return spec if isinstance(spec, str) else str(spec.get("name"))


def section_of(spec: MethodSpec) -> dict[str, Any]:
    """Return a method spec as a section: its name and its options."""
    return {"name": spec} if isinstance(spec, str) else dict(spec)


def method(table: Mapping[str, type], spec: MethodSpec, field: str) -> Any:
    """Build the options of a method spec. Raises ConfigError with the nearest valid name."""
    options = section_of(spec)
    if "name" not in options:
        raise ConfigError(f"{field}: needs a `name`; one of {', '.join(sorted(table))}")
    name = str(options.pop("name"))
    if ":" in name:
        try:
            return build_options(class_for(table, name), options, f"{field} ({name})")
        except TargetError as error:
            raise ConfigError(f"{field}: {error}") from None
    if name not in table:
        raise ConfigError(f"{field}: unknown name {name!r}.{suggestion(name, list(table))}")
    return build_options(table[name], options, f"{field} ({name})")


def build_options(cls: type, options: Mapping[str, Any], where: str) -> Any:
    """Build a frozen dataclass from plain values, each checked against its annotation."""
    known = [f.name for f in dataclasses.fields(cls) if f.init]
    for key in options:
        if key not in known:
            hint = suggestion(key, known) if known else " It has no options."
            raise ConfigError(f"{where}: unknown option '{key}'.{hint}")
    try:
        built: Any = _adapter(cls).validate_python(dict(options))
    except ValidationError as error:
        raise ConfigError(explain(error, known, where)) from None
    refuse_truths(options, {key: getattr(built, key) for key in options}, where)
    return built


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def refuse_truths(given: Mapping[str, Any], taken: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError where a boolean, or YAML's yes, on, no, off, was taken as a number."""
    for key in given.keys() & taken.keys():
        was, now = given[key], taken[key]
        if isinstance(was, bool) and isinstance(now, int | float) and not isinstance(now, bool):
            raise ConfigError(f"{where}: {key}: expected a number, not {str(was).lower()}")
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            refuse_truths(was, now, f"{where}: {key}")


SaveDtype = Literal["float32", "bfloat16", "float16"]
"""Dtypes a trained model can be saved in."""

OF_ADAPTER = ("r", "alpha", "dropout", "target_modules")
"""Keys of `lora` that a resumed adapter sets."""


def weighs_equally(loss_type: str, group_weighting: str | None) -> bool:
    """Return whether every group counts the same in the loss, whatever its size."""
    return (group_weighting or ("size" if loss_type == "dapo" else "equal")) == "equal"


class LoraConfig(BaseModel):
    """Low-rank adapters through peft; leave `lora` out for full fine-tuning."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    r: int | None = Field(16, ge=1)
    alpha: int | float | None = Field(32, gt=0)
    dropout: float | None = Field(0.0, ge=0, lt=1)
    target_modules: str | list[str] | None = "all-linear"
    merge: bool = True
    """Publish whole weights with adapters merged in; false: the adapters alone."""
    resume: bool = False
    """Train the adapter given as `model`. Keys left out (None) take the adapter's values."""

    @model_validator(mode="before")
    @classmethod
    def _leave_to_the_adapter(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("resume") is True:
            return dict.fromkeys(OF_ADAPTER) | values
        return values

    @model_validator(mode="after")
    def _needs_values(self) -> LoraConfig:
        missing = [key for key in OF_ADAPTER if getattr(self, key) is None]
        if missing and not self.resume:
            raise ValueError(f"{missing[0]}: may be null only with resume: true; give a value")
        return self


class AuditConfig(BaseModel):
    """Random overrides of skips and stops, which measure the errors of the rules; leave `audit` out to disable it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    epsilon: float = Field(0.05, ge=1e-4, le=1)
    max_signal_loss: float | None = Field(None, gt=0, lt=1)


class ReuseConfig(BaseModel):
    """Several updates on a group, in later steps; leave `reuse` out to train on every group once."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    updates: int = Field(4, ge=2)
    max_age: int = Field(16, ge=1)
    min_ess: float = Field(0.5, ge=0, le=1)
    audit: float = Field(0.0, ge=0, le=1)


def new_groups(prompts_per_step: int, reuse: ReuseConfig | None) -> int:
    """Return how many groups of a full batch were not trained before."""
    return -(-prompts_per_step // (1 if reuse is None else reuse.updates))


class TeacherConfig(BaseModel):
    """Whose log-probabilities of the sampled tokens the policy learns from; leave `teacher` out to learn from rewards
    alone."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    model: str | None = None
    """Directory or hub name; with `url`, a name that the server has. None: the policy itself."""
    url: str | None = None
    """A vLLM server."""
    prompt: str | None = Field(None, min_length=1)
    """What the teacher reads instead of the prompt: text with `{prompt}` and names of columns, e.g. of the answer."""
    adapter: bool = True
    """False: the policy without its adapter."""
    weight: float = Field(1.0, gt=0)
    """Factor on log teacher - log policy of each token."""
    reward_weight: float = Field(1.0, ge=0)
    """Factor on the advantage from rewards; 0: the teacher alone."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait for an answer of the server."""

    @model_validator(mode="after")
    def _is_another(self) -> TeacherConfig:
        elsewhere = self.model or self.url
        if not self.adapter and elsewhere:
            raise ValueError("adapter: false is the policy without its adapter, so it has no model or url; remove them")
        if not elsewhere and self.adapter and self.prompt is None:
            raise ValueError("the teacher would be the policy itself; give model, url, prompt or adapter: false")
        if self.prompt is not None and "{prompt}" not in self.prompt:
            raise ValueError("prompt: has no {prompt}, where the prompt itself stands; add it")
        if self.url is None and self.timeout_s != type(self).model_fields["timeout_s"].default:
            raise ValueError("timeout_s has no effect without url; remove it")
        return self


def teacher_section(given: Any) -> Any:
    """Expand the short form of `teacher`: a text is its `model`."""
    return {"model": given} if isinstance(given, str) else given


class SuccessConfig(BaseModel):
    """Definition of a right answer: a reward of at least `at_least`, of one function or agent, or the weighted sum."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    function: str | None = None
    at_least: float = 1.0


def success_section(given: Any) -> Any:
    """Expand the short forms of `success`: a number is `at_least`, a text is `function`."""
    if isinstance(given, str):
        return {"function": given}
    return {"at_least": given} if isinstance(given, int | float) and not isinstance(given, bool) else given


_SECTIONS: dict[str, type[BaseModel]] = {
    "lora": LoraConfig,
    "audit": AuditConfig,
    "reuse": ReuseConfig,
    "teacher": TeacherConfig,
    "success": SuccessConfig,
}
SECTION_KEYS = {name: list(section.model_fields) for name, section in _SECTIONS.items()}
"""Keys of the sections that belong to no method."""

MAX_CHARACTERS = 1_000_000


def template_text(given: str) -> str:
    """Return the text of a template given as text or file; keep the name of one of the tokenizer's own templates.

    Raises ValueError for a file that is missing, empty or not text.
    """
    if "{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    if path.is_dir():
        raise ValueError(f"{given} is a directory; name the file in it, e.g. {path / 'chat_template.jinja'}")
    if not path.is_file():
        if not given.strip() or "/" in given or path.suffix:
            raise ValueError(f"no such file ({given!r}); give a file, or the text of a template")
        return given
    try:
        text = path.read_text(encoding="utf-8") if path.stat().st_size <= MAX_CHARACTERS else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{given} cannot be read: {error}") from None
    if "{" not in text:
        raise ValueError(f"{given} is no chat template: it has no {{{{ ... }}}} or {{% ... %}}")
    return text
