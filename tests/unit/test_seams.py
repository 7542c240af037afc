"""What two features that are each right do together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from winnow import ConfigError, Trainer
from winnow.config import ReuseConfig, validate
from winnow.methods.group_kind import GroupJudge
from winnow.methods.success import Success
from winnow.record.stop_conditions import RunStoppedError, TaskSolvedError
from winnow.record.watchdogs import GAP, Watchdogs
from winnow.reuse import Reuse, Used
from winnow.run.build_methods import build_collector, build_success
from winnow.sampler import SamplersLostError
from winnow.types import Group, Job

from ..builders.groups import make_group
from .fake_run import FakeRun


def config(**values: Any) -> Any:
    return validate({"model": "m", "env": "countdown"} | values)


def test_the_dropout_of_adapters_is_no_engine_with_old_weights() -> None:
    rows = [{"step": step, GAP: gap} for step, gap in enumerate((1e-6, 1e-2, 1e-2))]
    for dropout, warned in ((0.0, True), (0.1, False)):
        dogs = Watchdogs(config(lora={"dropout": dropout}))
        assert any("does not sample" in message for row in rows for message in dogs.observe(row)) == warned


def test_the_dropout_of_adapters_clips_nothing_on_policy(tiny_config: dict[str, Any]) -> None:
    """The ratio is to the pass that is trained, however the batch is cut."""
    values = tiny_config | {
        "lora": {"r": 2, "dropout": 0.5},
        "correction": "m2po",
        "learning_rate": 0.3,
        "tokens_per_microbatch": 20,
        "max_steps": 3,
        "filter": "keep_all",
    }
    trainer = Trainer(config=values, reward_funcs=lambda completions, **_: [len(c) % 3 for c in completions])
    trainer.train()
    rows = [row for row in trainer.state.log_history if "clip_ratio/region_mean" in row]
    assert len(rows) == 3
    assert [row["clip_ratio/region_mean"] for row in rows] == [0.0] * 3
    with pytest.raises(ConfigError, match="step_scale: ess would take the noise of dropout"):
        Trainer(config=values | {"step_scale": "ess", "output_dir": f"{values['output_dir']}-other"})


def test_a_punishment_that_nothing_met_is_no_constant_reward() -> None:
    for mean, warned in ((0.0, False), (-1.0, True)):
        dogs = Watchdogs(config(soft_overlong_cache=8))
        row = {"rewards/soft_overlong/mean": mean, "rewards/soft_overlong/std": 0.0}
        found = [message for step in range(3) for message in dogs.observe(row | {"step": step})]
        assert bool(found) == warned


@pytest.mark.parametrize(
    ("functions", "weights", "decides"),
    [(["one"], None, "one"), (["one"], [1.0], "one"), (["one"], [2.0], None), (["one", "two"], None, None)],
)
def test_a_punishment_makes_no_answer_wrong(functions: list[str], weights: Any, decides: str | None) -> None:
    c = config(success={"at_least": 0.9}, soft_overlong_cache=8)
    names = {name: name for name in [*functions, "soft_overlong"]}
    assert build_success(c, SimpleNamespace(), names, weights).function == decides  # type: ignore[arg-type]


def test_an_asynchronous_run_whose_task_is_solved_ends_so(tmp_path: Path) -> None:
    """Its groups finish in bursts, so a step may train groups of an earlier one, and finish none."""
    values = {"prompts_per_step": 2, "num_generations": 2, "max_lag": 1, "max_skipped_steps": 3, "filter": "keep_all"}
    run = FakeRun(tmp_path / "l.sqlite", lambda visit, size: [1.0, 1.0], values)
    prompts = {"train": run.prompts}
    collector = build_collector(run.config, run.methods, run.sampler, run.ledger, prompts, asynchronous=True)
    finished = []
    for step in range(9):
        batch = collector.collect(step)
        finished.append(len(batch.finished))
        collector.trained(step, batch, {"updated": 0.0})
        collector.end_step(step, batch.trained_on, {})
        run.sampler.version = step + 1
        if collector.stop is not None:
            break
    assert 0 in finished
    assert isinstance(collector.stop, TaskSolvedError)


def test_tokens_of_a_step_that_lost_its_samplers_are_counted(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "l.sqlite", lambda visit, size: [0.0, 1.0], {"prompts_per_step": 4, "num_generations": 2})
    poll = run.sampler.poll

    def half_then_lost() -> list[Group]:
        if run.sampler.rounds:
            raise SamplersLostError("none is left")
        groups = poll()
        run.sampler._started += [Job(group.visit, 2) for group in groups[2:]]
        return groups[:2]

    run.sampler.poll = half_then_lost  # type: ignore[method-assign]
    with pytest.raises(RunStoppedError, match="none is left"):
        run.loop.run()
    waiting = run.collector.buffer.groups
    tokens = sum(int(r.action_mask.sum()) for group in waiting for r in group.rollouts)
    assert len(waiting) == 2
    assert run.collector.totals.num_tokens == tokens > 0


def test_a_run_that_must_end_trains_no_batch_that_waits(tmp_path: Path) -> None:
    """With overlap one has been collected, from an engine that was found to be wrong."""
    values = {"prompts_per_step": 2, "num_generations": 2, "max_lag": 1}
    run = FakeRun(tmp_path / "l.sqlite", lambda visit, size: [0.0, 1.0], values)
    run.loop.overlap = True

    def refused(step: int) -> None:
        raise ConfigError("engine and learner differ")

    run.loop.hooks.published = refused
    with pytest.raises(RunStoppedError, match="engine and learner differ"):
        run.loop.run()
    assert run.collector.buffer.groups
    assert run.loop.step == 1


def test_a_batch_that_is_collected_ahead_leaves_room_for_groups_that_are_used_again(tmp_path: Path) -> None:
    values = {"prompts_per_step": 4, "num_generations": 2, "max_lag": 1, "correction": "truncate", "max_steps": 6}
    run = FakeRun(tmp_path / "l.sqlite", lambda visit, size: [0.0, 1.0], values)
    reuse = Reuse(ReuseConfig(updates=4), 4, 0, run.methods.judge, _unchanged, lambda jobs: [])
    prompts = {"train": run.prompts}
    collector = build_collector(run.config, run.methods, run.sampler, run.ledger, prompts, reuse=reuse)
    run.collector = run.loop.collector = collector
    run.loop.overlap = True
    run.run()
    assert [row.get("rollouts/surplus", 0) for row in run.metrics] == [0] * 6
    assert [row["reuse/groups"] for row in run.metrics][-1] == 3


def test_a_step_that_taught_by_groups_used_again_was_not_skipped(tmp_path: Path) -> None:
    outcomes = [[0.0, 1.0]] * 4 + [[1.0, 1.0]] * 9
    values = {"prompts_per_step": 4, "num_generations": 2, "correction": "truncate", "filter": "keep_all"}
    run = FakeRun(tmp_path / "l.sqlite", lambda visit, size: outcomes[visit.number], values)
    reuse = Reuse(ReuseConfig(updates=4), 4, 0, run.methods.judge, _unchanged, lambda jobs: [])
    prompts = {"train": run.prompts}
    collector = build_collector(run.config, run.methods, run.sampler, run.ledger, prompts, reuse=reuse)
    for step in range(2):
        batch = collector.collect(step)
        collector.trained(step, batch, {"updated": 1.0})
        collector.end_step(step, batch.trained_on, {})
        run.sampler.version = step + 1
    assert batch.again
    assert collector._stop_conditions.skipped_steps == 0


def _unchanged(groups: Sequence[Group]) -> list[np.ndarray]:
    return [np.zeros(len(group.rollouts)) for group in groups]


def test_the_audit_of_reuse_has_no_bias_while_the_policy_stays() -> None:
    """Only groups with a signal are used again, so they are compared with such groups."""
    rng = np.random.default_rng(0)
    judge = GroupJudge(Success())

    def drawn(number: int, size: int) -> Group:
        return make_group(number, (rng.random(size) < 0.1).astype(float).tolist(), [1] * size)

    old = [group for number in range(6_000) if judge.teaches(group := drawn(number, 8))]
    options = ReuseConfig(updates=2, audit=1.0, min_ess=0.0)
    reuse = Reuse(
        options, 2 * len(old), 0, judge, _unchanged, lambda jobs: [drawn(i, j.size) for i, j in enumerate(jobs)]
    )
    reuse.groups = [Used(group, 1) for group in old]
    reuse.for_step(0)
    compared = reuse.metrics["reuse/audit/groups"]
    assert 1_500 < compared < len(old)
    assert abs(reuse.metrics["reuse/audit/bias"]) < 0.01  # 0.076 against all fresh groups
