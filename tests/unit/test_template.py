"""Values for a chat template's variables: as if every call gave them, saved with the tokenizer, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from winnow import ConfigError
from winnow.config import validate
from winnow.engine.template import with_template, with_template_values
from winnow.env.prompting import encode_prompt, tokenizer_digest
from winnow.types import Prompt

from ..builders.tokenizers import CHATML, chat_tokenizer

THINKING = CHATML + (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
)
"""As Qwen3's."""
MESSAGES = ({"role": "user", "content": "2+2?"},)


def shown(tokenizer: Any, **given: Any) -> str:
    return str(tokenizer.apply_chat_template(list(MESSAGES), tokenize=False, add_generation_prompt=True, **given))


@pytest.mark.parametrize("value", [False, True])
def test_as_if_given_to_every_call(value: bool, tmp_path: Path) -> None:
    plain = chat_tokenizer(THINKING)
    tokenizer = with_template_values(plain, {"enable_thinking": value})
    assert plain.chat_template == THINKING
    assert shown(tokenizer) == shown(plain, enable_thinking=value)
    assert ("<think>" in shown(tokenizer)) == (value is False)
    assert shown(tokenizer, enable_thinking=not value) == shown(plain, enable_thinking=not value), "who says so wins"
    ids = encode_prompt(tokenizer, Prompt("p", 0, messages=MESSAGES))
    assert tokenizer.decode(ids) == shown(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    assert shown(AutoTokenizer.from_pretrained(tmp_path)) == shown(tokenizer)


@pytest.mark.parametrize(
    "value", ['it\'s "so"\n{{ 1 }} %} ✓ 🙂', 3, -0.5, None, True, ["a", None], {"a": {"b": [1, False]}, "c": "\\d"}]
)
def test_any_json_value(value: Any) -> None:
    template = "{{ hints | string }}|{% if hints is none %}none{% endif %}"
    tokenizer = with_template_values(chat_tokenizer(template), {"hints": value})
    assert shown(tokenizer) == shown(chat_tokenizer(template), hints=value)


def test_nothing_to_do() -> None:
    tokenizer = chat_tokenizer(None)
    assert with_template_values(tokenizer, {}) is tokenizer


@pytest.mark.parametrize(
    ("template", "values", "message"),
    [
        (None, {"enable_thinking": False}, "the tokenizer has no chat template"),
        (CHATML, {"enable_thinking": False}, "has no 'enable_thinking'. There are none"),
        (THINKING, {"enable_thinkin": False}, "Did you mean 'enable_thinking'?"),
        (THINKING, {"messages": []}, "has no 'messages'. Known: enable_thinking"),
        (THINKING, {"x %}{{ 1 }}": 1}, "has no 'x"),
    ],
)
def test_names_that_the_template_does_not_use(template: str | None, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"chat_template_kwargs: .*{message.replace('?', '.')}"):
        with_template_values(chat_tokenizer(template), values)


def test_several_templates_get_the_values(tmp_path: Path) -> None:
    plain = chat_tokenizer({"default": THINKING, "tool_use": CHATML + "{{ tools | length }}"})  # type: ignore[arg-type]
    tokenizer = with_template_values(plain, {"enable_thinking": False})
    assert shown(tokenizer) == shown(plain, enable_thinking=False)
    assert shown(tokenizer, tools=[{}]) == shown(plain, tools=[{}])
    assert tokenizer_digest(tokenizer) != tokenizer_digest(plain)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert (shown(again), shown(again, tools=[{}])) == (shown(tokenizer), shown(tokenizer, tools=[{}]))
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)
    assert with_template_values(again, {"enable_thinking": False}).chat_template == tokenizer.chat_template
    with pytest.raises(ConfigError, match="has no 'enable_thinkin'"):
        with_template_values(plain, {"enable_thinkin": False})


OWN = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{{ '>' if tone is not defined else tone }}"


def test_a_template_as_text_or_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    configured = [validate({"model": "m", "env": "countdown", "chat_template": given}) for given in (OWN, str(file))]
    assert [c.chat_template for c in configured] == [OWN, OWN], "a run keeps the text, whatever becomes of the file"
    plain = chat_tokenizer(None)
    tokenizer = with_template(plain, OWN, {"tone": "!"})
    assert (shown(tokenizer), plain.chat_template) == ("[2+2?]!", None)
    assert tokenizer_digest(tokenizer) != tokenizer_digest(plain)
    tokenizer.save_pretrained(tmp_path / "model")
    assert shown(AutoTokenizer.from_pretrained(tmp_path / "model")) == "[2+2?]!"
    several = chat_tokenizer({"default": CHATML, "short": OWN})  # type: ignore[arg-type]
    assert shown(with_template(several, "short", {})) == "[2+2?]>", "one of the tokenizer's own, by name"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere/own.jinja", "no such file"),
        (".", "is a directory"),
        ("empty.jinja", "is no chat template"),
        (7, "valid string"),
    ],
)
def test_files_that_are_no_template(given: Any, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jinja").write_text("Hello\n")
    with pytest.raises(ConfigError, match=f"chat_template.*{message}"):
        validate({"model": "m", "env": "countdown", "chat_template": given})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% for m in messages %}", "line 2: .*endfor"),
        ("{{ 'always the same' }}", "leaves out what the user says"),
        ("chatml", "neither a file nor a template of the tokenizer"),
    ],
)
def test_templates_that_cannot_be_used(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"chat_template: {message}"):
        with_template(chat_tokenizer(), template, {})
