"""TRL's tools and environments under a task of one turn, with a real tokenizer and chat templates."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import warnings
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from winnow import ConfigError
from winnow.env.base import StepResult, Task
from winnow.env.rewards.rewarder import Rewarder
from winnow.env.tools import ToolUnavailableError, parse_tool_calls, parser_of, with_tools
from winnow.run.preflight import check_rewards
from winnow.tasks.python_tool import PythonTool
from winnow.types import Prompt

from ..builders.tool_calls import Counter, call, fail
from ..builders.tools import OneTurn, add, make_tokenizer, play


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


async def slow_add(a: int, b: int) -> int:
    """
    Adds two numbers without hurry.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0.01)
    return a + b


class Looks:
    @classmethod
    def look(cls) -> str:
        """Looks."""
        return "a room"


class Silent:
    """An environment without a reward."""

    def reset(self, **row):
        return None

    async def knock(self) -> str:
        """Knocks."""
        return "who is there?"


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        (call("add", a=1, b=2), [("add", {"a": 1, "b": 2})]),
        ("so " + call("add", a=1) + call("look"), [("add", {"a": 1}), ("look", {})]),
        ('<tool_call>{"name": "look"}</tool_call>', [("look", {})]),
        ('<tool_call>{"name": "look", "arguments": null}</tool_call>', [("look", {})]),
        ('<tool_call>{"name": "look", "arguments": "x"}</tool_call>', [("look", "x")]),
        (call("add", a=1) + "<tool_call>{oops</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', []),
        ("<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": "look"}', []),
    ],
)
def test_parse_tool_calls(text, calls):
    assert parse_tool_calls(text) == calls


def test_a_tokenizers_own_response_template_parses(tokenizer):
    with pytest.raises(ValueError, match="no response_template"):
        parser_of(tokenizer)
    own = make_tokenizer()
    own.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<s>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "[CALL]",
                "close_pattern": r"\[/CALL\]\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<e>\s*", "content": "text"},
        },
    }
    parse = parser_of(own, [add])
    assert parse('two [CALL]{"name": "add", "arguments": {"a": 1, "b": 2}}[/CALL]') == [("add", {"a": 1, "b": 2})]
    assert parse("none") == []
    assert parse("[CALL]{oops[/CALL]") == []
    _, (result,) = play(
        with_tools(OneTurn(), [add], parse=parse), '[CALL]{"name": "add", "arguments": {"a": 1, "b": 2}}[/CALL]'
    )
    assert result.observation == "3"


def test_tools_are_called_and_their_errors_told(tokenizer):
    task = with_tools(OneTurn(), [add, slow_add, fail])
    assert isinstance(task, Task)
    text = (
        call("slow_add", a=1, b=1) + call("add", a=2, b=3) + call("fail", how="broke") + call("mul") + call("add", c=1)
    )
    first, (result, last) = play(task, text, "It is 5.")
    assert first is None
    assert [m["content"] for m in result.observation.messages[:4]] == [
        "2",
        "5",
        "{'error': 'it broke'}",
        "{'error': 'Tool mul not found.'}",
    ]
    assert "unexpected keyword argument 'c'" in result.observation.messages[4]["content"]
    assert {m["role"] for m in result.observation.messages} == {"tool"}
    assert [m["name"] for m in result.observation.messages] == ["slow_add", "add", "fail", "mul", "add"]
    assert result.action.startswith('[["slow_add", {"a": 1, "b": 1}]')
    assert not result.done
    assert last == StepResult(None, None, done=True)


@pytest.mark.parametrize("how", ["away", "network", "slow"])
def test_what_is_not_the_models_fault_fails_the_rollout(how):
    task = with_tools(OneTurn(), [fail])
    with pytest.raises((ToolUnavailableError, ConnectionError, TimeoutError), match=f"it {how}"):
        play(task, call("fail", how=how))


def test_a_lost_connection_is_not_the_models_fault_in_the_words_of_a_client_either():
    """HTTP clients raise errors of their own for it, which derive from no `ConnectionError`."""

    def look_up(hidden: bool) -> str:
        """
        Looks something up.

        Args:
            hidden: Whether the cause is.
        """
        try:
            raise ConnectionRefusedError("nobody listens")
        except OSError as error:
            raise LookupError("no such page") from (None if hidden else error)

    task = with_tools(OneTurn(), [look_up])
    with pytest.raises(LookupError, match="no such page"):
        play(task, call("look_up", hidden=False))
    assert play(task, call("look_up", hidden=True))[1][0].observation == "{'error': 'no such page'}"


