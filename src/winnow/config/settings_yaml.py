"""YAML of settings: plain values only, no duplicate keys, bounded anchors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ..base.errors import ConfigError

MAX_VALUES = 100_000
"""Most values a text may expand to, counting every repeat of an anchor."""


def load_yaml(text: str) -> Any:
    """Load a YAML text. Raises YAMLError with the line, also on duplicate keys, too deep nesting, and anchors that
    contain themselves or expand to over `MAX_VALUES` values."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except ValueError as error:  # an invalid date or number
        raise yaml.YAMLError(str(error)) from None


class _Loader(yaml.SafeLoader):
    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _values(node, {})
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
"""Numbers like 1e-5, which YAML 1.1 reads as text."""


def _values(node: Any, known: dict[int, int | None]) -> int:
    """Count the values a node expands to. `known`: counts of visited nodes, None while one is being counted."""
    if id(node) in known:
        counted = known[id(node)]
        if counted is None:
            raise _error("an anchor contains itself", node)
        return counted
    known[id(node)] = None
    count = 1
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        count += sum(_values(key, known) + _values(value, known) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        count += sum(_values(value, known) for value in node.value)
    if count > MAX_VALUES:
        raise _error(f"anchors expand to over {MAX_VALUES} values", node)
    known[id(node)] = count
    return count


def _check_keys(node: yaml.MappingNode) -> None:
    seen = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in seen:
                raise _error(f"duplicate key '{key.value}'; remove one", key)
            seen.add(key.value)
            # {a:1} has one key, "a:1", directly followed by an empty value
            if ":" in key.value and node.flow_style and value.start_mark.index == key.end_mark.index:
                raise _error(f"'{key.value}': write a space after the colon", key)


def _error(problem: str, node: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file of `key: value` lines. Raises ConfigError naming the file and the line."""
    try:
        values = load_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, found {type(values).__name__}")
    return values
