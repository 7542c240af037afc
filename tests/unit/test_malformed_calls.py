"""Calls as policies write them by mistake, and templates that take only objects: the policy is told, nothing fails."""

from __future__ import annotations

import json

import pytest

from winnow.env.tools import message_of, with_tools
from winnow.tasks.agents import with_agent

from ..builders.asking import ask, user
from ..builders.tool_rollouts import roll
from ..builders.tools import TEMPLATE, OneTurn, add, make_tokenizer

ITERATES = TEMPLATE.replace(
    "{{ c.function | tojson }}",
    "{{ c.function.name }}{% for key, value in c.function.arguments | items %} {{ key }}={{ value }}{% endfor %}",
)
"""In the manner of Qwen3-Coder."""
CALLS_ITEMS = TEMPLATE.replace(
    "{{ c.function | tojson }}",
    "{{ '<' + c.function.name }}{% for key, value in c.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}",
)
MALFORMED = [
    '{"a": 1, "b": 2}',
    '{"a": 1',
    ["1", "2"],
    7,
    True,
    None,
    "",
    {"a": {1, 2}, "c": b"2"},
    {1: 2, "b": 3},
    {"a": "\ud800"},
]
JUDGE = [lambda completions, **_: [1.0] * len(completions)]


@pytest.fixture(scope="module", params=[ITERATES, CALLS_ITEMS, TEMPLATE])
def tokenizer(request):
    return make_tokenizer(request.param)


@pytest.mark.parametrize("history", ["exact", "template"])
@pytest.mark.parametrize("arguments", MALFORMED, ids=repr)
def test_tools_tell_the_policy(tokenizer, arguments, history):
    calls = lambda text: [("add", arguments)] if "call" in text else []  # noqa: E731
    task = with_tools(OneTurn(), [add], parse=calls)
    (rollout,), seen = roll(tokenizer, task, [["call", "call", "Done."]], JUDGE, history=history)
    assert (rollout.fate, rollout.reward) == (None, 1.0), rollout.reason
    assert len(rollout.turns) == 3
    assert "error" in seen[1]


@pytest.mark.parametrize("history", ["exact", "template"])
@pytest.mark.parametrize("name", ["", "subtract", None, 7, ["add"], "\ud800"], ids=repr)
def test_names_of_no_tool(tokenizer, name, history):
    calls = lambda text: [(name, {"a": 1, "b": 2})] if "call" in text else []  # noqa: E731
    task = with_tools(OneTurn(), [add], parse=calls)
    (rollout,), seen = roll(tokenizer, task, [["call", "call", "Done."]], JUDGE, history=history)
    assert (rollout.fate, rollout.reward) == (None, 1.0), rollout.reason
    assert "not found" in seen[1]


@pytest.mark.parametrize("history", ["exact", "template"])
@pytest.mark.parametrize("arguments", MALFORMED, ids=repr)
def test_an_agent_may_answer_them_and_compact_its_history(tokenizer, arguments, history):
    """The second request goes on, the third is a prompt of its own that quotes the call."""
    offered = list(with_tools(OneTurn(), [add]).train[0].tools)

    def agent(base_url, prompt):
        first = ask(base_url, prompt, tools=offered)
        (made,) = first["tool_calls"]
        seen = json.loads(made["function"]["arguments"])
        result = {"role": "tool", "tool_call_id": made["id"], "content": f"no object: {seen}"[:99]}
        second = ask(base_url, [*prompt, first, result], tools=offered)
        third = ask(base_url, [user("Short."), first, result], tools=offered)
        return float((second["content"], third["content"]) == ("Sorry.", "Done."))

    calls = lambda text: [("add", arguments)] if "call" in text else []  # noqa: E731
    task = with_agent(OneTurn(), agent, parse=calls)
    (rollout,), _ = roll(tokenizer, task, [["call", "Sorry.", "Done."]], history=history)
    assert (rollout.fate, rollout.reward) == (None, 1.0), rollout.reason


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize(
    "written",
    ['{"a": 1', "a=1", "[1, 2]", "", "[" * 100_000],
)
def test_an_agent_that_finds_calls_itself_may_pass_them_on(tokenizer, written):
    def agent(base_url, prompt):
        first = ask(base_url, prompt)
        made = {"id": "x", "type": "function", "function": {"name": "add", "arguments": written}}
        result = {"role": "tool", "tool_call_id": "x", "content": "no JSON"}
        told = [*prompt, {**first, "tool_calls": [made]}, result]
        return float(ask(base_url, told)["content"] == "Sorry.")

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["call", "Sorry."]])
    assert (rollout.fate, rollout.reward) == (None, 1.0), rollout.reason


def test_well_formed_arguments_stay_as_they_are():
    arguments = {"city": "Zürich", "n": 1.0, "of": [{"x": None}]}
    message = message_of("text", lambda text: [("f", arguments)])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}
    assert message["tool_calls"][0]["function"]["arguments"] is arguments
