"""Selectors, filters, sizes and rounds together: what one of them does must not mislead another."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from winnow.base.noise import noise_key
from winnow.record.stop_conditions import RunStoppedError
from winnow.sampler.base import SamplersLostError
from winnow.types import GroupKind, Verdict, Visit

from ..builders.buffers import oldest
from .fake_run import FakeRun, Outcome

STEPS, BATCH = 15, 4
CUTS = (
    Verdict(False, "converged", counts_as=GroupKind.UNKNOWN),
    Verdict(False, "stuck", counts_as=GroupKind.HARD),
    Verdict(False, "random cut"),
)


def outcome(visit: Visit, size: int) -> Outcome:
    """A third of the prompts mostly solved, a third mostly hopeless, the rest mixed; some cut, pruned or failed."""
    luck = noise_key(visit.prompt.ordinal, visit.number) % 12
    if luck < 3:
        return CUTS[luck]
    kind = 2 if luck == 5 else visit.prompt.ordinal % 3
    rewards: list[float | None] = [float(i % 2) if kind == 2 else float(kind) for i in range(size)]
    for i in range({3: 1, 4: size - 1}.get(luck, 0)):
        rewards[i] = None
    return rewards


COMPOSITIONS = [
    {"selector": selector, "filter": filter_, "group_size": size, "rollout_batch": batch, "max_lag": lag}
    for selector, filter_, size, (batch, lag) in itertools.product(
        ["uniform", "greso", "backoff"],
        ["zero_variance", "keep_all", {"name": "zero_variance", "refill": False}],
        ["fixed", {"name": "adaptive_k", "high": 6, "window": 2, "tau": 0.4, "tau_down": 0.1, "dwell": 2}],
        [
            ("exact", 0),
            ({"name": "adaptive", "surplus": "carry"}, 1),
            ({"name": "adaptive", "surplus": "discard"}, 0),
            ({"name": "fixed", "size": 5, "surplus": "carry"}, 1),
        ],
    )
    if filter_ == "zero_variance" or batch == "exact"
]


def start(path: Path, composition: dict[str, Any], **more: Any) -> FakeRun:
    config = {"prompts_per_step": BATCH, "num_generations": 4, "max_steps": STEPS, "correction": "truncate"}
    return FakeRun(path, outcome, config | composition | more, prompts=12)


def test_filters_of_one_name_keep_their_own_state(tmp_path: Path) -> None:
    loose, tight = ({"name": "zero_variance", "atol": atol} for atol in (1e-8, 1e-3))
    run = start(tmp_path / "l", {"filter": [loose, tight]})
    state = run.collector.state_dict()
    assert state["filter"] == {"filters": [{}, {}]}
    run.collector.load_state_dict(state)


def of(run: FakeRun) -> list[list[int]]:
    return [[group.visit.number for group in batch] for batch in run.update.batches]


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda c: "-".join(map(str, c.values())))
def test_every_composition_keeps_its_promises(composition: dict[str, Any], tmp_path: Path) -> None:
    run = start(tmp_path / "l", composition)
    run.run()
    refill = composition["filter"] == "zero_variance"
    assert len(run.update.batches) == STEPS
    trained = [number for batch in of(run) for number in batch]
    assert len(set(trained)) == len(trained)
    for step, batch in enumerate(run.update.batches):
        assert len(batch) == BATCH if refill else len(batch) <= BATCH
        for group in batch:
            assert group.verdict.keep
            assert step - oldest(group, step) <= composition["max_lag"]
            assert composition["filter"] == "keep_all" or run.methods.judge.teaches(group)
    assert all(math.isfinite(value) for metrics in run.metrics for value in metrics.values())
    for step, metrics in enumerate(run.metrics):
        query = (
            "SELECT zero_variance FROM visits v JOIN outcomes o USING (visit) WHERE v.step = ? AND o.fate <> 'skipped'"
        )
        kinds = [kind for (kind,) in run.ledger._db.execute(query, (step,))]
        judged = [kind for kind in kinds if kind is not None]
        assert metrics["groups/rolled_out"] == len(kinds)
        assert metrics.get("groups/judged", 0) == len(judged)
        share = sum(kind != "none" for kind in judged) / len(judged) if judged else None
        assert metrics.get("frac_reward_zero_std") == share
    if composition["group_size"] != "fixed":
        assert {4, 6} <= {metrics["groups/size_mean"] for metrics in run.metrics if "groups/size_mean" in metrics}


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("audit", [None, {"epsilon": 0.3}])
@pytest.mark.parametrize("k", [1, 2, 7, 12])
def test_greso_dapo_adaptive_k_and_carry_resume_where_they_were(k: int, audit: Any, tmp_path: Path) -> None:
    composition = {
        "selector": "greso",
        "filter": "zero_variance",
        "group_size": {"name": "adaptive_k", "high": 6, "window": 2, "tau": 0.4},
        "rollout_batch": {"name": "adaptive", "surplus": "carry"},
        "max_lag": 1,
        "audit": audit,
    }
    whole = start(tmp_path / "whole", composition).run()
    part = start(tmp_path / "part", composition)
    part.loop.hooks.should_stop = lambda: part.loop.step >= k
    part.loop.run()
    carried = len(part.collector.buffer.groups)
    state = json.loads(json.dumps(part.loop.state_dict()))
    part.ledger.close()
    again = start(tmp_path / "part", composition)
    again.loop.load_state_dict(state)
    again.sampler.version = again.loop.step
    again.run()
    assert of(part) + of(again) == of(whole)
    assert part.sampler.rounds + again.sampler.rounds == whole.sampler.rounds
    assert again.ledger.digest() == whole.ledger.digest()
    if k == 7:
        assert carried, "otherwise this proves nothing"


def test_a_filter_that_does_not_refill_spends_its_places_once(tmp_path: Path) -> None:
    """Cut, failed and rejected groups leave the batch smaller, in their own step only."""
    run = start(tmp_path / "l", {"filter": {"name": "zero_variance", "refill": False}}).run()
    assert [n for _, n in run.sampler.rounds] == [BATCH] * STEPS
    assert all(metrics["groups/rolled_out"] == BATCH for metrics in run.metrics)


def test_a_step_whose_evaluation_is_lost_is_whole_all_the_same(tmp_path: Path) -> None:
    """What was trained is booked in a step that is in the ledger; else no resume could make the account right again."""
    run, saved = FakeRun(tmp_path / "ledger.sqlite", outcome, {"prompts_per_step": 4, "max_steps": 5}), []

    def lost(step: int) -> None:
        if step == 2:
            raise SamplersLostError("sampler 0 died")

    run.loop.hooks.evaluate = lost
    run.loop.hooks.save = lambda step, force: saved.append((step, force))
    with pytest.raises(RunStoppedError, match="step 2: sampler 0 died"):
        run.loop.run()
    assert saved[-1] == (2, True)
    assert [m["step"] for m in run.metrics] == [1, 2]
    run.loop.close()
    result = run.ledger.verify()
    assert result.ok, result.problems
