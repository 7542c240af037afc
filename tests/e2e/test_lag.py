"""Runs whose sampler is behind the learner, in one process."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.base.noise import noise_key
from winnow.collect import Collector
from winnow.learner.step import OptimizerStep
from winnow.rollout.evaluate import evaluate
from winnow.sampler.in_process import LAG_STREAM, WEIGHTS_FOLDER, InProcessSampler

from ..builders.runs import assert_clean, fingerprint, lags, metrics_of, resume_after_each, train
from ..parity import parity_reward

STEPS = 6


def versions(run: Path) -> list[tuple[int, int, int]]:
    """(version trained from, first and last version of the tokens) of every optimizer step; all its rollouts agree."""
    with sqlite3.connect(run / "ledger.sqlite") as db:
        query = (
            "SELECT version, MIN(first_version), MAX(last_version) FROM rollouts JOIN steps USING (step)"
            " GROUP BY step ORDER BY step"
        )
        return list(db.execute(query))


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("lag", [1, 3])
def test_the_sampler_is_exactly_max_lag_steps_behind(tiny_config: dict[str, Any], lag: int) -> None:
    train(tiny_config | {"max_lag": lag, "max_steps": STEPS})
    run = Path(tiny_config["output_dir"])
    assert versions(run) == [(s, max(0, s - lag), max(0, s - lag)) for s in range(STEPS)]
    assert_clean(run)


MIXED = {"max_lag": 3, "max_steps": STEPS, "sync": {"name": "in_process", "lag": "mixed"}}


def test_a_mixed_lag_is_drawn_for_each_group(tiny_config: dict[str, Any]) -> None:
    """Every age of 0 to 3 steps is in one batch or another, and most batches have several."""
    train(tiny_config | MIXED)
    run = Path(tiny_config["output_dir"])
    with sqlite3.connect(run / "ledger.sqlite") as db:
        query = "SELECT step, visit, MIN(first_version), MAX(last_version) FROM rollouts GROUP BY visit ORDER BY visit"
        groups = list(db.execute(query))
    drawn = [step - noise_key(0, LAG_STREAM, visit) % (min(3, step) + 1) for step, visit, *_ in groups]
    assert [(first, last) for *_, first, last in groups] == [(version, version) for version in drawn]
    ages: dict[int, set[int]] = {}
    for (step, *_), version in zip(groups, drawn, strict=True):
        ages.setdefault(step, set()).add(step - version)
    assert set().union(*ages.values()) == {0, 1, 2, 3}
    assert sum(len(found) > 1 for found in ages.values()) >= STEPS - 2
    assert_clean(run)


def test_evaluations_are_of_the_newest_weights(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    tiny_config |= {"learning_rate": 3e-3, "eval_prompts": 8, "eval_generations": 8}
    train(tiny_config | {"max_lag": 3})
    run = Path(tiny_config["output_dir"])
    lines = metrics_of(run)
    config = tiny_config | {"model": str(run / "model"), "output_dir": str(tmp_path / "again")}
    last = Trainer(config=config, reward_funcs=parity_reward)
    prompts = last.task.test[: tiny_config["eval_prompts"]]
    last.sampler.publish(last.learner.weights(), [], 0)
    again = evaluate(last.sampler.run, prompts, n=tiny_config["eval_generations"])
    found = {k: v for k, v in lines[-1].items() if k.startswith("eval/pass")}
    assert found == {f"eval/{k}": v for k, v in again.metrics.items() if k.startswith("pass")}
    assert 0 < found["eval/pass@1"] < 1, "otherwise this proves nothing"


def test_a_lag_changes_nothing_before_it_can(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for lag in (0, 1):
        config = tiny_config | {"max_lag": lag, "max_steps": 1, "output_dir": str(tmp_path / str(lag))}
        Trainer(config=config, reward_funcs=parity_reward).train()
        runs.append(fingerprint(tmp_path / str(lag)))
        runs[-1]["weights"] = {k: v for k, v in runs[-1]["weights"].items() if WEIGHTS_FOLDER not in k}
    assert runs[0]["weights"] == runs[1]["weights"]
    assert runs[0]["ledger"] == runs[1]["ledger"]


OVERLAP = {"max_lag": 1, "max_steps": STEPS, "sync": {"name": "in_process", "overlap": True}}


def test_an_overlapped_run_samples_while_it_updates(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every update but the last waits here until a group of the next batch has been polled."""
    polled, seen = threading.Event(), []
    update, poll = OptimizerStep.__call__, InProcessSampler.poll

    def waiting(self: OptimizerStep, groups: Any, step: int) -> Any:
        polled.clear()
        seen.append(step == STEPS - 1 or polled.wait(60))
        return update(self, groups, step)

    def telling(self: InProcessSampler) -> Any:
        groups = poll(self)
        if groups:
            polled.set()
        return groups

    monkeypatch.setattr(OptimizerStep, "__call__", waiting)
    monkeypatch.setattr(InProcessSampler, "poll", telling)
    train(tiny_config | OVERLAP)
    run = Path(tiny_config["output_dir"])
    assert seen == [True] * STEPS
    assert versions(run) == [(s, max(0, s - 1), max(0, s - 1)) for s in range(STEPS)]
    assert_clean(run)
    row = metrics_of(run)[-1]
    assert row["seconds_overlapped/update/forward_backward"] > 0
    assert not [name for name in row if name.startswith("seconds/update/")]


