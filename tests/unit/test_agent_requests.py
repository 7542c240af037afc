"""Requests of agents: repeated, abandoned, with settings of their own, or to another address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace

import pytest

from winnow.rollout.runner import RolloutRunner
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


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_fails_no_request(tokenizer):
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), votes), [["a", "b", "c"]])
    assert (rollout.reason, rollout.reward) == ("", 3.0)


def asks_almost_the_same(base_url, prompt):
    """As a client does that numbers calls again, or a template that adds a line's end."""
    return float(
        len({ask(base_url, messages)["content"] for messages in ([user("why?")], [user("why?\n")], [user(" why?")])})
    )


def test_requests_that_differ_in_white_space_have_noise_of_their_own(tokenizer):
    """The noise depends on what a message says, so what counts repetitions has to as well."""
    keys, task = [], with_agent(OneTurn(), asks_almost_the_same)
    submit = RolloutRunner._submit

    def note(self, flight, siblings):
        keys.extend(s.settings.key for s in siblings)
        return submit(self, flight, siblings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RolloutRunner, "_submit", note)
        rollouts, _ = roll(tokenizer, task, [["a", "b", "c"]])
    assert rollouts[0].reward == 3.0
    assert len(set(keys)) == len(keys) == 3


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


def test_a_conversation_is_kept_once_not_once_a_turn(tokenizer):
    def agent(base_url, prompt):
        messages = list(prompt)
        for _ in range(3):
            messages += [ask(base_url, messages), user("Go on.")]
        return 1.0

    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent), [["a", "b", "c"]])
    assert [turn.observation for turn in rollout.turns][:2] == ["Go on."] * 2
    assert not any(getattr(turn.observation, "whole", ()) for turn in rollout.turns)


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


@pytest.mark.parametrize(("excepted", "named"), [("localhost", True), ("10.0.0.1, 127.0.0.1", False)])
def test_a_proxy_that_takes_the_requests_is_named(tokenizer, monkeypatch, excepted, named):
    for name in ("no_proxy", *endpoint.PROXIES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", excepted)
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), asks_another_host), [["a"]])
    assert ("base_url: HTTP_PROXY is set, so add 127.0.0.1 to NO_PROXY; else give" in rollout.reason) == named
    assert "give that to its client (rollouts run at the same" in rollout.reason


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


def test_a_route_that_is_not_served(tokenizer):
    def agent(base_url, prompt):
        said.append(ask(base_url, prompt, route="/responses"))
        ask(base_url, prompt)
        return 1

    said = []
    roll(tokenizer, with_agent(OneTurn(), agent), [["a"]])
    [(status, message)] = said
    assert status == 404
    assert "only /v1/chat/completions is served" in message


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
