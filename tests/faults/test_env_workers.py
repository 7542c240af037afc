"""Environments in worker processes that die, hang and raise: every episode is accounted for, none becomes a 0."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.engine import LocalEngine, SamplingParams
from winnow.env.base import ModelTurn, OverlappingEnv
from winnow.env.rewards.rewarder import Rewarder
from winnow.env.workers.remote import EnvLostError, EnvPool
from winnow.env.workers.worker import WorkerError
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.tasks.games.task import GameTask
from winnow.types import Fate, Group, Job, Prompt, Visit

TOY = f"{Path(__file__).with_name('toy_env.py')}:CountingEnv"


@pytest.fixture
def pool() -> Iterator[EnvPool]:
    pool = EnvPool(3, timeout_s=2.0)
    yield pool
    pool.close()


def pids(pool: EnvPool) -> list[int]:
    """Processes of the pool that have been started."""
    children = [w._child for home in pool._homes for w in home.workers._workers]
    return [child.process.pid for child in children if child is not None]


def answer(future: Any) -> Any:
    return future.result(timeout=60)


def test_an_episode_in_another_process(pool: EnvPool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = pool.make(TOY, {"turns": 2, "log": str(log)})
    assert isinstance(env, OverlappingEnv)
    assert answer(env.start_reset()) == " 7"
    first, last = answer(env.start_step("go")), answer(env.start_step("on"))
    assert (first.observation, first.reward, first.done, first.info, first.action) == (
        "8 9",
        None,
        False,
        {"progress": 0.1},  # of which a gate knows
        "GO",
    )
    assert (last.reward, last.done) == (1.0, True)
    env.close()
    env.close()
    deadline = time.monotonic() + 30
    while log.read_text() != "reset\nclose\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log.read_text() == "reset\nclose\n"


def test_an_answer_that_is_too_long_fails_its_rollout_alone(pool: EnvPool) -> None:
    pool._homes = pool._homes[:1]
    one, other = (pool.make(TOY, {"turns": 2}) for _ in range(2))
    answer(one.start_reset()), answer(other.start_reset())
    with pytest.raises(WorkerError, match=r"5,24\d,\d+ bytes as JSON, over 4,194,304"):
        answer(one.start_step("long"))
    assert answer(other.start_step("go")).observation == "8 9"


def test_a_new_process_warns_of_an_environment_that_was_edited(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(TOY.rpartition(":")[0]).read_text())
    pool = EnvPool(1, timeout_s=2.0)
    env = pool.make(f"{file}:CountingEnv", {"turns": 1})
    assert answer(env.start_reset()) == " 7"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(EnvLostError):
        answer(env.start_step("die"))
    with pytest.warns(UserWarning, match=rf"{file} has changed since the run began"):
        answer(pool.make(f"{file}:CountingEnv", {"turns": 1}).start_reset())
    pool.close()


def test_processes_end_with_the_pool_and_its_environments() -> None:
    pool = EnvPool(1)
    env = pool.make(TOY, {"turns": 2})
    del pool
    answer(env.start_reset())
    (process,) = pids(env._pool)
    del env
    gc.collect()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process}/status").exists() and "zombie" not in Path(f"/proc/{process}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_ended_a_turn_is_known_in_another_process(pool: EnvPool) -> None:
    env = pool.make(TOY.replace("CountingEnv", "HearingEnv"), {"turns": 1})
    answer(env.start_reset())
    said = ModelTurn("go</a>", "stop", "</a>", "<think>go</a>")
    assert answer(env.start_step(said)).observation == "stop </a> <think>go</a>"


def test_what_an_environment_raises_is_told_and_harms_nobody(pool: EnvPool) -> None:
    env, other = (pool.make(TOY, {"turns": 9}) for _ in range(2))
    for e in (env, other):
        answer(e.start_reset())
    with pytest.raises(WorkerError, match="ConnectionError: the simulator went away"):
        answer(env.start_step("raise"))
    assert answer(env.start_step("go")).info == {"progress": 0.1}
    assert answer(other.start_step("go")).info == {"progress": 0.1}


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize(("how", "words"), [("die", "exit status 3"), ("hang", "took over 2 s")])
def test_all_that_lived_in_a_lost_process_are_lost_and_told_why(how: str, words: str) -> None:
    pool = EnvPool(1, timeout_s=2.0)
    try:
        guilty, innocent = (pool.make(TOY, {"turns": 9}) for _ in range(2))
        for e in (guilty, innocent):
            answer(e.start_reset())
        with pytest.raises(EnvLostError, match=words):
            answer(guilty.start_step(how))
        with pytest.raises(EnvLostError, match=words):
            answer(innocent.start_step("go"))
        fresh = pool.make(TOY, {"turns": 9})
        assert answer(fresh.start_reset()) == " 7"
        assert answer(fresh.start_step("go")).info == {"progress": 0.1}
    finally:
        pool.close()


def test_an_environment_that_cannot_be_made_says_so(pool: EnvPool) -> None:
    with pytest.raises(WorkerError, match=r"has no 'CountEnv'\. Did you mean 'CountingEnv'"):
        answer(pool.make(TOY.replace("CountingEnv", "CountEnv"), {}).start_reset())


def test_a_step_of_another_type_is_named(pool: EnvPool) -> None:
    env = pool.make(TOY, {"turns": 2})
    answer(env.start_reset())
    with pytest.raises(WorkerError, match=r"step\(\) must return a StepResult, not tuple"):
        answer(env.start_step("tuple"))


@pytest.mark.parametrize("timeout_s", [0.0, float("inf"), float("nan")])
def test_a_deadline_that_cannot_be_kept_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"timeout_s in \(0, 1,000,000\]"):
        EnvPool(1, timeout_s=timeout_s)


class NoGames(GameTask):
    def _shown(self, card: Any) -> Any:
        raise NotImplementedError


def test_the_engine_waits_in_order_for_short_steps_alone(pool: EnvPool) -> None:
    """Those of games, whose runs repeat bit for bit. It goes on while others take longer than a second."""
    assert not pool.make(TOY, {"turns": 1}).independent
    config: Any = SimpleNamespace(name="toy", style="words", workers=1, timeout_s=2.0, max_turns=1, max_turn_length=1)
    assert NoGames(config, [], [])._pool.independent


class RemoteTask:
    """25 prompts whose environments live in `pool`."""

    name, stop, max_turns, reward_funcs, test = "toy", (), 4, (), ()

    def __init__(self, pool: EnvPool) -> None:
        self.pool = pool
        self.train = [Prompt(f"p{i}", i, text=f"numbers {i % 9} :") for i in range(25)]

    def make_env(self, prompt: Prompt) -> Any:
        return self.pool.make(TOY, {"turns": 3})

    def fingerprint(self) -> str:
        return "toy"


@pytest.mark.slow
def test_a_hundred_episodes_two_workers_killed_and_one_hung(tiny_model: Path) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    pool = EnvPool(4, timeout_s=2.0)
    task = RemoteTask(pool)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    engine, rewarder = LocalEngine(model, tokenizer, slots=32), Rewarder(())
    options = RolloutOptions(SamplingParams(60), 32, seed=0)
    runner = RolloutRunner(engine, task, tokenizer, rewarder, {"train": options})
    for number, prompt in enumerate(task.train):
        runner.launch(Job(Visit(number, 0, prompt), 4))
    groups: list[Group] = []
    blows = {6: (0, signal.SIGKILL), 12: (1, signal.SIGSTOP), 30: (2, signal.SIGKILL)}
    for step in range(5_000):
        if step in blows:
            which, blow = blows[step]
            (worker,) = pool._homes[which].workers._workers
            assert worker._child is not None
            os.kill(worker._child.process.pid, blow)
        groups += runner.poll()
        if not runner.pending:
            break
    rewarder.close()
    pool.close()
    rollouts = [r for g in groups for r in g.rollouts]
    assert [g.visit.number for g in groups] == list(range(25))
    assert [r.sibling for r in rollouts] == [0, 1, 2, 3] * 25, "none lost, none twice"
    failed = [r for r in rollouts if r.fate == Fate.FAILED]
    assert 0 < len(failed) < 100
    assert all(r.reward is None and "EnvLostError" in r.reason for r in failed)
    causes = "; ".join(sorted({r.reason for r in failed}))
    assert "2 s" in causes
    assert "died" in causes
    sound = [r for r in rollouts if r.fate is None]
    assert all(r.reward == 1.0 if r.stop_reason == "env" else r.reward == 0.0 for r in sound)
    assert {p.pid for p in psutil.Process().children(recursive=True)} == before
