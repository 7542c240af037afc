"""Requests of agents: repeated, abandoned, with settings of their own, or to another address."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from winnow.methods.group_kind import GroupJudge
from winnow.record.step_metrics import Tally
from winnow.sampler.codec import group_from, group_state
from winnow.tasks.agents import endpoint, with_agent
from winnow.types import Fate

from ..builders.agent_requests import Slow, start_request
from ..builders.asking import ask, user
from ..builders.tool_rollouts import roll
from ..builders.tools import OneTurn, make_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def trained(tokenizer, rollout):
    return tokenizer.decode(rollout.token_ids[rollout.action_mask])


# ------------------------------------------------------------ repeated


def votes(base_url, prompt):
    """Self-consistency with a plain client."""
    return float(len({ask(base_url, prompt)["content"] for _ in range(3)}))


def votes_at_once(base_url, prompt):
    said = []
    asking = [threading.Thread(target=lambda: said.append(ask(base_url, prompt)["content"])) for _ in range(3)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    return float(len(set(said)))


@pytest.mark.parametrize("agent", [votes, votes_at_once])
def test_equal_requests_have_answers_of_their_own_and_the_remedy_is_named_once(tokenizer, agent):
    script = [["a", "b", "c"], ["d", "d", "e"]]
    with pytest.warns(UserWarning, match="X-Stainless-Retry-Count: 1 with a repetition") as seen:
        rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent), script)
    assert len([w for w in seen if "equal requests" in str(w.message)]) == 1
    assert [r.reward for r in rollouts] == [3.0, 2.0]
    assert [len(r.turns) for r in rollouts] == [3, 3]
    assert all(r.action_mask.all() for r in rollouts)


def test_one_that_is_answered_and_leaves_has_not_left_before(monkeypatch):
    """Another thread, with an equal request, looks whether it is still there."""
    ours, theirs = socket.socketpair()
    client, looks, closed = endpoint.Client(ours), [], endpoint._closed

    def is_answered_and_leaves():
        client.begin_answer()
        theirs.close()

    def looked(connection):
        looks.append(threading.Thread(target=is_answered_and_leaves))
        if len(looks) == 1:
            looks[0].start()
            looks[0].join(0.2)
        return closed(connection)

    monkeypatch.setattr(endpoint, "_closed", looked)
    assert not client.gone
    looks[0].join()
    assert not client.gone
    ours.close()


@pytest.mark.parametrize("retry", [None, 0, 1])
def test_a_repetition_after_a_closed_connection_is_the_same_turn(tokenizer, retry):
    """A client with a timeout of its own; some retry in a loop around it, so that it is not marked."""

    def agent(base_url, prompt, slow):
        with start_request(base_url, prompt):
            slow.working.wait(20)
        waiting = threading.Thread(target=lambda: said.append(ask(base_url, prompt, retry=retry)["content"]))
        waiting.start()
        time.sleep(0.2)
        slow.go_on.set()
        waiting.join()
        return 1

    said = []
    (rollout,) = Slow(tokenizer, [["a", "never said"]]).roll(agent)
    assert said == ["a"]
    assert (rollout.reward, len(rollout.turns)) == (1.0, 1)
    assert trained(tokenizer, rollout) == "a<e>"


# ------------------------------------------------------------ abandoned


def closes(base_url, prompt, slow):
    """A client that times out while the policy works."""
    with start_request(base_url, prompt):
        slow.working.wait(20)


def cancels(base_url, prompt, slow):
    """asyncio.wait_for around a client whose coroutine is cancelled."""

    async def answer():
        to = urlsplit(base_url)
        reader, writer = await asyncio.open_connection(to.hostname, to.port)
        body = json.dumps({"messages": prompt}).encode()
        writer.write(f"POST {to.path}/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            await reader.read()
        finally:
            writer.close()

    async def wait():
        asking = asyncio.create_task(answer())
        await asyncio.to_thread(slow.working.wait, 20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asking, 0.05)

    asyncio.run(wait())


@pytest.mark.parametrize("gives_up", [closes, cancels])
def test_an_answer_that_was_given_up_is_not_trained_and_counted(tokenizer, gives_up):
    def agent(base_url, prompt, slow):
        gives_up(base_url, prompt, slow)
        later = threading.Timer(0.2, slow.go_on.set)  # while the next request waits
        later.start()
        return float(ask(base_url, [user("Another.")])["content"] == "right")

    group = Slow(tokenizer, [["nobody reads this", "right"]]).group(agent)
    (rollout,) = group.rollouts
    assert (rollout.reward, rollout.fate) == (1.0, None)
    assert [turn.abandoned for turn in rollout.turns] == [True, False]
    assert trained(tokenizer, rollout) == "right<e>"
    first, second = rollout.parts()
    assert not first.action_mask.any()
    assert second.action_mask.all()
    assert not rollout.sampler_logp[~rollout.action_mask].any()
    assert set(rollout.versions[~rollout.action_mask]) == {-1}
    assert_counted(group, 1, len("nobody reads this") + 1)


def assert_counted(group, turns, tokens):
    tally = Tally(GroupJudge())
    tally.finished(group)
    for rollout in group.rollouts:
        rollout.fate = rollout.fate or Fate.TRAINED
    tally.fated(group)
    metrics = tally.metrics()
    assert metrics["turns/abandoned"] == turns
    assert metrics["tokens/abandoned"] == tokens
    assert metrics["tokens/trained"] == tally.sampled_tokens - tokens
    assert group_from(group_state(group), {"train": [group.prompt]}).rollouts[0].turns[0].abandoned


def test_reward_functions_do_not_see_what_nobody_waited_for(tokenizer):
    def agent(base_url, prompt, slow):
        closes(base_url, prompt, slow)
        slow.go_on.set()
        ask(base_url, [user("Another.")])

    seen = []
    judge = lambda completions, **_: [seen.append(c) or 1.0 for c in completions]  # noqa: E731
    Slow(tokenizer, [["nobody reads this", "right"]], funcs=[judge]).roll(agent)
    assert [m["content"] for m in seen[0] if m["role"] == "assistant"] == ["right"]


def test_reward_functions_judge_the_last_answer_that_the_agent_had(tokenizer):
    """Not its own question, whose answer it gave up."""

    def agent(base_url, prompt, slow):
        slow.go_on.set()
        first = ask(base_url, prompt)
        slow.go_on.clear()
        slow.working.clear()
        with start_request(base_url, [*prompt, first, user("Sure?")]):
            slow.working.wait(20)
        slow.go_on.set()

    seen = []
    judge = lambda completions, **_: [seen.append(c) or 1.0 for c in completions]  # noqa: E731
    Slow(tokenizer, [["right", "second"]], funcs=[judge]).roll(agent)
    assert [(m["role"], m["content"]) for m in seen[0]] == [("assistant", "right")]


def test_an_agent_that_failed_before_a_limit_has_no_reward_of_0(tokenizer):
    """No refusal is the cause: its client lost patience while the answer was decoded to the limit."""

    def agent(base_url, prompt, slow):
        slow.go_on.set()
        first = ask(base_url, prompt)
        slow.go_on.clear()
        slow.working.clear()
        with start_request(base_url, [*prompt, first, user("Sure?")]):
            slow.working.wait(20)
        threading.Timer(0.3, slow.go_on.set).start()
        raise ConnectionError("the client lost patience")

    (rollout,) = Slow(tokenizer, [["first", "x" * 500]]).roll(agent)
    assert (rollout.fate, rollout.reward) == (Fate.FAILED, None)
    assert "the client lost patience" in rollout.reason


def test_many_agents_may_wait_where_few_files_may_be_open():
    """Each holds both ends of its connection; 1,024 files are usual, and 512 agents at once."""
    code = """
