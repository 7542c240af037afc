"""Costs of steps: fitted ones are those that made the seconds, and predictions are those of a run by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.run.inputs import build_task
from winnow.study.costs import WORK, Costs, Seen, Shape, Shapes, Step, add
from winnow.study.simulate import Policy
from winnow.study.timeline import Machine, Prediction, predict
from winnow.study.tune import Tuning
from winnow.types import Rollout

TRUE = {
    "generate": {"decode_steps": 4e-3, "rows": 5e-5, "prompt_tokens": 2e-4},
    "update": {"steps": 0.02, "tree_tokens": 1e-4},
    "rest": {"groups": 5e-4},
}
ENV = {"name": "countdown", "train_size": 120, "test_size": 8}


def steps(number: int, noise: float) -> list[Step]:
    rng, found = np.random.default_rng(0), []
    for _ in range(number):
        work = {name: float(rng.integers(10, 100)) for names in WORK.values() for name in names} | {"steps": 1.0}
        work |= {name: 100 * work[name] for name in ("rows", "context", "tokens", "tree_tokens", "trained_tokens")}
        seconds = {phase: Costs(TRUE).of(work, phase) * rng.normal(1, noise) for phase in WORK}
        found.append(Step(work, seconds, 0.0))
    return found


def test_a_fit_finds_the_costs_that_made_the_seconds() -> None:
    fitted = Costs.fitted(steps(20, 0.0)).seconds
    for phase, costs in fitted.items():
        assert costs == pytest.approx({name: TRUE[phase].get(name, 0.0) for name in WORK[phase]}, rel=1e-6, abs=1e-12)


def test_noise_and_an_interrupted_step_move_predictions_little() -> None:
    known = steps(40, 0.05)
    known[3] = replace(known[3], seconds={phase: 20 * s for phase, s in known[3].seconds.items()})
    costs = Costs.fitted(known)
    for step in steps(60, 0.0)[40:]:
        assert costs.of(step.work) == pytest.approx(sum(step.seconds.values()), rel=0.1)


def test_few_steps_give_costs_that_are_not_negative() -> None:
    for number in (1, 2, 3):
        costs = Costs.fitted(steps(number, 0.3))
        assert all(cost >= 0 for each in costs.seconds.values() for cost in each.values())


def rollout(*tokens: int) -> Rollout:
    ids, every = np.array(tokens, np.int64), np.ones(len(tokens), bool)
    return Rollout(0, (7, 7), ids, every, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32))


def test_what_siblings_have_in_common_is_decoded_once() -> None:
    """After a prompt of two tokens 1 and 1 2 and 3 are read by others; the last token of a rollout never is."""
    shape = Shape.of([rollout(1, 2, 9), rollout(1, 9), rollout(3, 9)])
    assert shape == Shape(length=3, rows=3, context=3 + 4 + 3, tokens=7, prompt_tokens=2)
    assert shape.trained(3) == {"tree_tokens": 5, "trained_tokens": 13}
    assert shape.scaled(2) == Shape(3, 6, 20, 14, 2)


def test_groups_get_the_shape_of_those_that_are_most_alike() -> None:
    short, long = Shape(2, 1, 1, 4, 2), Shape(9, 8, 8, 16, 2)
    shapes = Shapes([Seen("a", [True, True], {2: short}), Seen("b", [False, False], {2: long})])
    assert (shapes.next(2, 2), shapes.next(2, 0)) == (short, long)
    assert shapes.next(4, 4) == short.scaled(2)


def config(**changes: Any) -> Any:
    values = {"model": "m", "env": ENV, "max_steps": 30, "prompts_per_step": 8, "num_generations": 4}
    return validate(values | {"advantage": "rloo", "max_skipped_steps": 1000, "filter": "zero_variance"} | changes)


@pytest.fixture
def machine() -> Machine:
    seen = [Seen(f"p{k}", [i < k for i in range(4)], {4: Shape(10, 20, 400, 40, 8)}) for k in range(5)]
    return Machine(Costs(TRUE), Shapes(seen), Policy(np.zeros(120)), slots=1 << 20)


def test_a_step_takes_the_seconds_of_its_work(machine: Machine) -> None:
    """Without a filter: 8 groups at once, 10 decode steps, 160 rows, and an update on the mixed ones."""
    found = predict(config(filter="keep_all"), build_task(ENV).train, machine)
    generate = 10 * 4e-3 + 160 * 5e-5 + 64 * 2e-4
    assert found.phases["generate"] == pytest.approx(generate)
    assert found.phases["rest"] == pytest.approx(8 * 5e-4)
    assert found.phases["update"] == pytest.approx(0.02 + 8 * 28 * 1e-4 * 7 / 8, rel=0.1)
    assert len(found.seconds) == 30
    assert found.signal == pytest.approx(30 * 8 * 0.75, rel=0.1)


def test_predictions_are_monotonic(machine: Machine) -> None:
    prompts = build_task(ENV).train

    def per_step(changes: dict[str, Any], **of_machine: Any) -> float:
        return predict(config(**changes), prompts, replace(machine, **of_machine)).per_step

    batches = [per_step({"prompts_per_step": n}) for n in (4, 8, 16)]
    assert batches == sorted(batches)
    sizes = [per_step({"num_generations": n, "filter": "keep_all"}) for n in (2, 4, 8)]
    assert sizes == sorted(sizes)
    slots = [per_step({}, slots=n) for n in (1 << 20, 16, 4)]
    assert slots == sorted(slots)
    dearer: dict[str, Any] = {}
    add(dearer, TRUE["generate"], 2.0)
    assert per_step({}, costs=Costs(TRUE | {"generate": dearer})) > batches[1]


def test_sampler_processes_overlap_with_the_update(machine: Machine) -> None:
    stale = {"correction": "truncate", "policy_loss": "plain", "max_lag": 1}
    alone = predict(config(**stale | {"max_lag": 0}), build_task(ENV).train, machine)
    c = config(**stale, sync={"name": "processes", "samplers": 1})
    assert predict(c, build_task(ENV).train, machine).per_step < alone.per_step


def test_an_update_alongside_generation_hides_the_shorter_of_the_two(machine: Machine) -> None:
    prompts, overlap = build_task(ENV).train, {"sync": {"name": "in_process", "overlap": True}, "max_lag": 1}
    stale = {"correction": "truncate", "policy_loss": "plain", "filter": "keep_all"}
    found = predict(config(**stale, **overlap), prompts, machine)
    hidden = min(found.phases["generate"], found.phases["update"])
    assert found.per_step == pytest.approx(sum(found.phases.values()) - hidden)
    with pytest.raises(ConfigError, match="sync: overlap: not with device: cuda"):
        predict(config(**stale, **overlap), prompts, replace(machine, device="cuda"))
    continuous = {"sync": {"name": "in_process", "lag": "continuous"}, "max_lag": 1}
    assert predict(config(**stale, **continuous), prompts, machine).per_step > 0
    with pytest.raises(ConfigError, match="sync: lag: continuous: not with device: cuda"):
        predict(config(**stale, **continuous), prompts, replace(machine, device="cuda"))


def test_what_a_run_refuses_is_not_predicted(machine: Machine) -> None:
    reused = {"reuse": {"updates": 2, "max_age": 2}, "correction": "truncate", "filter": "keep_all"}
    with pytest.raises(ConfigError, match="reuse: has no effect with prompts_per_step: 1"):
        predict(config(**reused | {"prompts_per_step": 1}), build_task(ENV).train, machine)
    with pytest.raises(ConfigError, match="reuse: max_age: 2 must be above max_lag: 2"):
        predict(config(**reused | {"max_lag": 2}), build_task(ENV).train, machine)


def test_gates_are_refused(machine: Machine) -> None:
    with pytest.raises(ConfigError, match="gates: they decide by tokens"):
        predict(config(gates=[{"name": "random", "k": 2}]), build_task(ENV).train, machine)


def test_costs_are_measured_at_a_rate_of_0_whatever_the_schedule() -> None:
    """And on the engine of the run: some refuse drafts, and `auto` would take another one for them."""
    c = config(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}, warmup_steps=3)
    measured = []

    def run(name: str, changes: Any, limits: Any, prediction: Any) -> Any:
        measured.append(validate(c.model_dump() | changes))
        return SimpleNamespace(warm=True)

    of_call = {"left": lambda part: 1.0, "_sizes": lambda times: (4, 4), "_machine": list}
    tuning: Any = SimpleNamespace(c=c, run=run, runs={}, **of_call)
    Tuning.measure(tuning)
    (used,) = measured
    assert (used.learning_rate, used.lr_scheduler_type, used.speculative) == (0, "constant", False)


def in_seconds(run_s: float, rates_s: float, times: float) -> Any:
    """A `Tuning` with so many seconds until its parts end, whose runs take `times` the seconds that they are given."""
    left = {"run": run_s, "learning rate": rates_s}
    tuning: Any = SimpleNamespace(asked=[], notes=[], runs={}, c=SimpleNamespace(warmup=0, learning_rate=1e-3))

    def run(name: str, changes: Any, limits: Any, prediction: Any = None) -> Any:
        tuning.asked.append(limits.seconds)
        for part in left:
            left[part] -= times * limits.seconds
        steps, number = [SimpleNamespace(seconds={"update": limits.seconds})], len(tuning.asked)
        passed = {"passed": [0.5], "mean_passed": 0.5, "per_signal": number}
        return SimpleNamespace(changes=changes, warm=True, stopped="", steps=steps, **passed)

    tuning.run, tuning.left, tuning.note = run, left.__getitem__, tuning.notes.append
    return tuning


def test_contenders_run_for_equal_seconds() -> None:
    """What a run takes besides its steps, loading and evaluations, is not taken from those after it."""
    tuning = in_seconds(200.0, 300.0, 1.3)
    ranked = [({"seed": n} if n else {}, Prediction([1.0], 10.0 + n, {})) for n in range(4)]
    best: Any = Tuning.contend(tuning, ranked)
    assert tuning.asked == [50.0] * 3, "the fourth has no 50 seconds left"
    assert tuning.notes == ["minutes: too few to run 1 of 3 predicted settings"]
    assert best.per_signal == 1


def test_learning_rates_are_tried_where_nothing_else_is() -> None:
    tuning = in_seconds(75.0, 100.0, 1.1)
    given: Any = Tuning.contend(tuning, [({}, Prediction([1.0], 1.0, {}))])
    Tuning.choose_rate(tuning, given)
    assert tuning.asked == pytest.approx([100 / 3] * 3)
    assert tuning.notes == []


def test_a_reason_belongs_to_the_settings_that_are_chosen() -> None:
    """An option that loses has one of their values, and another value is None."""
    seconds = {None: 8.0, "a": 6.0, "b": 12.0}

    def predicted(changes: dict[str, Any], machine: Any) -> Prediction:
        return Prediction([seconds[changes.get("sync")] / (2 if "reuse" in changes else 1)], 1.0, {})

    samplers = [{"sync": sync, "max_lag": 1} for sync in ("a", "b")]
    tuning: Any = SimpleNamespace(clock=lambda: 0.0, left=lambda part: 1.0, say=len, reasons={}, _predicted=predicted)
    tuning._dimensions, tuning._with_rate = lambda: [("samplers", samplers), ("reuse", [{"reuse": None}])], dict
    tried: Any = Tuning._tried(tuning, SimpleNamespace())  # type: ignore[arg-type]
    best, _ = min(tried, key=lambda each: each[1].per_signal)
    assert best == {"sync": "a", "max_lag": 1, "reuse": None}
    reasons = tuning.reasons["sync=a max_lag=1 reuse=null"]
    assert [reasons[key].partition(" ")[0] for key in best] == ["25%", "25%", "50%"]
