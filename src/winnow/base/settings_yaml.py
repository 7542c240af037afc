"""YAML of settings: plain values alone, no key twice, and nothing that grows when it is read."""

from __future__ import annotations

from typing import Any

import yaml

MOST = 100_000
"""Values that a text may stand for, counted as often as anchors repeat them."""


def load_yaml(text: str) -> Any:
    """The value of a text. Raises YAMLError, with the line, also for a key that is there twice, for anchors that stand
    for over `MOST` values or for themselves, and for what is nested too deeply."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except ValueError as error:  # a date or number that is none
        raise yaml.YAMLError(str(error)) from None


class _Loader(yaml.SafeLoader):
    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _values(node, {})
        return node


def _values(node: Any, known: dict[int, int | None]) -> int:
    """How many values a node stands for; `known` has those of nodes already counted, None for one under way."""
    if id(node) in known:
        if (count := known[id(node)]) is None:
            raise _error("an anchor that contains itself", node)
        return count
    known[id(node)] = None
    count = 1
    if isinstance(node, yaml.MappingNode):
        _refuse_twice(node)
        count += sum(_values(key, known) + _values(value, known) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        count += sum(_values(value, known) for value in node.value)
    if count > MOST:
        raise _error(f"anchors that stand for over {MOST} values", node)
    known[id(node)] = count
    return count


def _refuse_twice(node: yaml.MappingNode) -> None:
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in seen:
                raise _error(f"'{key.value}' is there twice; remove one", key)
            seen.add(key.value)


def _error(problem: str, node: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