import resource, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from tests.builders.asking import ask
from tests.builders.tool_rollouts import roll
from tests.builders.tools import OneTurn, make_tokenizer
from winnow.tasks.agents import with_agent
waiting = threading.Barrier(100)

def agent(base_url, prompt):
    ask(base_url, prompt)
    waiting.wait(30)
    ask(base_url, prompt)
    return 1.0

rollouts, _ = roll(make_tokenizer(), with_agent(OneTurn(), agent), [["a", "b"] for _ in range(100)])
print({(r.fate, r.reward, r.reason) for r in rollouts})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "{(None, 1.0, '')}", done.stderr[-2000:]


def test_the_last_answer_may_be_given_up_too(tokenizer):
    """The reward is that of the answers that the agent had."""

    def agent(base_url, prompt, slow):
        slow.go_on.set()
        first = ask(base_url, prompt)
        slow.go_on.clear()
        slow.working.clear()
        with start_request(base_url, [*prompt, first, user("Sure?")]):
            slow.working.wait(20)
        slow.go_on.set()
        return 0.5

    (rollout,) = Slow(tokenizer, [["first", "second"]]).roll(agent)
    assert rollout.reward == 0.5
    assert [turn.abandoned for turn in rollout.turns] == [False, True]
    assert trained(tokenizer, rollout) == "first<e>"


