"""Values for a chat template's own variables, e.g. `enable_thinking: false` of Qwen3."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from ..config import ConfigError, nearest

GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token")
"""Variables that every template is given, as are functions like `raise_exception`."""


def with_template_values(tokenizer: Any, values: Mapping[str, Any]) -> Any:
    """A copy of the tokenizer whose chat template has these values where a caller gives none.

    They are written into the template, so that whoever loads the trained model asks it as it was trained. Raises
    ConfigError without a template, and for a name that it does not use.
    """
    if not values:
        return tokenizer
    from jinja2 import Environment, TemplateError, meta

    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise ConfigError("chat_template_kwargs: the tokenizer has no chat template; remove them, or use a chat model")
    try:
        used = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    except TemplateError:  # one with tags of its own; transformers will say what is wrong with it, if anything
        used = set(values)
    free = sorted(used - {*GIVEN, "raise_exception", "strftime_now", "namespace", "range"})
    for name in values:
        if name not in free:
            raise ConfigError(f"chat_template_kwargs: the model's chat template has no '{name}'.{nearest(name, free)}")
    lines = (f"{{% if {k} is not defined %}}{{% set {k} = {_literal(v)} %}}{{% endif %}}" for k, v in values.items())
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = "".join(lines) + template
    return tokenizer


def _literal(value: Any) -> str:
    """A JSON value in the template language."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
