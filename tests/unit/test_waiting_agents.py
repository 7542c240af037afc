"""Agents, tools and rewards that share something scarce: each gets its turn, and results are those of a run alone."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from winnow.engine import SamplingParams
from winnow.env.base import StepResult
from winnow.env.rewards.rewarder import Rewarder
from winnow.env.tools import with_tools
from winnow.env.workers import calls
from winnow.rollout import answers, gate_rules
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.tasks.agents import event_loop, with_agent
from winnow.types import EnvStep, Fate, Job, Verdict, Visit

from ..builders.asking import ask, user
from ..builders.tool_calls import call
from ..builders.tool_rollouts import Scripted, roll, tokenizer  # noqa: F401
from ..builders.tools import OneTurn
from ..gates import Fake, named

SCRIPT = [[f"{i}", "yes" if i % 2 else "no"] for i in range(6)]
REWARDS = [0.0, 1.0] * 3
TIMEOUT_S = 15


def two_turns(base_url, prompt):
    """Ask twice; the reward is what the second answer says."""
    first = ask(base_url, prompt)
    second = ask(base_url, [*prompt, first, user("Sure?")])
    return float(second["content"] == "yes")


def all_of(runner):
    groups = []
    while runner.pending:
        groups += runner.poll()
    return groups


def semaphore():
    places = threading.Semaphore(2)

    def agent(base_url, prompt):
        with places:
            return two_turns(base_url, prompt)

    return agent


def pool():
    browsers = queue.Queue()
    for browser in range(2):
        browsers.put(browser)

    def agent(base_url, prompt):
        first = ask(base_url, prompt)
        browser = browsers.get()
        try:
            return float(ask(base_url, [*prompt, first, user("Sure?")])["content"] == "yes")
        finally:
            browsers.put(browser)

    return agent


def executor():
    threads = ThreadPoolExecutor(2)
    return lambda base_url, prompt: threads.submit(two_turns, base_url, prompt).result()


def database(path):
    def agent(base_url, prompt):
        connection = sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None)
        connection.execute("BEGIN EXCLUSIVE")
        try:
            return two_turns(base_url, prompt)
        finally:
            connection.execute("COMMIT")
            connection.close()

    return agent


def async_semaphore():
    places = asyncio.Semaphore(2)

    async def agent(base_url, prompt):
        async with places:
            return await asyncio.to_thread(two_turns, base_url, prompt)

    return agent


def handed_on():
    """The first sibling goes last: each waits for the one after it."""
    ended = [threading.Event() for _ in range(7)]
    ended[6].set()

    def agent(base_url, prompt):
        first = ask(base_url, prompt)
        me = int(first["content"])
        assert ended[me + 1].wait(TIMEOUT_S)
        try:
            return float(ask(base_url, [*prompt, first, user("Sure?")])["content"] == "yes")
        finally:
            ended[me].set()

    return agent


SHARED = [semaphore, pool, executor, async_semaphore, handed_on]


@pytest.mark.cases(one_in=6)
@pytest.mark.parametrize("make", [*SHARED, database], ids=lambda make: make.__name__)
def test_agents_that_share_something_are_paid_as_without(tokenizer, make, tmp_path):
    agent = make(str(tmp_path / "shared.db")) if make is database else make()
    rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent, timeout_s=TIMEOUT_S), SCRIPT)
    assert [(r.fate, r.reward) for r in rollouts] == [(None, reward) for reward in REWARDS]
    alone, _ = roll(tokenizer, with_agent(OneTurn(), two_turns, timeout_s=TIMEOUT_S), SCRIPT)
    for rollout, other in zip(rollouts, alone, strict=True):
        assert rollout.token_ids.tolist() == other.token_ids.tolist()


def test_async_agents_that_block_get_a_loop_each(tokenizer):
    async def agent(base_url, prompt):
        return two_turns(base_url, prompt)

    with pytest.warns(UserWarning, match=r"blocks its event loop .*AsyncOpenAI"):
        rollouts, _ = roll(tokenizer, with_agent(OneTurn(), agent, timeout_s=TIMEOUT_S), SCRIPT)
    assert [r.reward for r in rollouts] == REWARDS


def test_async_agents_that_start_slowly_share_their_loop(monkeypatch):
    monkeypatch.setattr(event_loop, "BLOCKED_S", 0.3)
    places = asyncio.Semaphore(1)

    async def agent():
        time.sleep(0.06)  # as building a client takes
        async with places:
            await asyncio.sleep(0.01)
        return asyncio.get_running_loop()

    loop = event_loop.AgentLoop("agent")
    with ThreadPoolExecutor(12) as threads:
        running = [threads.submit(lambda: loop.run(agent(), Future(), 1.0)) for _ in range(12)]
        loops = [future.result() for future in running]
    assert len(set(loops)) == 1


def test_an_async_agent_that_hangs_ends_after_its_rollout(tokenizer):
    """Else each would keep a thread, a task and its conversation."""

    async def agent(base_url, prompt):
        await asyncio.Event().wait()

    before = set(threading.enumerate())
    (rollout,), _ = roll(tokenizer, with_agent(OneTurn(), agent, timeout_s=0.3), [["a"]])
    assert rollout.fate == Fate.FAILED
    deadline = time.monotonic() + 20
    while any(thread.name == "winnow-agent" for thread in set(threading.enumerate()) - before):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_environments_of_tools_share_a_pool(tokenizer, monkeypatch):
    monkeypatch.setattr(calls, "OVERLAP_S", 0.5)
    places = threading.Semaphore(2)

    class Environment:
        def reset(self, **row):
            assert places.acquire(timeout=TIMEOUT_S)

        def add(self, a: int, b: int) -> int:
            """
            Adds two numbers.

            Args:
                a: The first.
                b: The second.
            """
            return a + b

        def get_reward(self):
            places.release()
            return 1.0

    script = [["yes"] for _ in range(12)]
    task = with_tools(OneTurn(), environment_factory=Environment, timeout_s=TIMEOUT_S)
    rollouts, _ = roll(tokenizer, task, script)
    assert [(r.reason, r.reward) for r in rollouts] == [("", 1.0)] * 12


def test_objects_of_a_thread_are_no_mistake_of_the_policy(tokenizer):
    connections = queue.Queue()
    done = threading.Event()

    def open_and_stay():  # else a later thread may have its number, and with that its connection
        connections.put(sqlite3.connect(":memory:"))
        done.wait(TIMEOUT_S)

    threading.Thread(target=open_and_stay, daemon=True).start()
    connection = connections.get()

    def count() -> int:
        """Counts."""
        return connection.execute("SELECT 1").fetchone()[0]

    (rollout,), _ = roll(tokenizer, with_tools(OneTurn(), [count]), [[call("count"), "1"]], [lambda completions: [1.0]])
    done.set()
    assert rollout.reward is None
    assert "check_same_thread=False" in rollout.reason


def test_a_tool_that_waits_does_not_hold_up_the_others(tokenizer, monkeypatch):
    monkeypatch.setattr(calls, "OVERLAP_S", 0.5)
    ready = threading.Event()

    def sum_later(a: int, b: int) -> int:
        """
        Adds two numbers once somebody has asked for a difference.

        Args:
            a: The first.
            b: The second.
        """
        assert ready.wait(TIMEOUT_S)
        return a + b

    def difference(a: int, b: int) -> int:
        """
        Subtracts.

        Args:
            a: The first.
            b: The second.
        """
        ready.set()
        return a - b

    script = [[call("sum_later", a=1, b=2), "3"], [call("difference", a=1, b=2), "-1"]]
    rollouts, seen = roll(tokenizer, with_tools(OneTurn(), [sum_later, difference], timeout_s=TIMEOUT_S), script)
    assert all(r.fate is None for r in rollouts)
    assert any("<s>tool sum_later\n3<e>" in text for text in seen)


def test_a_reward_that_waits_for_an_agent_holds_up_nothing(tokenizer):
    """A judge and the agents share the places at an API; the agents of the second group hold them."""
    place = threading.Lock()

    def agent(base_url, prompt, number):
        if number == 0:
            ask(base_url, prompt)
            return None
        with place:
            two_turns(base_url, prompt)
        return None

    def judge(completions, **_):
        with place:
            return [1.0] * len(completions)

    task = with_agent(OneTurn({"number": 0}, {"number": 1}, reward_funcs=[judge]), agent, timeout_s=TIMEOUT_S)
    engine = Scripted(tokenizer, [["yes", "no", "maybe", "well"], ["yes", "no"]])
    rewarder = Rewarder([judge], timeout_s=TIMEOUT_S)
    options = {"train": RolloutOptions(SamplingParams(400), 4_000, 0)}
    runner = RolloutRunner(engine, task, tokenizer, rewarder, options)
    for number, prompt in enumerate(task.train):
        runner.launch(Job(Visit(number, 0, prompt), 1))
    groups = all_of(runner)
    rewarder.close()
    assert [g.visit.number for g in groups] == [0, 1]
    assert [r.reward for g in groups for r in g.rollouts] == [1.0, 1.0]


def test_siblings_at_a_gate_do_not_wait_for_one_that_waits_for_them(tokenizer, monkeypatch):
    for module in (answers, gate_rules):
        monkeypatch.setattr(module, "STUCK_S", 0.3)

    class Cut(Fake):
        at = EnvStep(1)

        def decide(self, view):
            return Verdict(False, "decided about siblings that have not all come")

    task = with_agent(OneTurn(), semaphore(), timeout_s=TIMEOUT_S)
    engine, rewarder = Scripted(tokenizer, [list(turns) for turns in SCRIPT]), Rewarder([])
    options = {"train": RolloutOptions(SamplingParams(400), 4_000, 0)}
    runner = RolloutRunner(engine, task, tokenizer, rewarder, options, named([Cut()]))
    runner.launch(Job(Visit(0, 0, task.train[0]), len(SCRIPT)))
    with pytest.warns(UserWarning, match=r"for 0.3 s no sibling came to environment step 1"):
        (group,) = all_of(runner)
    assert group.decisions == []
    assert [(r.fate, r.reward) for r in group.rollouts] == [(None, reward) for reward in REWARDS]


class Waiting:
    """An environment in other threads: the first rollout waits for the last one's step."""

    independent = False
    ended = threading.Event()

    def __init__(self, number, threads):
        self.number, self.threads = number, threads

    def start_reset(self):
        return self.threads.submit(lambda: None)

    def start_step(self, text):
        return self.threads.submit(self.step)

    def step(self):
        if self.number:
            time.sleep(0.1)
            self.ended.set()
        elif not self.ended.wait(TIMEOUT_S):
            raise TimeoutError("nobody came")
        return StepResult(None, reward=float(self.number), done=True)