def leaves_a_thread(base_url, prompt, slow):
    threading.Thread(target=ask, args=(base_url, prompt), daemon=True).start()
    slow.working.wait(20)


async def leaves_a_task(base_url, prompt, slow):
    """The first of several: the others go on, with their connections."""
    waiting = asyncio.create_task(asyncio.to_thread(ask, base_url, prompt))
    await asyncio.to_thread(slow.working.wait, 20)
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done


@pytest.mark.parametrize("leaves", [leaves_a_thread, leaves_a_task])
def test_an_answer_after_the_agents_return_is_given_up(tokenizer, leaves):
    """Its connection is open, but the answer cannot have had a part in the reward."""

    def agent(base_url, prompt, slow):
        slow.go_on.set()
        first = ask(base_url, prompt)
        slow.go_on.clear()
        slow.working.clear()
        threading.Timer(1.0, slow.go_on.set).start()
        left = leaves(base_url, [*prompt, first, user("Sure?")], slow)
        return 0.5 if left is None else after(left)

    async def after(left):
        await left
        return 0.5

    (rollout,) = Slow(tokenizer, [["first", "second"]]).roll(agent)
    assert rollout.reward == 0.5
    assert [turn.abandoned for turn in rollout.turns] == [False, True]
    assert trained(tokenizer, rollout) == "first<e>"


def test_a_rollout_whose_every_answer_was_given_up_fails_with_the_cause(tokenizer):
    def agent(base_url, prompt, slow):
        closes(base_url, prompt, slow)
        slow.go_on.set()
        return 0.0

    (rollout,) = Slow(tokenizer, [["unread"]]).roll(agent)
    assert (rollout.fate, rollout.reward) == (Fate.FAILED, None)
    assert "gave up every request before its answer" in rollout.reason
    assert not rollout.action_mask.any()


def test_an_answer_that_was_not_read_is_given_up_though_it_was_sent(tokenizer):
    """The client stops while its answer lies in the socket."""

    def agent(base_url, prompt, slow):
        slow.go_on.set()
        connection = start_request(base_url, prompt)
        connection.sock.recv(1)  # it is there
        connection.close()
        time.sleep(0.2)
        return float(ask(base_url, [user("Another.")])["content"] == "right")

    (rollout,) = Slow(tokenizer, [["unread", "right"]]).roll(agent)
    assert [turn.abandoned for turn in rollout.turns] == [True, False]
    assert trained(tokenizer, rollout) == "right<e>"


def test_a_request_given_up_before_its_turn_costs_nothing(tokenizer):
    def agent(base_url, prompt, slow):
        first = threading.Thread(target=ask, args=(base_url, prompt))
        first.start()
        slow.working.wait(20)
        with start_request(base_url, [user("Never asked.")]):
            time.sleep(0.2)
        slow.go_on.set()
        first.join()
        return float(ask(base_url, [user("Another.")])["content"] == "second")

    (rollout,) = Slow(tokenizer, [["first", "second"]]).roll(agent)
    assert (rollout.reward, len(rollout.turns)) == (1.0, 2)
    assert not any(turn.abandoned for turn in rollout.turns)