@pytest.mark.slow
def test_what_an_overlapped_run_computes_does_not_depend_on_who_is_faster(
    tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for slow in ((OptimizerStep, "__call__"), (InProcessSampler, "poll")):
        with monkeypatch.context() as patch:
            method = getattr(*slow)

            def late(*args: Any, method: Any = method) -> Any:
                time.sleep(0.05)
                return method(*args)

            patch.setattr(*slow, late)
            run = tmp_path / slow[1]
            train(tiny_config | OVERLAP | {"output_dir": str(run)})
            found.append(fingerprint(run))
    assert found[0] == found[1]


def test_a_failed_update_ends_an_overlapped_run(tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: OptimizerStep, groups: Any, step: int) -> Any:
        raise FloatingPointError("the loss is not finite")

    monkeypatch.setattr(OptimizerStep, "__call__", failing)
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        train(tiny_config | OVERLAP)


CONTINUOUS = {"max_lag": 2, "max_steps": STEPS, "filter": "zero_variance", "max_completion_length": 24, "save_steps": 3}
CONTINUOUS |= {"sync": {"name": "in_process", "lag": "continuous"}, "eval_steps": None}
CONTINUOUS |= {"engine": {"name": "local", "slots": 10}}
AT_ONCE = CONTINUOUS | {"sync": CONTINUOUS["sync"] | {"overlap": True}}  # type: ignore[operator]


@pytest.mark.parametrize("options", [CONTINUOUS, AT_ONCE], ids=["in turn", "overlapped"])
def test_rollouts_go_on_across_updates(tiny_config: dict[str, Any], tmp_path: Path, options: dict[str, Any]) -> None:
    """With the new weights, within the lag bound; the run repeats, and resumes bit for bit where a save was due."""
    whole = tmp_path / "whole"
    train(tiny_config | options | {"output_dir": str(whole)})
    assert_clean(whole)
    assert 0 < max(lags(whole)) <= 2
    with sqlite3.connect(whole / "ledger.sqlite") as db:
        spanning = db.execute("SELECT COUNT(*) FROM rollouts WHERE first_version < last_version").fetchone()[0]
    assert spanning > 0
    part = resume_after_each(tiny_config | options | {"output_dir": str(tmp_path / "part")}, [3])
    assert fingerprint(part) == fingerprint(whole)
    assert_clean(part)


@pytest.mark.parametrize("options", [CONTINUOUS, AT_ONCE], ids=["in turn", "overlapped"])
def test_what_is_in_flight_when_a_run_stops_is_launched_again(
    tiny_config: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []
    save = InProcessSampler.save

    def noting(self: InProcessSampler, directory: Path) -> None:
        running.append(self.runner.pending)
        save(self, directory)

    monkeypatch.setattr(InProcessSampler, "save", noting)
    run = resume_after_each(tiny_config | options | {"save_steps": 100}, [2])
    assert running[0] > 0
    assert max(lags(run)) <= 2
    assert_clean(run)


def test_what_an_evaluation_finds_in_flight_ends_first(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is due finds nothing; an audit of reused groups, or a callback's, finds some, and none is lost."""
    found: dict[str, list[int]] = {}
    run_jobs = InProcessSampler.run

    def noting(self: InProcessSampler, jobs: Any) -> Any:
        found.setdefault(jobs[0].purpose, []).append(self.runner.pending)
        return run_jobs(self, jobs)

    monkeypatch.setattr(InProcessSampler, "run", noting)
    reuse = {"reuse": {"updates": 2, "audit": 0.5}, "correction": "truncate"}
    train(tiny_config | CONTINUOUS | reuse | {"eval_steps": 2})
    run = Path(tiny_config["output_dir"])
    assert sum(found["eval"]) == 0
    assert sum(found["profile"]) > 0
    assert [row["step"] for row in metrics_of(run) if "eval/pass@1" in row] == [0, 2, 4, 6]
    assert max(lags(run)) <= 2
    assert_clean(run)


def test_an_engine_that_fails_in_an_evaluation_says_why(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that it cannot cancel what was in flight."""
    trainer = Trainer(config=tiny_config | CONTINUOUS, reward_funcs=parity_reward)
    trainer.step()  # the comparison after it ends what is in flight
    trainer.step()
    assert trainer.sampler.runner.pending > 0  # type: ignore[attr-defined]

    def failing() -> Any:
        raise ArithmeticError("the engine has failed")

    monkeypatch.setattr(trainer.engine, "_step", failing)
    with pytest.raises(ArithmeticError, match="the engine has failed"):
        trainer.evaluate()


@pytest.mark.parametrize(("options", "due"), [(CONTINUOUS, [3, 6]), ({"max_lag": 1, "save_steps": 3}, [])])
def test_only_continuous_rollouts_end_where_a_checkpoint_is_due(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], due: list[int]
) -> None:
    """Samplers that go on by themselves would wait for all of theirs at every save."""
    landed, collect = [], Collector.collect

    def noting(self: Collector, step: int, *, land: bool = False) -> Any:
        landed.extend([step + 1] * land)
        return collect(self, step, land=land)

    monkeypatch.setattr(Collector, "collect", noting)
    train(tiny_config | options | {"max_steps": STEPS, "eval_steps": None})
    assert landed == due
