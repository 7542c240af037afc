"""YAML of settings from strangers: bombs, keys that are there twice, words that YAML takes for truth values."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from winnow.base.errors import ConfigError
from winnow.config import load_config, validate
from winnow.config.settings_yaml import MAX_VALUES, load_yaml

BASE = "model: m\nenv: countdown\n"


def bomb(levels: int, width: int) -> str:
    lines = ["a0: &a0 [" + ", ".join(["x"] * width) + "]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * width) + "]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [bomb(9, 9), bomb(40, 9), f"model: m\nenv: {{name: x, a: {'[' * 3000}"])
def test_a_bomb_is_refused_at_once(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"bomb\.yaml: not valid YAML"):
        load_config(path)
    assert time.monotonic() - started < 10


def test_what_it_says() -> None:
    with pytest.raises(yaml.YAMLError, match=rf"anchors expand to over {MAX_VALUES} values(.|\n)*line 6"):
        load_yaml(bomb(9, 9))
    with pytest.raises(yaml.YAMLError, match="an anchor contains itself"):
        load_yaml("a: &a [*a]")
    with pytest.raises(yaml.YAMLError, match="month must be in"):
        load_yaml("a: 2020-99-99")
    with pytest.raises(yaml.YAMLError, match="nested too deeply"):
        load_yaml("[" * 5000 + "]" * 5000)
    assert load_yaml("a: &x {b: 1}\nc: {<<: *x, d: 2}\ne: *x") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}, "e": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "line"),
    [("max_steps: 3\nmodel: m\nmax_steps: 4\n", 3), ("env:\n  name: countdown\n  train_size: 1\n  train_size: 2\n", 4)],
)
def test_a_key_that_is_there_twice(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"twice\.yaml: .*duplicate key .*; remove one(.|\n)*line {line}"):
        load_config(path)
    with pytest.raises(ConfigError, match="the value is not valid YAML: duplicate key 'a'; remove one"):
        load_config(_written(tmp_path, BASE), ["env.options={a: 1, a: 2}"])


def test_a_colon_without_a_space(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'at_least:1': write a space after the colon"):
        load_config(_written(tmp_path, BASE), ["success={at_least:1}"])
    assert load_yaml('{"a:b":, c:d: 1, url: http://x/y}') == {"a:b": None, "c:d": 1, "url": "http://x/y"}
    assert load_yaml("{a:b: '', c:d: }") == {"a:b": "", "c:d": None}


def _written(folder: Path, text: str) -> Path:
    (folder / "c.yaml").write_text(text)
    return folder / "c.yaml"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("eval_prompts: true", "eval_prompts: expected a number, not true"),
        ("max_steps: yes", "max_steps: expected a number, not true"),
        ("learning_rate: off", "learning_rate: expected a number, not false"),
        ("lora: {r: yes}", "lora: r: expected a number, not true"),
        ("audit: {epsilon: yes}", "audit: epsilon: expected a number, not true"),
    ],
)
def test_truth_values_are_no_numbers(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(_written(tmp_path, BASE + line))


def test_nor_in_options_of_methods() -> None:
    from winnow.config.options import build_options
    from winnow.methods.filter import FILTERS

    options = FILTERS["zero_variance"]
    with pytest.raises(ConfigError, match="max_refill_rounds: expected a number, not true"):
        build_options(options, {"max_refill_rounds": True}, "filter (zero_variance)")
    assert build_options(options, {"refill": False}, "filter").refill is False
    assert validate({"model": "m", "env": "countdown", "kl_in_reward": False}).kl_in_reward is False


@given(st.text(max_size=200))
def test_any_text_is_a_value_or_refused(text: str) -> None:
    try:
        load_yaml(text)
    except yaml.YAMLError:
        return
