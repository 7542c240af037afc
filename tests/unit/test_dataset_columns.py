"""Columns that reach the model, and those that cannot: pictures, parts, messages written as text."""

from __future__ import annotations

import json
import warnings

import pytest

from winnow.env.dataset import DatasetConfig
from winnow.env.row_files import DataError


@pytest.mark.parametrize("column", ["images", "image", "videos"])
@pytest.mark.parametrize("value", [[{"bytes": "x", "path": None}], "a.png", {"path": "a.png"}])
def test_columns_that_would_not_reach_the_model_are_refused(column, value):
    with pytest.raises(DataError, match=rf"train_dataset, row 2: column '{column}' .*Remove the column, or rename it"):
        DatasetConfig("x").with_rows([{"prompt": "a"}, {"prompt": "b", column: value}])


@pytest.mark.parametrize("value", [None, [], "", float("nan")])
def test_empty_columns_of_images_are_none(value):
    assert len(DatasetConfig("x").with_rows([{"prompt": "a", "images": value}]).train) == 1


def test_parts_other_than_text_are_refused():
    content = [{"type": "image", "text": None}, {"type": "text", "text": "what is it?"}]
    with pytest.raises(DataError, match=r"row 1: 'prompt', message 1: a part of type 'image' does not reach the model"):
        DatasetConfig("x").with_rows([{"prompt": [{"role": "user", "content": content}]}])


@pytest.mark.parametrize("written", [json.dumps, str])
def test_messages_written_as_text_are_read_as_messages(written):
    messages = [{"role": "system", "content": "it's"}, {"role": "user", "content": "2+2?"}]
    with pytest.warns(UserWarning, match=r"row 2: 'prompt' is a list of messages written as text, as in 1 of 2 rows"):
        task = DatasetConfig("x").with_rows([{"prompt": messages}, {"prompt": written([*messages, messages[1]])}])
    assert task.train[1].messages == (*messages, messages[1])


@pytest.mark.parametrize(
    "text", ['[{"role": "user"}]', "[role, content]", '["role", "content"]', '{"role": 1, "content": 2}', "[[["]
)
def test_text_that_is_not_messages_stays_text(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DatasetConfig("x").with_rows([{"prompt": text}]).train[0].text == text


def of_agent(path):
    """Messages as dumps of agents have them."""
    call = {"type": "function", "function": {"name": "read", "arguments": {"path": path}}}
    return [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "\n"},
    ]


def test_what_has_tool_calls_or_is_no_turn_may_be_empty():
    task = DatasetConfig("x").with_rows([{"prompt": of_agent("a")}])
    assert task.train[0].messages == tuple(of_agent("a"))
    text = of_agent("a")[:2]
    assert DatasetConfig("x", prompt_format="text").with_rows([{"prompt": text}]).train[0].text == "Look."


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        ([{"role": "system", "content": ""}], "has no message with text"),
        ([{"role": "assistant", "content": "", "tool_calls": []}], "message 1 is empty"),
    ],
)
def test_a_prompt_without_text_is_refused(messages, cause):
    with pytest.raises(DataError, match=f"row 1: 'prompt'.* {cause}"):
        DatasetConfig("x").with_rows([{"prompt": messages}])


def test_prompts_differ_by_their_tool_calls():
    one, other = ({"prompt": of_agent(path)} for path in ("a", "b"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of prompts that repeat an earlier one
        task = DatasetConfig("x").with_rows([one], [other])
    assert task.train[0].id != task.test[0].id
    assert DatasetConfig("x").with_rows([one]).fingerprint() != DatasetConfig("x").with_rows([other]).fingerprint()