@pytest.mark.slow
def test_what_hangs_is_ended_and_the_next_call_works():
    async def nap() -> str:
        """Sleeps."""
        await asyncio.sleep(60)
        return ""

    task = with_tools(OneTurn(), [fail, add, nap], timeout_s=1.5)
    for text in (call("fail", how="hang"), call("nap")):
        with pytest.raises(TimeoutError, match=r"took over 1\.5 s"):
            play(task, text)
        assert play(task, call("add", a=1, b=2))[1][0].observation == "3"


def test_an_async_tool_that_ends_the_program_ends_only_its_call():
    async def leave() -> str:
        """Leaves."""
        raise SystemExit(3)

    task = with_tools(OneTurn(), [leave, slow_add], timeout_s=5.0)
    _, (result,) = play(task, call("leave") + call("slow_add", a=1, b=2))
    assert [m["content"] for m in result.observation.messages] == ["{'error': 'raised SystemExit: 3'}", "3"]


def test_a_call_that_has_failed_before_anybody_looks_is_no_call_that_was_not_made(monkeypatch):
    """The event loop may be faster than the thread that asked it."""
    from winnow.env.workers.calls import Deadlines

    def answered(self: Deadlines, function: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(ValueError("at once"))
        return future

    monkeypatch.setattr(Deadlines, "submit_async", answered)
    _, (result,) = play(with_tools(OneTurn(), [slow_add]), call("slow_add", a=1, b=2))
    assert [m["content"] for m in result.observation.messages] == ["{'error': 'at once'}"]


def test_lists_are_passed_on_as_in_trl():
    def rows() -> list:
        """Rows."""
        return [{"type": "text", "text": "a"}]

    _, (result,) = play(with_tools(OneTurn(), [rows]), call("rows"))
    assert result.observation.messages == (
        {"role": "tool", "name": "rows", "content": [{"type": "text", "text": "a"}]},
    )


def test_tools_that_need_signals_are_not_blamed_on_the_model():
    def timed() -> str:
        """Sets a timeout of its own."""
        signal.signal(signal.SIGALRM, lambda *_: None)
        return "done"

    def guarded() -> str:
        """Catches its failure."""
        try:
            return timed()
        except ValueError as error:
            return f"error: {error}"

    task = with_tools(OneTurn(), [timed, guarded])
    with pytest.raises(ToolUnavailableError, match=r"tool timed: signal only works.*with_tools\(timeout_s=...\)"):
        play(task, call("timed"))
    with pytest.warns(UserWarning, match="tool guarded: it sets a signal handler"):
        play(task, call("guarded"))
    with warnings.catch_warnings(action="error"):
        assert play(task, call("guarded"))[1][0].observation.startswith("error: signal only works")


def test_threads_end_with_the_task():
    before = set(threading.enumerate())
    task = with_tools(OneTurn(), [add, slow_add])
    assert play(task, call("slow_add", a=1, b=2))[1][0].observation == "3"
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert len(started) >= 2
    del task
    gc.collect()
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)


def test_iterations_are_bounded_as_in_trl():
    task = with_tools(OneTurn(), environment_factory=Counter, max_tool_calling_iterations=2)
    assert task.max_turns == 3
    _, results = play(task, *[call("increment", by=1)] * 3)
    assert [r.done for r in results] == [False] * 3, "it has no turn left: the limit ends it"
    assert [r.reward for r in results] == [1.0, 2.0, 2.0]  # the third call is not run


# ---------------------------------------------------------------- environments


def test_an_environment_sees_its_row_and_siblings_do_not_share_it():
    task = with_tools(OneTurn({"start": 3, "level": "x"}), [add], Counter)
    first, (result,) = play(task, call("increment", by=2))
    assert (first, result.observation, result.reward) == (" Start at 3.", "now 5", 5.0)
    assert play(task, call("increment", by=2))[1][0].observation == "now 5"
    env = task.make_env(task.train[0])
    env.start_reset().result(10)
    assert env.environment.row == {"level": "x", "prompt": [{"role": "user", "content": "Count."}]}
    names = [tool["function"]["name"] for tool in task.train[0].tools]
    assert names == ["add", "increment"]


