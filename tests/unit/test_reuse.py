"""Groups that are trained several times: how often, how old, until when, and after a resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.base.state import at
from winnow.config.options import ReuseConfig
from winnow.learner.base import Learner
from winnow.learner.off_policy import log_ratios
from winnow.record.ledger import Ledger
from winnow.reuse import Reuse, _ess
from winnow.run.build_methods import build_collector
from winnow.types import Fate, Group

from .. import parity
from ..builders.runs import assert_clean, fingerprint, metrics_of
from .fake_run import FakeRun

Metrics = list[dict[str, float]]


REWARD = f"{parity.__file__}:parity_reward"


@pytest.fixture
def train(tiny_config: dict[str, Any], tmp_path: Path) -> Callable[..., Metrics]:
    more = {"correction": "truncate", "filter": "zero_variance", "eval_steps": None, "max_steps": 8}

    def run(name: str = "run", **changes: Any) -> Metrics:
        folder = tmp_path / name
        values = tiny_config | more | changes | {"output_dir": str(folder)}
        Trainer(config=values | {"reward_funcs": [REWARD]}).train()
        assert_clean(folder)
        return metrics_of(folder)

    return run


def test_each_group_is_used_so_often_and_the_batch_keeps_its_size(train: Callable[..., Metrics]) -> None:
    """At a learning rate of 0 the policy stays what it was, so that no group leaves early."""
    rows = train(reuse={"updates": 4}, learning_rate=0.0)
    assert [row["groups/effective"] for row in rows] == [4.0] * 8
    assert [row["reuse/groups"] for row in rows] == [0.0] + [3.0] * 7
    shares = [value for row in rows for key, value in row.items() if key.startswith("reuse/ess/")]
    assert np.allclose(shares, 1.0, atol=1e-4)
    assert {key for row in rows for key in row if key.startswith("reuse/ess/")} == {
        *(f"reuse/ess/use_{n}" for n in (2, 3, 4)),
        *(f"reuse/ess/age_{band}" for band in ("1", "2", "3-4", "5-8")),
    }
    plain = train("plain")
    assert rows[-1]["num_tokens"] < 0.6 * plain[-1]["num_tokens"]


def test_who_the_policy_has_left_behind_leaves(train: Callable[..., Metrics]) -> None:
    rows = train(reuse={"updates": 4, "min_ess": 1.0}, learning_rate=1e-2)
    assert sum(row["reuse/left_by_ess"] for row in rows) >= 20
    assert all(row["reuse/groups"] <= 1 for row in rows)


def test_who_is_too_old_leaves(train: Callable[..., Metrics]) -> None:
    rows = train(reuse={"updates": 4, "max_age": 1}, learning_rate=0.0)
    assert sum(row["reuse/left_by_age"] for row in rows) > 0
    assert max(row["lag/max"] for row in rows) == 1


LAGGED = {"max_lag": 2, "rollout_batch": "adaptive"}


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("more", [{}, LAGGED, {"num_iterations": 2, "step_scale": "ess"}], ids=str)
def test_a_resume_goes_on_exactly(train: Callable[..., Metrics], tmp_path: Path, more: dict[str, Any]) -> None:
    given = {"reuse": {"updates": 3}, "max_steps": 6, "save_steps": 1} | more
    train("whole", **given)
    train("parts", **(given | {"max_steps": 3}))
    Trainer.resume(tmp_path / "parts", {"max_steps": 6}).train()
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")


@pytest.mark.slow
def test_an_audit_compares_with_fresh_rollouts(train: Callable[..., Metrics], tmp_path: Path) -> None:
    """Its tokens are booked with those of evaluations. Without updates there is no bias, but noise."""
    rows = train(reuse={"updates": 4, "audit": 1.0}, learning_rate=0.0, max_steps=20)
    audited = [row for row in rows if "reuse/audit/groups" in row]
    assert sum(row["reuse/groups"] for row in rows) >= sum(row["reuse/audit/groups"] for row in audited) > 20
    assert abs(np.mean([row["reuse/audit/bias"] for row in audited])) < 0.15
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.totals()["evaluation"]["rollouts"] == 4 * sum(row["reuse/groups"] for row in rows)


@pytest.mark.slow
def test_with_samplers_in_other_processes(train: Callable[..., Metrics]) -> None:
    """They make fewer groups; the audit proves that no fresh one was over the lag bound."""
    rows = train(reuse={"updates": 2}, sync={"name": "processes", "samplers": 1}, max_lag=2)
    assert sum(row["reuse/groups"] for row in rows) > 0
    assert all(row["groups/effective"] == 4 for row in rows)


def test_the_effective_sample_size_of_a_group(tiny_config: dict[str, Any]) -> None:
    """(sum w)^2 / (n sum w^2) over its rollouts, w the ratio of all their tokens."""
    values = (
        tiny_config
        | {"reward_funcs": [REWARD]}
        | {"correction": "truncate", "reuse": {"updates": 4}, "max_steps": 3, "eval_steps": None}
    )
    trainer = Trainer(config=values)
    trainer.train()
    reuse = trainer._session.loop.collector.reuse  # type: ignore[union-attr]
    assert isinstance(reuse, Reuse)
    groups = [used.group for used in reuse.groups]
    assert len(groups) > 2
    expected = [by_hand(group, trainer.learner) for group in groups]
    assert [_ess(log_w_G) for log_w_G in log_ratios(groups, trainer.learner)] == pytest.approx(expected)
    assert min(expected) < 0.999
    assert log_ratios([], trainer.learner) == []


def by_hand(group: Any, learner: Learner) -> float:
    w = []
    for rollout in group.rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids.tolist()]])
        with torch.no_grad():
            logits = learner.model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1]  # type: ignore[attr-defined]
        logp = logits.log_softmax(-1).gather(1, ids[0, len(rollout.prompt_ids) :, None])[:, 0]
        w.append(float((logp.double() - torch.from_numpy(rollout.sampler_logp).double()).sum().exp()))
    return sum(w) ** 2 / (len(w) * sum(x * x for x in w))


def test_a_step_that_was_skipped_uses_nothing(tmp_path: Path) -> None:
    """Its groups are booked as filtered, so they may not come back as trained ones."""
    run = FakeRun(tmp_path / "l.sqlite", lambda visit, size: [0.0, 1.0], {"prompts_per_step": 4, "num_generations": 2})
    options = ReuseConfig(updates=2)
    reuse = Reuse(options, 4, 0, run.methods.judge, _unchanged, lambda jobs: [])
    prompts = {"train": run.prompts}
    collector = build_collector(run.config, run.methods, run.sampler, run.ledger, prompts, reuse=reuse)
    for step, updated in enumerate((0.0, 1.0)):
        batch = collector.collect(step)
        assert not batch.again
        collector.trained(step, batch, {"updated": updated})
        assert len(reuse.groups) == 4 * updated
        assert "seconds/reuse" in collector.end_step(step, batch.trained_on, {})
        run.sampler.version = step + 1
    batch = collector.collect(2)
    assert (len(batch.groups), len(batch.again)) == (2, 2)


def test_failures_are_compared_with_the_new_groups_of_a_step(tmp_path: Path) -> None:
    values = {"prompts_per_step": 16, "num_generations": 8}
    run = FakeRun(tmp_path / "l.sqlite", lambda visit, size: [0.0, 1.0] * 4, values)
    reuse = Reuse(ReuseConfig(updates=4), 16, 0, run.methods.judge, _unchanged, lambda jobs: [])
    prompts = {"train": run.prompts}
    collector = build_collector(run.config, run.methods, run.sampler, run.ledger, prompts, reuse=reuse)
    collector.trained(0, collector.collect(0), {"updated": 1.0})
    poll = run.sampler.poll

    def mostly_failed() -> list[Group]:
        groups = poll()
        for rollout in (r for group in groups for r in group.rollouts[:5]):
            rollout.reward, rollout.fate, rollout.reason = None, Fate.FAILED, "judge unreachable"
        return groups

    run.sampler.poll = mostly_failed  # type: ignore[method-assign]
    assert len(collector.collect(1).again) == 12
    assert "62% of the rollouts failed (max_failed_share=50%)" in str(collector.stop)


def _unchanged(groups: Sequence[Group]) -> list[np.ndarray]:
    return [np.zeros(len(group.rollouts)) for group in groups]


def test_a_state_that_no_run_can_have_is_refused(tiny_config: dict[str, Any]) -> None:
    values = tiny_config | {"reward_funcs": [REWARD], "correction": "truncate", "reuse": {"updates": 4}, "max_steps": 2}
    trainer = Trainer(config=values)
    trainer.train()
    collector = trainer._session.loop.collector  # type: ignore[union-attr]
    for change, message in (
        ({"uses": 9}, r"reuse: a group was used as often as reuse.updates=4 allows"),
        ({"uses": 0}, r"reuse\.0\.uses: Input should be greater than 0"),
        ({"group": {}}, "reuse: KeyError"),
    ):
        state = collector.state_dict()
        state["reuse"][0] |= change
        with pytest.raises(ValueError, match=message), at("loop"):
            collector.load_state_dict(state)


def test_what_cannot_be_is_refused(tiny_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"reuse: .* set correction: truncate"):
        Trainer(config=tiny_config | {"reuse": {"updates": 2}, "policy_loss": "plain"})
    Trainer(config=tiny_config | {"reuse": {"updates": 2}, "policy_loss": "clip"})  # its ratio is to the sampler
    more = {
        "correction": "truncate",
        "filter": "zero_variance",
        "rollout_batch": {"name": "fixed", "surplus": "discard"},
    }
    with pytest.raises(ConfigError, match="rollout_batch: with reuse a batch wants few new groups"):
        Trainer(config=tiny_config | more | {"reuse": {"updates": 2}, "reward_funcs": [REWARD]})
    with pytest.raises(ConfigError, match=r"reuse.updates: .*greater than or equal to 2"):
        Trainer(config=tiny_config | {"reuse": {"updates": 1}, "correction": "truncate"})
    enough = tiny_config | {"correction": "truncate", "reward_funcs": [REWARD]}
    with pytest.raises(ConfigError, match="reuse: has no effect with prompts_per_step: 1"):
        Trainer(config=enough | {"reuse": {"updates": 2}, "prompts_per_step": 1})
    with pytest.raises(ConfigError, match="reuse: max_age: 2 must be above max_lag: 2"):
        Trainer(config=enough | {"reuse": {"updates": 2, "max_age": 2}, "max_lag": 2})
