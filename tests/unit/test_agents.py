"""Agents that ask the policy over HTTP, in whole rollouts, with an engine that says what a script tells it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from dataclasses import replace

import pytest

from winnow.engine import SamplingParams
from winnow.env.rewards.rewarder import Rewarder
from winnow.env.tools import with_tools
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.run.preflight import check_prompts
from winnow.tasks.agents import AgentConfig, with_agent
from winnow.tasks.agents.endpoint import Endpoint
from winnow.tasks.agents.verifiers import Tasks, VerifiersConfig
from winnow.types import Fate, Job, Prompt, Visit

from ..builders.asking import ask, user
from ..builders.tool_calls import call
from ..builders.tool_rollouts import Scripted, roll
from ..builders.tools import OneTurn, add, make_tokenizer

GOES_ON = [{"role": "user", "content": "Go on."}]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def chat(base_url, prompt, asked=("first",)):
    """Say what is in `asked`, one after the other; gives what was answered."""
    messages, said = [*prompt], []
    for text in asked:
        messages.append(user(text))
        messages.append(ask(base_url, messages))
        said.append(messages[-1]["content"])
    return said


def test_what_was_sampled_is_trained_and_nothing_else(tokenizer):
    def agent(base_url, prompt, answer):
        said = chat(base_url, prompt, ["What is two and two?", "Sure?"])
        return float(answer in said[-1])

    task = with_agent(OneTurn({"answer": "4"}), agent)
    rollouts, seen = roll(tokenizer, task, [[" It is 5 ", "No, 4."], ["4", "Yes."]])
    assert [r.reward for r in rollouts] == [1.0, 0.0]
    assert [r.stop_reason for r in rollouts] == ["env", "env"]
    assert seen[0] == "<s>user\nCount.<e>\n<s>user\nWhat is two and two?<e>\n<s>assistant\n"
    assert seen[2] == f"{seen[0]} It is 5 <e>\n<s>user\nSure?<e>\n<s>assistant\n"  # as sampled, white space and all
    ids, sampled = rollouts[0].token_ids, rollouts[0].action_mask
    assert tokenizer.decode(ids[sampled]) == " It is 5 <e>No, 4.<e>"
    assert tokenizer.decode(ids[~sampled]) == "\n<s>user\nSure?<e>\n<s>assistant\n"


def test_an_agent_for_tasks_that_reward_themselves_says_so():
    rows = OneTurn()
    assert not with_agent(rows, chat).rewards_itself
    rows.rewards_itself = True
    assert with_agent(rows, chat).rewards_itself


def test_calls_of_tools_are_what_with_tools_makes_of_them(tokenizer):
    """An agent with a loop of its own, and the same tool run by Winnow: the same tokens."""
    offered = list(with_tools(OneTurn(), [add]).train[0].tools)

    def agent(base_url, prompt):
        messages = list(prompt)
        while True:
            said = ask(base_url, messages, tools=offered)
            messages.append(said)
            if "tool_calls" not in said:
                return None
            for made in said["tool_calls"]:
                assert made["function"]["name"] == "add"
                result = str(add(**json.loads(made["function"]["arguments"])))
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": result})

    script = [["Hm. " + call("add", a=1, b=2), call("add", a=3, b=3) + call("add", a=5, b=5), "6"], ["0"]]
    judge = lambda completions, **_: [float("6" in str(c)) for c in completions]  # noqa: E731
    ours, seen = roll(tokenizer, with_agent(OneTurn(), agent), script, [judge])
    theirs, expected = roll(tokenizer, with_tools(OneTurn(), [add]), script, [judge])
    assert seen == expected
    for a, b in zip(ours, theirs, strict=True):
        assert (a.token_ids == b.token_ids).all()
        assert (a.action_mask == b.action_mask).all()
        assert a.turns[0].canonical == b.turns[0].canonical or len(a.turns) == 1
    assert [r.reward for r in ours] == [r.reward for r in theirs]


def test_async_agents_and_streams(tokenizer):
    async def agent(base_url, prompt, model, api_key):
        assert (model, api_key) == ("policy", "unused")
        text = await asyncio.to_thread(ask, base_url, prompt, stream=True)
        *chunks, done, _ = text.split("\n\n")
        assert done == "data: [DONE]"
        events = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
        assert len({event["id"] for event in events}) == 1
        pieces = [event["choices"][0] for event in events]
        assert pieces[-1]["finish_reason"] == "stop"
        return float("".join(p["delta"].get("content") or "" for p in pieces) == "yes")

    rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent), [["yes"], ["no"]])
    assert [r.reward for r in rollouts] == [1.0, 0.0]


def test_a_marked_repetition_is_given_the_same_answer(tokenizer):
    """As clients do whose connection was lost; it is one turn."""
    said = []

    def agent(base_url, prompt):
        said.append(ask(base_url, prompt, retry=0)["content"])
        for _ in range(2):
            said.append(ask(base_url, prompt, retry=1)["content"])
        return 1

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["hello", "never said"]])
    assert said == ["hello"] * 3
    assert len(rollout.turns) == 1
    assert rollout.reward == 1.0


def raises(base_url, prompt):
    return chat(base_url, prompt)[3]


def silent(base_url):
    return 1.0


def says_no_number(base_url, prompt):
    ask(base_url, prompt)
    return "1.0"


def shows_a_picture(base_url, prompt):
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    assert ask(base_url, [{"role": "user", "content": [picture]}])[0] == 400
    return 1.0


def sleeps(base_url, prompt):
    ask(base_url, prompt)
    threading.Event().wait(3)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (raises, r"agent raises raised IndexError: list index out of range"),
        (silent, r"agent silent ended without asking the policy anything"),
        (
            says_no_number,
            r"agent says_no_number returned str; it must be the reward, None, or a dict of",
        ),
        (shows_a_picture, r"ended without asking the policy anything"),
        (sleeps, r"TimeoutError: took over 1.5 s"),
    ],
)
def test_an_agent_that_fails_is_no_reward_of_0(tokenizer, agent, reason):
    limit = 1.5 if agent is sleeps else 60.0
    rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent, timeout_s=limit), [["a", "b"], ["a", "b"]])
    assert [r.fate for r in rollouts] == [Fate.FAILED] * 2
    assert [r.reward for r in rollouts] == [None] * 2
    assert all(re.search(reason, r.reason) for r in rollouts), [r.reason for r in rollouts]


def test_when_a_rollout_ends_nobody_answers_any_more(tokenizer):
    refused = threading.Event()

    def agent(base_url, prompt):
        messages = list(prompt)
        while True:
            said = ask(base_url, messages)
            if isinstance(said, tuple):
                assert said[0] in (404, 410)
                refused.set()
                raise RuntimeError(said[1])
            messages += [said, *GOES_ON]

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, max_turns=2), [["a", "b"]])
    assert (rollout.stop_reason, len(rollout.turns), rollout.reward) == ("turns", 2, 0.0)
    assert refused.wait(60)


@pytest.mark.parametrize("length", ["67108864", "9" * 5000])
def test_nothing_is_kept_of_who_has_no_secret(length, capfd):
    """The answer comes before the body; a connection that stands still is closed."""
    server = Endpoint()
    try:
        with socket.create_connection(server.server_address[:2], timeout=10) as stranger:
            stranger.sendall(f"POST /wrong/v1/chat/completions HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
            said = b""
            while more := stranger.recv(4096):
                said += more
    finally:
        server.close()
    assert said.startswith(b"HTTP/1.1 404")
    assert 0 < server.RequestHandlerClass.timeout <= 60
    assert "Traceback" not in capfd.readouterr().err


def test_settings_of_requests_have_no_effect_and_that_is_said(tokenizer):
    def agent(base_url, prompt):
        assert ask(base_url.replace("/v1", "x/v1"), prompt)[0] == 404
        ask(base_url, prompt, temperature=0.2, seed=5, n=1, stop=None, user="me", logprobs=False)
        return 1

    with pytest.warns(UserWarning, match="agent: its requests set seed, temperature; the run's settings hold"):
        rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a"], ["a"]])
    assert [r.reward for r in rollouts] == [1.0, 1.0]


def test_a_stop_string_is_left_out_of_answers_unless_it_is_asked_for(tokenizer):
    """As in OpenAI's API and in vLLM's. Calls are parsed before it is left out."""
    offered = list(with_tools(OneTurn(), [add]).train[0].tools)
    said = []

    def agent(base_url, prompt):
        messages = list(prompt)
        for more in ({}, {"include_stop_str_in_output": True}, {}):
            messages.append(ask(base_url, messages, tools=offered, **more))
            said.append(messages[-1])
            messages.append(user("On."))
        return 1

    task = with_agent(OneTurn(), agent)
    task.stop = ("</answer>", "</tool_call>")
    script = ["<answer>4</answer>", "<answer>5</answer>", call("add", a=1, b=2)]
    rollouts, _ = roll(tokenizer, task, [script])
    assert [message["content"] for message in said] == ["<answer>4", "<answer>5</answer>", None]
    assert said[2]["tool_calls"][0]["function"]["name"] == "add"
    assert [turn.action for turn in rollouts[0].turns] == script
    assert rollouts[0].turns[0].compared == "<answer>4"


def test_an_empty_message_may_begin_a_history(tokenizer):
    def agent(base_url, prompt):
        ask(base_url, [user("A long history.")])
        answer = ask(base_url, [user("")])
        ask(base_url, [user(""), answer, user("Next?")])
        return 1.0

    (rollout,), seen = roll(tokenizer, with_agent(OneTurn(), agent), [["first", "second", "third"]])
    assert [len(each.prompt_ids) > 0 for each in rollout.segments] == [True, True]
    assert seen[1] == "<s>user\n<e>\n<s>assistant\n"
    assert seen[2].startswith("<s>user\n<e>\n<s>assistant\nsecond")


def test_the_prompt_of_a_row_may_be_long(tokenizer):
    """The policy never sees it: an agent's requests are the prompts."""
    task = with_agent(OneTurn(), chat)
    options = RolloutOptions(SamplingParams(8), max_prompt_length=4, seed=0)
    check_prompts(options, task, tokenizer, None, None)
    runner = RolloutRunner(Scripted(tokenizer, [["yes"]]), task, tokenizer, Rewarder([]), {"probe": options})
    runner.launch(Job(Visit(0, 0, task.train[0]), 1, "probe"))
    (group,) = runner.poll()
    assert [(r.fate, len(r.prompt_ids), r.text) for r in group.rollouts] == [(None, 4, "yes")]
    assert replace(options, context_length=4).longest_prompt == 3, "one token fits behind it"


