"""Builds a method's options from its configuration value: `name`, or `{name: ..., option: value}`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from .config_errors import explain, suggestion
from .dotted import TargetError, class_for
from .errors import ConfigError
from .settings_yaml import load_yaml

MethodSpec = str | dict[str, Any]
"""A name from a method table or a class of your own (`my_pkg.rules:AtLeast`, `rules.py:AtLeast`), or, with options,
`{name: ..., option: value}`."""

Scalar = bool | int | float | str
CHECKED = ConfigDict(extra="forbid")
"""Configuration of options whose fields carry their bounds: `@dataclass(frozen=True, config=CHECKED)` of pydantic."""


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
