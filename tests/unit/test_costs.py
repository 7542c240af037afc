"""Seconds by what they were spent on. A clock that only the parts of a run move: every second is where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from winnow.base import seconds
from winnow.base.seconds import ENGINE_SECONDS, RunClock, Seconds
from winnow.engine.base import engine_seconds
from winnow.record.costs import costs_of, seconds_table, tokens_table
from winnow.record.ledger import Ledger
from winnow.rollout.evaluate import Evaluation
from winnow.types import Group

from ..builders.engines import make_engine
from .engine_models import make_requests, run
from .fake_run import FakeRun


class Time:
    """A clock that stands still unless it is moved."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(seconds, "now", time)
    return time


def timed_run(path: Path, time: Time, steps: int) -> FakeRun:
    """Every step: 3 s of generation (1 prefill, 1.5 decoding), 2 s of update (0.5 packing, 1 forward and backward),
    0.25 s of publishing, an evaluation of 4 s, and 0.125 s of records; 0.5 s before it that belong to nothing."""
    run = FakeRun(
        path, lambda visit, size: [0.0, 1.0], {"max_steps": steps, "prompts_per_step": 4, "num_generations": 2}
    )
    poll, update, loop = run.sampler.poll, run.update, run.loop
    spent = Seconds("waiting", "prefill", "decode_9-32")

    def polled() -> list[Group]:
        spent.add({"prefill": 1.0, "decode_9-32": 1.5})
        time.passes(3.0)
        return poll()

    def updated(groups: Sequence[Group], step: int) -> dict[str, float]:
        time.passes(2.0)
        return update(groups, step)

    def evaluated(step: int) -> Evaluation:
        spent.add({"prefill": 2.0})  # of the engine, and not of training
        time.passes(4.0)
        return Evaluation({}, [], 0, 0, 4.0)

    def recorded(step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        time.passes(0.125)
        run.metrics.append(metrics)

    run.sampler.poll, run.sampler.spent = polled, spent.take  # type: ignore[method-assign]
    loop.optimizer_step = updated  # type: ignore[assignment]
    of_update = {"seconds/update/pack": 0.5, "seconds/update/forward_backward": 1.0}
    loop.learner = SimpleNamespace(weights=dict, metrics=lambda: of_update)  # type: ignore[assignment]
    loop.hooks.evaluate, loop.hooks.record = evaluated, recorded
    loop.hooks.begin = lambda step: time.passes(0.5)
    loop.hooks.published = lambda step: time.passes(0.25)
    return run


def seconds_of(costs: dict[str, float]) -> dict[str, str]:
    found = seconds_table(costs)
    assert found is not None
    return {name: value for name, value, *_ in found.rows}


def test_the_rows_add_up_to_the_seconds_of_the_run(tmp_path: Path, time: Time) -> None:
    run = timed_run(tmp_path / "ledger.sqlite", time, steps=4).run()
    found = seconds_of(costs_of(run.metrics))
    assert {name: float(value) for name, value in found.items() if value != "–"} == {
        "waiting": 0.0,
        "prefill": 4.0,
        "decode, 9-32 rows": 6.0,
        "rest of generation": 2.0,
        "packing": 2.0,
        "forward and backward": 4.0,
        "rest of the update": 2.0,
        "publish": 1.0,
        "evaluation": 16.0,
        "record": 0.4,  # of the last step it comes after its metrics
        "other": 2.0,
        "all": pytest.approx(time.now - 0.125, abs=0.06),
    }
    assert found["sampling"] == found["optimizer"] == "–", "unknown, not 0"
    with Ledger.open(tmp_path / "ledger.sqlite", read_only=True) as ledger:
        assert seconds_of(ledger.verify().costs) == found, "the ledger alone says the same"


def test_a_resumed_run_goes_on_counting(tmp_path: Path, time: Time) -> None:
    whole = timed_run(tmp_path / "a.sqlite", time, steps=4).run().metrics
    time.now = 0.0
    first = timed_run(tmp_path / "b.sqlite", time, steps=2).run()
    total = first.collector.clock.total()
    time.passes(100.0)  # between the two
    second = timed_run(tmp_path / "c.sqlite", time, steps=2)
    second.collector.clock.started_at(time.now, before=total)
    time.passes(3.0)
    second.collector.clock.rest("load")
    metrics = first.metrics + second.run().metrics
    # What was recorded after the last step before the resume has no step, and is in `other`.
    expected = costs_of(whole) | {"seconds/load": 3.0}
    expected["seconds/record"] -= 0.125
    expected["seconds_total"] += 3.0
    assert seconds_of(costs_of(metrics)) == seconds_of(expected)


def test_what_is_measured_within_a_phase_is_not_measured_twice(time: Time) -> None:
    clock = RunClock()
    with clock.phase("record"):
        time.passes(1.0)
        with clock.phase("evaluate"):
            time.passes(4.0)
        time.passes(1.0)
    time.passes(2.0)
    clock.rest("load")
    assert clock.take() == {"record": 2.0, "evaluate": 4.0, "load": 2.0}
    assert clock.take() == {}
    assert clock.total() == 8.0


def test_every_second_of_an_engine_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks whenever it is read: each step's laps add up to the time from its first to its last."""
    engine = make_engine("qwen2", slots=32)
    time = Time(tick=1.0)
    monkeypatch.setattr(seconds, "now", time)
    engine.submit(make_requests(9, siblings=1, max_tokens=8))
    steps = 0
    rows: dict[str, int] = {}
    while engine.pending:
        rows_before = engine.sequences.table.n
        engine.step()
        steps += 1
        name = "decode_1-8" if rows_before <= 8 else "decode_9-32"
        rows[name] = rows.get(name, 0) + (rows_before > 0)
    found = engine.seconds.take()
    assert set(found) == set(ENGINE_SECONDS)
    assert sum(found.values()) == time.now - steps, "between steps nobody looks"
    assert {name: found[name] for name in rows} == rows
    assert found["decode_33-128"] == found["decode_over_128"] == 0
    assert engine.seconds.take() == dict.fromkeys(ENGINE_SECONDS, 0.0)


def test_an_engine_that_does_not_tell_its_seconds_apart() -> None:
    assert engine_seconds(SimpleNamespace(), 2.0) == {"engine": 2.0}  # type: ignore[arg-type]
    costs = {"seconds/generate": 3.0, "seconds/generate/engine": 2.0, "seconds_total": 4.0}
    found = seconds_of(costs)
    assert (found["engine, not told apart"], found["rest of generation"]) == ("2.0", "1.0")
    assert found["prefill"] == found["decode, 1-8 rows"] == "–"


def test_samplers_elsewhere_have_a_column() -> None:
    costs = costs_of(
        {
            "seconds/generate": 9.0,
            "seconds/generate/waiting": 8.0,
            "sampler/seconds/total": 20.0,
            "sampler/seconds/waiting": 4.0,
            "sampler/seconds/prefill": 5.0,
            "sampler/seconds/publish": 1.0,
            "seconds_total": 10.0 * step,
        }
        for step in (1, 2)
    )
    table = seconds_table(costs)
    assert table is not None
    assert table.head[-1] == "all samplers"
    found = {row[0]: (row[1], row[3]) for row in table.rows}
    assert found["waiting"] == ("16.0", "8.0")
    assert found["prefill"] == ("–", "10.0")
    assert found["publish"] == ("–", "2.0")
    assert found["rest of generation"] == ("2.0", "20.0")
    assert found["all"] == ("20.0", "40.0")


def test_computed_tokens_that_are_unknown_are_a_dash() -> None:
    known = {"num_tokens": 100, "num_computed_tokens": 80}
    assert tokens_table(known, 50).rows == [  # type: ignore[union-attr]
        ["sampled", "100", "1.00"],
        ["computed", "80", "0.80"],
        ["trained", "50", "0.50"],
    ]
    since = costs_of([known, {"num_tokens": 200}])
    assert tokens_table(since, 50).rows[1] == ["computed", "–", "–"]  # type: ignore[union-attr]
    assert tokens_table({}, 0) is None
    assert seconds_table({}) is None


def test_what_an_engine_did_before_a_phase_is_no_part_of_it() -> None:
    engine: Any = make_engine("qwen2")
    run(engine, make_requests(1))
    clock = RunClock()
    with clock.phase_of_parts("generate", engine.seconds.take):
        pass
    assert not any(value for name, value in clock.take().items() if name != "generate")