def test_what_a_client_has_read_counts_however_it_leaves(tokenizer):
    """Streams that are left early, connections that are kept or closed."""

    def agent(base_url, prompt, slow):
        slow.go_on.set()
        kept = start_request(base_url, prompt)
        kept.getresponse().read()
        closed = start_request(base_url, [user("Two.")])
        closed.getresponse().read()
        closed.close()
        streamed = start_request(base_url, [user("Three.")], stream=True)
        answer = streamed.getresponse()
        assert answer.readline().startswith(b"data:")
        answer.close()
        streamed.close()
        time.sleep(0.2)
        return 1

    (rollout,) = Slow(tokenizer, [["1", "2", "3"]]).roll(agent)
    assert not any(turn.abandoned for turn in rollout.turns)
    assert rollout.reward == 1.0


def by_environment(base_url, prompt):
    os.environ["MY_BASE_URL"] = base_url
    time.sleep(0.2)  # the framework imports
    ask(os.environ["MY_BASE_URL"], prompt)
    return 1.0


def test_an_address_in_the_environment_is_named_at_the_first_request(tokenizer, monkeypatch):
    monkeypatch.setenv("MY_BASE_URL", "")
    task = with_agent(OneTurn(), by_environment, timeout_s=3)
    with pytest.warns(UserWarning, match="agent: MY_BASE_URL in os.environ is the address of one rollout, but"):
        rollouts, _ = roll(tokenizer, task, [["a", "b"], ["c", "d"]])
    assert Fate.FAILED in {r.fate for r in rollouts}
    failed = next(r for r in rollouts if r.fate == Fate.FAILED)
    assert "MY_BASE_URL in os.environ is the address of one rollout" in failed.reason
    assert "give base_url to its client" in failed.reason


def ends(base_url):
    return 1.0


def asks_another_host(base_url):
    raise RuntimeError("Error code: 401 - Incorrect API key provided: unused")


def hangs(base_url):
    threading.Event().wait(3)


@pytest.mark.parametrize("agent", [ends, asks_another_host, hangs])
def test_an_agent_that_asks_elsewhere_is_told_where_to_ask(tokenizer, agent):
    limit = 0.5 if agent is hangs else 60.0
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, timeout_s=limit), [["a"]])
    assert rollout.fate == Fate.FAILED
    assert "; no request came to its base_url: give that to its client (rollouts run at the same" in rollout.reason
    assert f"agent {agent.__name__} " in rollout.reason


def test_an_agent_that_fails_after_it_asked_is_not_told_so(tokenizer):
    def agent(base_url, prompt):
        ask(base_url, prompt)
        raise RuntimeError("its own fault")

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a"]])
    assert "its own fault" in rollout.reason
    assert "base_url" not in rollout.reason


def test_an_ended_address_names_the_cause(tokenizer):
    def agent(base_url, prompt):
        ask(base_url, prompt)
        addresses.append(base_url)
        return 1

    addresses = []
    task = with_agent(OneTurn(), agent)
    roll(tokenizer, task, [["a"]])
    status, said = ask(addresses[0], [user("Too late.")])
    assert status == 404
    assert "give each client its own base_url" in said


def test_a_route_that_is_not_served_is_named(tokenizer):
    def agent(base_url, prompt):
        said.append(ask(base_url, prompt, route="/responses"))
        ask(base_url, prompt)
        return 1

    said = []
    roll(tokenizer, with_agent(OneTurn(), agent), [["a"]])
    assert said == [(404, "no such address (/v1/responses); there is only /v1/chat/completions")]


def test_a_variable_that_vanishes_meanwhile_fails_no_request(tokenizer, monkeypatch):
    """Agents in other threads may remove what one of them has just listed."""

    class Vanishing(UserDict):
        def __getitem__(self, name):
            raise KeyError(name)

        def get(self, name, default=None):
            return default

    def agent(base_url, prompt):
        return float(ask(base_url, prompt)["content"] == "yes")

    monkeypatch.setattr(endpoint, "os", SimpleNamespace(environ=Vanishing(A_BASE_URL="http://127.0.0.1")))
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["yes"]])
    assert (rollout.fate, rollout.reward) == (None, 1.0)
