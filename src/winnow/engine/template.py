"""Chat template of a config, and values for its variables, e.g. `enable_thinking: false` of Qwen3."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from ..base.errors import ConfigError
from ..config.errors import suggestion
from ..env.chat import templates_of, variables_of
from .facts import MARK

GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token")
"""Variables that every template receives, like functions such as `raise_exception`."""


def with_template(tokenizer: Any, template: str | None, values: Mapping[str, Any]) -> Any:
    """Return a copy of the tokenizer with this chat template (text or name of its own) and these values.

    Raises ConfigError if the template does not compile or omits the user's message, and as `with_template_values`.
    """
    if template is None:
        return with_template_values(tokenizer, values)
    from jinja2 import TemplateSyntaxError

    own = templates_of(tokenizer)
    if "{" not in template:
        if template not in own:
            close = suggestion(template, list(own))
            raise ConfigError(f"chat_template: neither a file nor a template of the tokenizer ({template!r}).{close}")
        template = own[template]
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    try:
        shown = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template: line {error.lineno}: {error.message}; correct the template") from None
    except Exception:  # it may need other messages; a later check uses the first prompts
        shown = MARK
    if MARK not in shown:
        raise ConfigError("chat_template: leaves out what the user says; show every message's 'content'")
    return with_template_values(tokenizer, values)


def with_template_values(tokenizer: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of the tokenizer whose chat templates use these values unless a caller sets them.

    They are written into every template that uses them, so that the model is prompted later as in training. Raises
    ConfigError without a template, or if no template uses a name.
    """
    if not values:
        return tokenizer
    templates = templates_of(tokenizer)
    if not templates:
        raise ConfigError("chat_template_kwargs: the tokenizer has no chat template; remove them, or set chat_template")
    used = {name: _variables(template, values) for name, template in templates.items()}
    free = sorted(set().union(*used.values()))
    for name in values:
        if name not in free:
            raise ConfigError(
                f"chat_template_kwargs: the model's chat template has no '{name}'.{suggestion(name, free)}"
            )
    for which, template in templates.items():
        lines = [
            f"{{% if {k} is not defined %}}{{% set {k} = {_literal(v)} %}}{{% endif %}}"
            for k, v in values.items()
            if k in used[which]
        ]
        if not template.startswith("".join(lines)):
            templates[which] = "".join(lines) + template
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = templates if isinstance(tokenizer.chat_template, dict | list) else templates["default"]
    return tokenizer


def _variables(template: str, values: Mapping[str, Any]) -> set[str]:
    """Return the names a template leaves to its caller; all of `values` if it cannot be parsed here."""
    used = variables_of(template)
    return set(values if used is None else used) - {*GIVEN, "raise_exception", "strftime_now", "namespace", "range"}


def _literal(value: Any) -> str:
    """Return a JSON value in the template language."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
