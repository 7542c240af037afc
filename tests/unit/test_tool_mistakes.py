"""What the policy gets wrong in its calls is told to it, and fails no rollout."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from typing import Any

import pytest

from winnow.env.base import StepResult
from winnow.env.tools import with_tools

from ..builders.tool_calls import call
from ..builders.tool_rollouts import roll
from ..builders.tools import OneTurn, add, play, tokenizer  # noqa: F401


def leave(code: str) -> str:
    """
    Ends the program, as argparse does.

    Args:
        code: Why.
    """
    raise SystemExit(code)


def power(n: int) -> int:
    """
    Returns a power of ten.

    Args:
        n: The exponent.
    """
    return 10**n


def take_all(items: list) -> list:
    """
    Takes all items.

    Args:
        items: Which.
    """
    taken = list(items)
    items.clear()
    return taken


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (("leave", {"code": "no such option"}), "raised SystemExit: no such option"),
        (("power", {"n": 5000}), "Exceeds the limit"),
        (("add", '{"a": 1, "b": 2}'), "must be a mapping, not str"),
        (("add", [1, 2]), "must be a mapping, not list"),
        (("add", 3), "must be a mapping, not int"),
        (("add", {1: 2, "a": 3}), "unexpected keyword argument '1'"),
        (("add", {"a": {1, 2}, "b": 3}), "can only concatenate str"),
        (("add", {"a": LOOP}), "must be a mapping, not str"),
        (("add", {"self": 1}), "unexpected keyword argument 'self'"),
        (("add", None), "missing 2 required positional arguments"),
        (("subtract", {}), "Tool subtract not found."),
        (("", {}), "Tool  not found."),
    ],
)
def test_whatever_the_policy_calls_is_its_own_mistake(tokenizer, made, told):
    task = with_tools(OneTurn(), [add, leave, power], parse=lambda text: [made] if text.startswith("call") else [])
    rollouts, seen = roll(tokenizer, task, [["call", "Done."]], [lambda completions: [1.0]])
    assert [r.reward for r in rollouts] == [1.0], rollouts[0].reason
    assert told in seen[-1]


def lines(text):
    """A parser of one's own that expects a name and arguments in each line."""
    return [(line.split(": ")[0], dict([line.split(": ")[1].split("=")])) for line in text.splitlines()]


@pytest.mark.parametrize("text", ["add", "add: a", "add: a=1=2", "add: a=1\nadd"])
def test_a_text_that_a_parser_cannot_read_has_no_calls(text):
    task = with_tools(OneTurn(), [add], parse=lines)
    with pytest.warns(
        UserWarning, match=r"parse: .*test_tool_mistakes.py.*a text that it cannot read has no tool calls"
    ):
        _, (result,) = play(task, text)
    assert result == StepResult(None, None, done=True)
    assert "missing 1 required" in play(task, "add: a=1")[1][0].observation


def nobody_there():
    raise ConnectionError("no parser there")


def several():
    raise ExceptionGroup("of a task group", [ValueError("x"), ConnectionError("no parser there")])


@pytest.mark.parametrize("ask", [nobody_there, several])
def test_a_parser_that_asks_somebody_who_is_away_is_not_the_policys_mistake(ask):
    with pytest.raises((ConnectionError, ExceptionGroup)):
        play(with_tools(OneTurn(), [add], parse=lambda text: ask()), "text")


def hang_up(server):
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)


@pytest.mark.parametrize("service", ["refuses", "hangs up", "is silent"])
def test_a_service_that_is_away_is_not_the_policys_mistake_in_a_client_that_hides_causes(service):
    """httpx's errors, with which OpenAI's client fails, leave out those of the connection."""
    openai = pytest.importorskip("openai")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        if service == "refuses":
            server.close()
        elif service == "hangs up":
            threading.Thread(target=hang_up, args=(server,), daemon=True).start()

        def models() -> str:
            """Lists models."""
            return str(openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=0.5).models.list())

        with pytest.raises(openai.APIConnectionError):
            play(with_tools(OneTurn(), [models]), call("models"))


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError(errno.ENETUNREACH, "no network"), False),
        (OSError(errno.EMFILE, "too many open files"), False),
        (socket.gaierror(socket.EAI_AGAIN, "no name server"), False),
        (ExceptionGroup("of a task group", [TimeoutError("slow")]), False),
        (socket.gaierror(socket.EAI_NONAME, "no such host"), True),
        (FileNotFoundError(errno.ENOENT, "no such file"), True),
        (ExceptionGroup("of a task group", [ValueError("wrong")]), True),
    ],
)
def test_errors_of_this_machine_are_not_the_policys_mistake(error, shown):
    def look() -> str:
        """Looks."""
        raise error

    task = with_tools(OneTurn(), [look])
    if shown:
        assert "error" in play(task, call("look"))[1][0].observation
    else:
        with pytest.raises(type(error)):
            play(task, call("look"))


def test_a_tool_may_change_its_arguments():
    _, (result,) = play(with_tools(OneTurn(), [take_all]), call("take_all", items=["a"]))
    assert result.observation.messages[0]["content"] == "['a']"
    assert result.message["tool_calls"][0]["function"]["arguments"] == {"items": ["a"]}


def split(text: str, how: str) -> list:
    """
    Splits a text.

    Args:
        text: The text.
        how: By what.
    """
    return text.split(how)


@pytest.mark.parametrize(
    ("text", "shown"), [("a b", "['a', 'b']"), ("", "['']"), ("\ud800", "['?']"), ("a\0b", r"['a\x00b']")]
)
def test_lists_of_texts_are_text(tokenizer, text, shown):
    script = [[call("split", text=text, how=" "), "Done."]]
    rollouts, seen = roll(tokenizer, with_tools(OneTurn(), [split]), script, [lambda completions: [1.0]])
    assert [r.reward for r in rollouts] == [1.0], rollouts[0].reason
    assert f"<s>tool split\n{shown}<e>" in seen[-1]


def echo(text: str) -> str:
    """
    Repeats a text.

    Args:
        text: The text.
    """
    return text


def test_half_a_character_is_shown_as_a_question_mark(tokenizer):
    script = [[call("echo", text="a\ud800"), "Done."]]
    rollouts, seen = roll(tokenizer, with_tools(OneTurn(), [echo]), script, [lambda completions: [1.0]])
    assert [r.reward for r in rollouts] == [1.0], rollouts[0].reason
    assert "<s>tool echo\na?<e>" in seen[-1]