def wants_question(question, base_url):
    return 0.0


def test_what_cannot_be_is_refused_at_once():
    with pytest.raises(ValueError, match="it wants question, but there is only answer, api_key, base_url"):
        with_agent(OneTurn({"answer": "4"}), wants_question)
    many = OneTurn()
    many.max_turns = 3
    with pytest.raises(ValueError, match="has an environment of its own"):
        with_agent(many, silent)
    with pytest.raises(ValueError, match="max_turns must be at least 1"):
        with_agent(OneTurn(), silent, max_turns=0)
    with pytest.raises(ValueError, match="give `agent`, the function"):
        AgentConfig(path="rows.jsonl")
    tasks = [Prompt(str(i), i, text="?", columns={"key": str(i)}) for i in range(5)]
    for size, held in ((0.1, 0), (5, 5)):
        with pytest.raises(ValueError, match=f"test_size {size} would hold out {held} of 5 tasks"):
            Tasks(VerifiersConfig({}, test_size=size), tasks)


def test_from_a_configuration(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Two and two?", "answer": "4"}\n')
    (tmp_path / "mine.py").write_text(
        "import json, urllib.request\n\n\n"
        "def solve(prompt, answer, base_url):\n"
        "    body = json.dumps({'messages': [{'role': 'user', 'content': prompt}]}).encode()\n"
        "    with urllib.request.urlopen(f'{base_url}/chat/completions', body) as reply:\n"
        "        return float(json.load(reply)['choices'][0]['message']['content'] == answer)\n"
    )
    task = AgentConfig(path=str(tmp_path / "rows.jsonl"), agent=f"{tmp_path}/mine.py:solve", max_turns=1).build()
    rollouts, _ = roll(tokenizer, task, [["4"], ["5"]])
    assert [r.reward for r in rollouts] == [1.0, 0.0]
    other = AgentConfig(path=str(tmp_path / "rows.jsonl"), agent=f"{tmp_path}/mine.py:solve").build()
    assert other.fingerprint() != task.fingerprint()
