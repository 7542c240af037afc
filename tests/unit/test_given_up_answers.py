"""Answers that an agent gave up: not trained, counted, and no part of its reward."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

import pytest

from winnow.methods.group_kind import GroupJudge
from winnow.record.step_metrics import Tally
from winnow.sampler.codec import group_from, group_state
from winnow.types import Fate

from ..builders.agent_requests import Slow, start_request
from ..builders.asking import ask, user
from ..builders.tools import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def trained(tokenizer, rollout):
    return tokenizer.decode(rollout.token_ids[rollout.action_mask])


def closes(base_url, prompt, slow):
    """A client that times out while the policy works."""
    with start_request(base_url, prompt):
        slow.working.wait(20)


def gives_up_the_second(base_url, prompt, slow):
    """Ask, ask again, and close the connection while the policy works on that."""
    slow.go_on.set()
    first = ask(base_url, prompt)
    slow.go_on.clear()
    slow.working.clear()
    closes(base_url, [*prompt, first, user("Sure?")], slow)


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
        gives_up_the_second(base_url, prompt, slow)
        slow.go_on.set()

    seen = []
    judge = lambda completions, **_: [seen.append(c) or 1.0 for c in completions]  # noqa: E731
    Slow(tokenizer, [["right", "second"]], funcs=[judge]).roll(agent)
    assert [(m["role"], m["content"]) for m in seen[0]] == [("assistant", "right")]


def test_an_agent_that_failed_before_a_limit_has_no_reward_of_0(tokenizer):
    """No refusal is the cause: its client lost patience while the answer was decoded to the limit."""

    def agent(base_url, prompt, slow):
        gives_up_the_second(base_url, prompt, slow)
        threading.Timer(0.3, slow.go_on.set).start()
        raise ConnectionError("the client lost patience")

    (rollout,) = Slow(tokenizer, [["first", "x" * 500]]).roll(agent)
    assert (rollout.fate, rollout.reward) == (Fate.FAILED, None)
    assert "the client lost patience" in rollout.reason


def test_the_last_answer_may_be_given_up_too(tokenizer):
    """The reward is that of the answers that the agent had."""

    def agent(base_url, prompt, slow):
        gives_up_the_second(base_url, prompt, slow)
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


def answered_before_a_slow_one(base_url, prompt, slow):
    """Return an answer; the next one takes a second."""
    slow.go_on.set()
    first = ask(base_url, prompt)
    slow.go_on.clear()
    slow.working.clear()
    threading.Timer(1.0, slow.go_on.set).start()
    return first


@pytest.mark.parametrize("leaves", [leaves_a_thread, leaves_a_task])
def test_an_answer_after_the_agents_return_is_given_up(tokenizer, leaves):
    """Its connection is open, but the answer cannot have had a part in the reward."""

    def agent(base_url, prompt, slow):
        first = answered_before_a_slow_one(base_url, prompt, slow)
        left = leaves(base_url, [*prompt, first, user("Sure?")], slow)
        return 0.5 if left is None else after(left)

    async def after(left):
        await left
        return 0.5

    (rollout,) = Slow(tokenizer, [["first", "second"]]).roll(agent)
    assert rollout.reward == 0.5
    assert [turn.abandoned for turn in rollout.turns] == [False, True]
    assert trained(tokenizer, rollout) == "first<e>"


@pytest.mark.parametrize("most", [6, None])
def test_a_limit_truncates_no_rollout_by_an_answer_that_nobody_waits_for(tokenizer, most):
    """As where the first of several answers wins: the limit of an answer, or that of the rollout."""

    def agent(base_url, prompt, slow):
        first = answered_before_a_slow_one(base_url, prompt, slow)
        leaves_a_thread(base_url, [*prompt, first, user("Sure?")], slow)
        return 0.5

    (rollout,) = Slow(tokenizer, [["first", "x" * 500]]).roll(agent, max_turn_length=most)
    assert [turn.stop_reason for turn in rollout.turns] == ["eos", "length"]
    assert (rollout.reward, rollout.stop_reason, rollout.truncated) == (0.5, "env", False)


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


@pytest.mark.parametrize("quotes", [True, False])
def test_an_answer_that_a_later_request_has_was_read_though_its_connection_was_reset(tokenizer, quotes):
    def agent(base_url, prompt, slow):
        slow.go_on.set()
        reset = start_request(base_url, prompt)
        reset.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        answer = json.loads(reset.getresponse().read())["choices"][0]["message"]
        reset.close()
        time.sleep(0.2)
        return float(ask(base_url, [*prompt, answer if quotes else user("Hm."), user("Sure?")])["content"] == "yes")

    (rollout,) = Slow(tokenizer, [["first", "yes"]]).roll(agent)
    assert rollout.reward == 1.0
    assert [turn.abandoned for turn in rollout.turns] == [not quotes, False]
