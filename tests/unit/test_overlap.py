"""Environments that work elsewhere: the engine goes on meanwhile, and nothing depends on how long they take."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.engine import LocalEngine, SamplingParams
from winnow.env.base import StepResult
from winnow.env.rewards.rewarder import Rewarder
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import OVERLAP, RolloutRunner
from winnow.types import EnvStep, Fate, Group, Job, Verdict, Visit

from ..builders.toy_rollouts import EchoEnv, ToyTask, policy, run  # noqa: F401
from ..gates import Fake


class Elsewhere:
    """An `EchoEnv` in another thread, with a pause before every answer."""

    def __init__(self, env: EchoEnv, pool: ThreadPoolExecutor, pause: Callable[[], float]) -> None:
        self.env, self.pool, self.pause = env, pool, pause

    def _later(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        def work() -> Any:
            time.sleep(self.pause())
            return call(*arguments)

        return self.pool.submit(work)

    def start_reset(self) -> Future[str | None]:
        return self._later(self.env.reset)

    def start_step(self, text: str) -> Future[StepResult]:
        return self._later(self.env.step, text)


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def same(a: list[Group], b: list[Group]) -> None:
    for x, y in zip(a, b, strict=True):
        for r, s in zip(x.rollouts, y.rollouts, strict=True):
            np.testing.assert_array_equal(r.token_ids, s.token_ids)
            np.testing.assert_array_equal(r.action_mask, s.action_mask)
            assert (r.reward, r.stop_reason, r.fate, len(r.turns)) == (s.reward, s.stop_reason, s.fate, len(s.turns))


def test_the_same_rollouts_as_with_an_environment_in_process(policy: Any, pool: ThreadPoolExecutor) -> None:
    elsewhere = ToyTask(make=lambda _: Elsewhere(EchoEnv(3), pool, lambda: 0.0))  # type: ignore[arg-type,return-value]
    same(run(policy, ToyTask(make=lambda _: EchoEnv(3)), max_tokens=200), run(policy, elsewhere, max_tokens=200))


def test_what_runs_together_does_not_depend_on_how_long_they_take(policy: Any, pool: ThreadPoolExecutor) -> None:
    draw = np.random.default_rng(0)

    def submissions(pause: Callable[[], float]) -> list[tuple[int, Any]]:
        task = ToyTask(make=lambda _: Elsewhere(EchoEnv(3), pool, pause))  # type: ignore[arg-type,return-value]
        engine = LocalEngine(*policy, slots=4)
        step, submit, steps, seen = engine.step, engine.submit, 0, []

        def counted() -> Any:
            nonlocal steps
            steps += 1
            return step()

        engine.step = counted  # type: ignore[method-assign]
        engine.submit = lambda r: (seen.extend((steps, q.id) for q in r), submit(r))[1]  # type: ignore[method-assign]
        runner = RolloutRunner(
            engine, task, policy[1], Rewarder(task.reward_funcs), {"train": RolloutOptions(SamplingParams(200), 32, 0)}
        )
        for number, prompt in enumerate(task.train[:3]):
            runner.launch(Job(Visit(number, 0, prompt), 4))
        while runner.pending:
            runner.poll()
        return seen

    quick = submissions(lambda: 0.0)
    assert len({at for at, _ in quick}) > OVERLAP, "turns start at many moments"
    assert submissions(lambda: float(draw.uniform(0, 0.02))) == quick


def test_one_that_breaks_fails_its_rollout_only(policy: Any, pool: ThreadPoolExecutor) -> None:
    def make(made: int) -> Any:
        return Elsewhere(EchoEnv(3, fail_at=2 if made == 1 else None), pool, lambda: 0.001)

    groups = run(policy, ToyTask(make=make), max_tokens=200)
    failed = [r for g in groups for r in g.rollouts if r.fate == Fate.FAILED]
    assert len(failed) == 1
    assert failed[0].reward is None
    said = r"the environment failed: ConnectionError: the simulator went away \(tests/builders/toy_rollouts\.py:\d+\)"
    assert re.fullmatch(said, failed[0].reason)


def test_one_that_cannot_be_reset_fails_its_rollout_only(policy: Any, pool: ThreadPoolExecutor) -> None:
    class Broken(EchoEnv):
        def reset(self) -> str | None:
            raise OSError("no such game")

    def make(made: int) -> Any:
        return Elsewhere(Broken(3) if made == 5 else EchoEnv(3), pool, lambda: 0.0)

    groups = run(policy, ToyTask(make=make), max_tokens=200)
    (reason,) = [r.reason for g in groups for r in g.rollouts if r.fate == Fate.FAILED]
    said = r"the environment failed: OSError: no such game \(tests/unit/test_overlap\.py:\d+\)"
    assert re.fullmatch(said, reason)


def test_one_that_exits_answers_at_once_or_has_no_reward_fails_its_rollout_only(
    policy: Any, pool: ThreadPoolExecutor
) -> None:
    class Exits(EchoEnv):
        def reset(self) -> str | None:
            raise SystemExit(3)

    class AtOnce(Elsewhere):
        def start_step(self, text: str) -> Any:
            return self.env.step(text)

    class Unrewarded(Elsewhere):
        def start_reward(self) -> Future[float]:
            raise ConnectionError("no judge")

    def make(made: int) -> Any:
        inner, kind = (Exits if made == 1 else EchoEnv)(9), {2: AtOnce, 3: Unrewarded}.get(made, Elsewhere)
        return kind(inner, pool, lambda: 0.0)

    groups = run(policy, ToyTask(make=make), max_tokens=8)
    reasons = [r.reason for g in groups for r in g.rollouts if r.fate == Fate.FAILED]
    assert len(reasons) == 3
    for words in ("SystemExit: 3", "start_reward of AtOnce must return a Future, not StepResult", "no judge"):
        assert sum(words in reason for reason in reasons) == 1, (words, reasons)


def test_a_gate_waits_for_all_answers_and_cuts_the_group_once(policy: Any, pool: ThreadPoolExecutor) -> None:
    class Cut(Fake):
        at, asked = EnvStep(2), 0

        def decide(self, view: Any) -> Verdict:
            Cut.asked += 1
            assert all(len(actions) == 2 for actions in view.actions)
            return Verdict(False, "enough")

    task = ToyTask(make=lambda _: Elsewhere(EchoEnv(4), pool, lambda: 0.002))  # type: ignore[arg-type,return-value]
    groups = run(policy, task, gates=[Cut()], max_tokens=200)
    cut = [g for g in groups if not g.verdict.keep]
    assert Cut.asked == len(cut) >= 1
    assert all(r.fate == Fate.CUT for g in cut for r in g.rollouts if len(r.turns) == 2)


@pytest.mark.slow
def test_a_run_of_many_turns_writes_what_a_gate_would_have_gone_by(
    policy: Any,
    tiny_config: dict[str, Any],
    pool: ThreadPoolExecutor,
) -> None:
    """And `winnow gate` reads it from the run directory; a resume neither loses nor repeats a row."""
    from winnow import Trainer
    from winnow.study.gate_tables import read_recorded

    def task() -> ToyTask:
        def make(made: int) -> Any:
            return Elsewhere(EchoEnv(2 + made % 3), pool, lambda: 0.0)

        return ToyTask(make=make, max_turns=6)

    options = {"max_completion_length": 120, "eval_steps": None, "max_prompt_length": 32}
    config = {k: v for k, v in tiny_config.items() if k != "env"} | options
    Trainer(env=task(), config=config | {"max_steps": 4}).train()
    run_dir = Path(config["output_dir"])
    recorded = read_recorded(run_dir)
    assert list(recorded) == [1, 2, 3, 4, 5]
    assert len(recorded[2]) == 4 * 4
    before = (run_dir / "gate.jsonl").read_bytes()
    Trainer.resume(run_dir, {"max_steps": 6}, env=task()).train()
    after = (run_dir / "gate.jsonl").read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == before.count(b"\n") * 6 // 4