def test_rows_choose_their_environment():
    task = with_tools(
        OneTurn({"environment": "a", "start": 1}, {"environment": "b", "start": 1}),
        environment_factory={"a": Counter, "b": Silent},
    )
    names = [[tool["function"]["name"] for tool in p.tools] for p in task.train]
    assert names == [["increment"], ["knock"]]
    assert play(task, call("increment", by=1))[1][0].observation == "now 2"
    assert play(task, call("knock"), prompt=task.train[1])[1][0].observation == "who is there?"
    env = task.make_env(task.train[0])
    env.start_reset().result(10)
    assert "environment" not in env.environment.row
    with pytest.raises(ValueError, match="prompt 'p0': environment 'c' is none of 'a', 'b'"):
        with_tools(OneTurn({"environment": "c"}), environment_factory={"a": Counter, "b": Silent})


def test_a_reset_that_breaks_fails():
    class Broken(Silent):
        def reset(self, **row):
            raise OSError("no server")

    with pytest.raises(OSError, match="no server"):
        play(with_tools(OneTurn(), environment_factory=Broken))


def test_what_cannot_work_is_refused():
    def bare(x):
        return x

    class NoReset:
        def knock(self) -> str:
            """Knocks."""

    many = OneTurn()
    many.max_turns = 3
    text = OneTurn()
    text.train = [Prompt("t", 0, text="hi")]
    with pytest.raises(ValueError, match=r"tool bare: .*type hints and a Google-style docstring"):
        with_tools(OneTurn(), [bare])
    for tool, remedy in (
        (Silent.knock, r"tool knock: it is a method without its object; give the object's, e.g. shop.knock"),
        (vars(Looks)["look"], r"tool look: .*give a function, or a method of a class or an object: Shop.look"),
        (partial(add, a=1), r"functools.update_wrapper\(tool, tool.func\)"),
        ("add", r"tool 'add': .*give a function, or a method"),
    ):
        with pytest.raises(ValueError, match=remedy):
            with_tools(OneTurn(), [tool])
    with pytest.raises(ValueError, match=r"NoReset must have a method reset"):
        with_tools(OneTurn(), environment_factory=NoReset)
    with pytest.raises(ValueError, match="several tools are called add"):
        with_tools(OneTurn(), [add, add])
    with pytest.raises(ValueError, match="get_reward of the environment would replace the reward functions"):
        with_tools(OneTurn(reward_funcs=[len]), environment_factory=Counter)
    with pytest.raises(ValueError, match="no tools"):
        with_tools(OneTurn())
    with pytest.raises(ValueError, match="task toy has an environment of its own"):
        with_tools(many, [add])
    with pytest.raises(ValueError, match="prompt 't' is plain text"):
        with_tools(text, [add])


def test_fingerprint_follows_the_tools():
    base = with_tools(OneTurn(), [add]).fingerprint()
    assert base == with_tools(OneTurn(), [add], timeout_s=1.0).fingerprint()
    others = (with_tools(OneTurn(), [slow_add]), with_tools(OneTurn(), [add], max_tool_calling_iterations=2))
    assert base not in {task.fingerprint() for task in others}


def test_reward_functions_that_no_environment_would_ask_are_refused():
    """They are accepted where one of several environments has no reward of its own."""
    only = with_tools(OneTurn(), environment_factory=Counter)
    mixed = with_tools(OneTurn({"environment": "b"}), environment_factory={"a": Counter, "b": Silent})
    assert only.rewards_itself
    assert not mixed.rewards_itself
    assert not with_tools(OneTurn(), [add]).rewards_itself
    rewarder = Rewarder([right])
    with pytest.raises(ConfigError, match=r"reward_funcs: \S+ would never be asked: the environment"):
        check_rewards(only, only.train[0], rewarder)
    check_rewards(mixed, mixed.train[0], rewarder)
    rewarder.close()


def test_environments_that_give_no_reward_need_reward_functions():
    """Else every rollout has reward 0."""
    mixed = with_tools(OneTurn({"environment": "a"}), environment_factory={"a": Counter, "b": Silent})
    for task in (mixed, with_tools(OneTurn(), [add]), with_tools(OneTurn(), environment_factory=Silent)):
        with pytest.raises(ConfigError, match="reward_funcs: missing"):
            check_rewards(task, task.train[0], Rewarder([]))
    only = with_tools(OneTurn({"start": 1}), environment_factory=Counter)
    check_rewards(only, only.train[0], Rewarder([]))
    assert PythonTool.needs_reward_funcs


def right(completions, **columns):
    return [1.0] * len(completions)
