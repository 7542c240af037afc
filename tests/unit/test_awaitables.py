"""What is awaitable is awaited, whoever returns it: tools, environments, agents, reward functions."""

from __future__ import annotations

import asyncio
import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from winnow.env.base import StepResult
from winnow.env.tools import ToolUnavailableError, with_tools
from winnow.env.workers.remote import EnvPool
from winnow.tasks.agents import with_agent

from ..builders.asking import ask
from ..builders.rewards import group, scored
from ..builders.tool_calls import call
from ..builders.tool_rollouts import roll
from ..builders.tools import OneTurn, add, make_tokenizer, play
from ..builders.toy_rollouts import ToyTask, policy, run  # noqa: F401

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


async def search(query: str) -> str:
    """
    Searches.

    Args:
        query: What to look for.
    """
    await asyncio.sleep(0)
    return f"found {query}"


def plain(function):
    """A decorator that knows nothing of coroutines."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def twice(function):
    """An async decorator that does not await."""

    @functools.wraps(function)
    async def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def as_task(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        async def on_loop():
            return await asyncio.create_task(function(*args, **kwargs))

        return on_loop()

    return wrapper


def in_thread(function):
    pool = ThreadPoolExecutor(1)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return pool.submit(asyncio.run, function(*args, **kwargs))

    return wrapper


def updated(partial):
    return functools.update_wrapper(partial, search)


TOOLS = {
    "async": search,
    "plain decorator": plain(search),
    "two": plain(plain(search)),
    "async decorator": twice(search),
    "task": as_task(search),
    "partial": updated(functools.partial(search)),
    "lambda": updated(lambda query: search(query)),
    "future": in_thread(search),
    "static": staticmethod(search),
}


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_tools(tool):
    _, (result,) = play(with_tools(OneTurn(), [tool]), call("search", query="cats") + call("search", query=3))
    assert [m["content"] for m in result.observation.messages] == ["found cats", "found 3"]


class Async:
    """An environment whose methods are all async, some behind a plain decorator."""

    closed = 0

    @plain
    async def reset(self, **row):
        await asyncio.sleep(0)
        self.n, self.loop = 0, asyncio.get_running_loop()
        return " Begin."

    @plain
    async def get_reward(self) -> float:
        return float(self.n)

    @plain
    async def count(self) -> int:
        """Counts."""
        assert asyncio.get_running_loop() is self.loop
        self.n += 1
        return self.n

    @classmethod
    @plain
    async def look(cls) -> str:
        """Looks."""
        return cls.__name__

    @staticmethod
    @plain
    async def wait() -> str:
        """Waits."""
        return "waited"

    @property
    def broken(self):
        raise AssertionError("nobody asks for properties")


async def make():
    await asyncio.sleep(0)
    return Async()


@pytest.mark.parametrize("factory", [Async, make, lambda: make()])
def test_environments_of_tools(factory):
    task = with_tools(OneTurn(), environment_factory=factory)
    assert {tool["function"]["name"] for tool in task.train[0].tools} == {"count", "look", "wait"}
    first, (result, last) = play(task, call("count") + call("look") + call("wait") + call("count"), "Done.")
    assert first == " Begin."
    assert [m["content"] for m in result.observation.messages] == ["1", "Async", "waited", "2"]
    assert (result.reward, last.reward) == (2.0, 2.0)


def test_class_methods_as_tools():
    task = with_tools(OneTurn(), [Async.look, Async.wait])
    assert play(task, call("look") + call("wait"))[1][0].observation == "Async\nwaited"


def generator() -> str:
    """Yields."""
    yield "a"


async def async_generator() -> str:
    """Yields."""
    yield "a"


@pytest.mark.parametrize("tool", [generator, async_generator, plain(async_generator)])
def test_a_tool_that_yields_is_no_text(tool):
    with pytest.raises(ToolUnavailableError, match="must return the whole"):
        play(with_tools(OneTurn(), [tool]), call(tool.__name__))


class Echo:
    """A plain environment with async methods."""

    events: list[str]

    def __init__(self, events, fail=""):
        self.events, self.fail = events, fail

    async def reset(self):
        self.loop = asyncio.get_running_loop()
        return " 7"

    async def step(self, text):
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0.05)
        if self.fail == "step":
            raise ConnectionError("it went away")
        return StepResult(None, 2.0, done=True)

    async def close(self):
        assert asyncio.get_running_loop() is self.loop
        self.events.append("closed")
        if self.fail == "close":
            raise ConnectionError("it went away")


class PlainEcho(Echo):
    reset, step, close = plain(Echo.reset), plain(Echo.step), plain(Echo.close)


def task_of(make):
    task = ToyTask(make)
    task.max_turn_length = 3  # type: ignore[attr-defined]
    return task


class StepOnly(Echo):
    def reset(self):
        return " 7"

    async def step(self, text):
        return StepResult(None, 2.0, done=True)

    def close(self):
        self.events.append("closed")


@pytest.mark.parametrize("kind", [Echo, PlainEcho, StepOnly])
def test_plain_environments(policy, kind):
    events: list[str] = []
    groups = run(policy, task_of(lambda made: kind(events)))
    assert [r.reward for g in groups for r in g.rollouts] == [2.0] * 12
    assert events == ["closed"] * 12


def test_plain_environments_overlap(policy):
    """A step ends when another has begun."""
    begun: list[object] = []

    class Overlapping(Echo):
        async def step(self, text):
            begun.append(self)
            async with asyncio.timeout(60):
                while len(begun) < 2:
                    await asyncio.sleep(0.01)
            return await super().step(text)

    groups = run(policy, task_of(lambda made: Overlapping([])))
    assert [r.reward for g in groups for r in g.rollouts] == [2.0] * 12


def test_an_async_environment_that_fails(policy):
    groups = run(policy, task_of(lambda made: Echo([], "step" if made == 1 else "")))
    failed = [r for g in groups for r in g.rollouts if r.fate == "failed"]
    assert [r.sibling for r in failed] == [1]
    assert "ConnectionError: it went away" in failed[0].reason
    with pytest.warns(UserWarning, match="closing Echo raised ConnectionError: it went away"):
        run(policy, task_of(lambda made: Echo([], "close" if made == 1 else "")))


WORKER = """
import asyncio
from winnow.env.base import StepResult