def test_overlapping_environments_of_the_users_own(tokenizer):
    with ThreadPoolExecutor(4) as threads:
        made = []

        class Task(OneTurn):
            def make_env(self, prompt):
                made.append(Waiting(len(made), threads))
                return made[-1]

        rollouts, _ = roll(tokenizer, Task(), [["a"], ["b"]])
    assert [r.reward for r in rollouts] == [0.0, 1.0]


def test_noise_is_keyed_by_the_request_not_by_its_arrival(tokenizer):
    one, other = request_keys(tokenizer, [0, 1, 2]), request_keys(tokenizer, [2, 0, 1])
    assert one == other
    assert len({key for keys in one.values() for key in keys}) == 3, "an equal request again has noise of its own"


def request_keys(tokenizer, parts):
    """Return the noise keys of an agent's requests by their prompts."""

    def agent(base_url, prompt):
        for part in parts:
            ask(base_url, [user(f"Part {part}")])
        return 1.0

    keys = {}

    class Noting(Scripted):
        def submit(self, requests):
            super().submit(requests)
            for request in requests:
                keys.setdefault(self.tokenizer.decode(request.prompt_ids), []).append(request.key)

    task = with_agent(OneTurn(), agent, timeout_s=TIMEOUT_S)
    options = {"train": RolloutOptions(SamplingParams(400), 4_000, 0)}
    runner = RolloutRunner(Noting(tokenizer, [["a", "b", "c"]]), task, tokenizer, Rewarder([]), options)
    runner.launch(Job(Visit(0, 0, task.train[0]), 1))
    all_of(runner)
    return keys
