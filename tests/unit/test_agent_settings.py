"""Settings of agents' requests: honoured, or refused by their key."""

from __future__ import annotations

import http.client
import warnings
from urllib.parse import urlsplit

import pytest

from winnow.env.tools import with_tools
from winnow.tasks.agents import with_agent

from ..builders.asking import ask, user
from ..builders.tool_calls import call
from ..builders.tool_rollouts import roll
from ..builders.tools import OneTurn, add, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def offered():
    return list(with_tools(OneTurn(), [add]).train[0].tools)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n": 4}, "n: one answer per request; send several requests (got 4)"),
        ({"logprobs": True}, "logprobs: answers have no log-probabilities; leave it out (got True)"),
        ({"top_logprobs": 2}, "top_logprobs: answers have no log-probabilities; leave it out (got 2)"),
        ({"tool_choice": "required"}, "tool_choice: a call cannot be forced; use auto or none, and reward the call"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice: a call cannot be forced"),
        ({"response_format": {"type": "json_object"}}, "response_format: the policy's answers are not constrained"),
        ({"guided_json": {}, "structured_outputs": {"json": {}}}, "structured_outputs: the policy's answers are not"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: not supported; leave it out"),
        ({"functions": [{}]}, "functions: deprecated by OpenAI; use tools"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1 (got 0)"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens: must be at least 1 (got '9')"),
        ({"stop": ["a", ""]}, "stop: give a text or a list of texts, none empty (got ['a', ''])"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(tokenizer, settings, said):
    def agent(base_url, prompt):
        seen.append(ask(base_url, prompt, tools=offered(), **settings))
        return 0.0

    seen = []
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a"]])
    ((status, message),) = seen
    assert status == 400
    assert message.startswith(said)
    assert rollout.reason.endswith("ended without asking the policy anything")


def test_settings_without_meaning_are_no_refusal_and_no_warning(tokenizer):
    def agent(base_url, prompt):
        none = {"response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0, "frequency_penalty": 0}
        ask(base_url, prompt, tool_choice="auto", parallel_tool_calls=True, n=1, user="me", logit_bias={}, **none)
        return 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a"]])
    assert rollout.reward == 1.0


def test_an_unknown_setting_is_not_said_to_be_one_of_the_run(tokenizer):
    def agent(base_url, prompt):
        ask(base_url, prompt, reasoning_effort="low", temperature=0.5)
        return 1

    with pytest.warns(UserWarning, match="its requests set") as seen:
        roll(tokenizer, with_agent(OneTurn(), agent), [["a"]])
    said = {str(warning.message) for warning in seen}
    assert "agent: its requests set temperature; the run's settings hold instead" in said
    assert "agent: its requests set reasoning_effort, which has no effect here" in said


def test_tool_choice_none_offers_no_tools_and_finds_no_calls(tokenizer):
    def agent(base_url, prompt):
        said.append(ask(base_url, prompt, tools=offered(), tool_choice="none"))
        said.append(ask(base_url, prompt, tools=offered()))
        return 1

    said = []
    made = call("add", a=1, b=2)
    _, seen = roll(tokenizer, with_agent(OneTurn(), agent), [[made, made]])
    assert said[0] == {"role": "assistant", "content": made}
    assert said[1]["tool_calls"][0]["function"]["name"] == "add"
    assert "add" not in seen[0]
    assert "add" in seen[1]


def test_one_call_at_a_time(tokenizer):
    """As in vLLM: the calls after the first are left out of the answer, and the conversation goes on from it."""

    def agent(base_url, prompt):
        said.append(ask(base_url, prompt, tools=offered(), parallel_tool_calls=False))
        (made,) = said[0]["tool_calls"]
        result = {"role": "tool", "tool_call_id": made["id"], "content": "3"}
        ask(base_url, [*prompt, said[0], result], tools=offered())
        return 1

    said = []
    two = call("add", a=1, b=2) + call("add", a=5, b=5)
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [[two, "Done."]])
    assert rollout.reward == 1.0
    assert not rollout.later_segments
    assert rollout.turns[0].action == two


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_is_the_most_of_one_answer(tokenizer, key):
    def agent(base_url, prompt):
        first = ask(base_url, prompt, **{key: 4})
        second = ask(base_url, [*prompt, first, user("All.")])
        return float((first["content"], second["content"]) == ("abcd", "abcdefgh"))

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turn_length=100), [["abcdefgh", "abcdefgh"]])
    assert rollout.reward == 1.0
    assert [turn.stop_reason for turn in rollout.turns] == ["length", "eos"]


def test_an_answer_that_the_agents_own_limit_ends_is_not_truncated(tokenizer):
    def agent(base_url, prompt):
        ask(base_url, prompt, max_tokens=4)
        return 1.0

    for most in (None, 100):
        (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turn_length=most), [["abcdefgh"]])
        assert (rollout.turns[0].stop_reason, rollout.stop_reason, rollout.truncated) == ("length", "env", False)
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turn_length=4), [["abcdefgh"]])
    assert (rollout.stop_reason, rollout.truncated) == ("turn_length", True)


def test_max_tokens_does_not_exceed_the_runs_own_limit(tokenizer):
    def agent(base_url, prompt):
        return float(ask(base_url, prompt, max_tokens=100)["content"] == "abc")

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turn_length=3), [["abcdefgh"]])
    assert rollout.reward == 1.0


def test_a_stop_of_a_request_ends_that_answer(tokenizer):
    """As ReAct agents need it, lest the policy writes its own observation."""

    def agent(base_url, prompt):
        first = ask(base_url, prompt, stop=["Observation:"])
        second = ask(base_url, [*prompt, first, user("On.")])
        return float((first["content"], second["content"]) == ("Act: look\n", "Observation: seen"))

    script = [["Act: look\nObservation:", "Observation: seen"]]
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), script)
    assert rollout.reward == 1.0
    assert rollout.turns[0].stop_string == "Observation:"
    assert rollout.turns[0].stop_reason == "stop"
    assert rollout.turns[1].stop_string == ""


def test_a_model_can_be_looked_up(tokenizer):
    def agent(base_url, prompt):
        to = urlsplit(base_url)
        connection = http.client.HTTPConnection(to.hostname, to.port, timeout=20)
        for path, status in (("/models", 200), ("/models/policy", 200), ("/models/other", 404)):
            connection.request("GET", to.path + path)
            response = connection.getresponse()
            assert response.status == status
            response.read()
        ask(base_url, prompt)
        return 1

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a"]])
    assert rollout.reward == 1.0


# ------------------------------------------------------------ another address