class Env:
    async def reset(self):
        return "begin"
    async def step(self, text):
        await asyncio.sleep(0)
        return StepResult(text * 2, 1.0, done=True)
    async def close(self):
        open(self.path, "w").write("closed")

async def make(path):
    env = Env()
    env.path = path
    return env
"""


def test_environments_in_workers(tmp_path: Path):
    (tmp_path / "own_env.py").write_text(WORKER)
    pool = EnvPool(1, 30.0)
    try:
        env = pool.make(f"{tmp_path}/own_env.py:make", {"path": str(tmp_path / "end")})
        assert env.start_reset().result(60) == "begin"
        assert env.start_step("a").result(10) == StepResult("aa", 1.0, done=True)
        env.close()
        pool.make(f"{tmp_path}/own_env.py:make", {"path": ""}).start_reset().result(60)
        assert (tmp_path / "end").read_text() == "closed"
    finally:
        pool.close()


async def agent(base_url, prompt):
    answer = await asyncio.to_thread(ask, base_url, prompt)
    return float(answer["content"] == "yes")


class Agent:
    async def __call__(self, base_url, prompt):
        return await agent(base_url, prompt)


@pytest.mark.parametrize(
    "each", [agent, plain(agent), twice(agent), functools.partial(agent), Agent(), Agent().__call__]
)
def test_agents(tokenizer, each):
    rollouts, _ = roll(tokenizer, with_agent(OneTurn(), each), [["yes"], ["no"]])
    assert [r.reward for r in rollouts] == [1.0, 0.0]


async def length(completions, scale=1.0, **columns):
    await asyncio.sleep(0)
    return [scale * len(text) for text in completions]


class Judge:
    async def __call__(self, completions, **columns):
        return await length(completions)


class Judges:
    @classmethod
    async def of_class(cls, completions, **columns):
        return await length(completions)

    @staticmethod
    async def static(completions, **columns):
        return await length(completions)


REWARDS = {
    "async": length,
    "plain decorator": plain(length),
    "async decorator": twice(length),
    "task": as_task(length),
    "partial": functools.partial(length, scale=1.0),
    "partial of plain": functools.partial(plain(length), scale=1.0),
    "lambda": lambda completions, **columns: length(completions),
    "object": Judge(),
    "bound": Judge().__call__,
    "class": Judges.of_class,
    "static": Judges.static,
}


@pytest.mark.parametrize("function", REWARDS.values(), ids=REWARDS)
def test_reward_functions(function):
    g = group("a", "bb")
    scored(function, g)
    assert g.rewards().tolist() == [1.0, 2.0], g.rollouts[0].reason


async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth)}


@pytest.mark.parametrize("function", [compute_score, plain(compute_score), twice(compute_score)])
def test_verls_functions(function):
    g = group("a", "b", data_source="x", ground_truth="b")
    scored(function, g)
    assert g.rewards().tolist() == [0.0, 1.0]


def test_nothing_warns_of_plain_functions():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert play(with_tools(OneTurn(), [add]), call("add", a=1, b=2))[1][0].observation == "3"
