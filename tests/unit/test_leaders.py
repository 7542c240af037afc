"""Leaders: siblings that are rolled out first give the others drafts, and change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from winnow.rollout.in_flight import Flight, siblings_of
from winnow.types import Group, Job, Prompt, Visit

from ..builders.toy_rollouts import (  # noqa: F401
    SHORT_TURNS,
    EchoEnv,
    HalfGate,
    StepGate,
    ToyTask,
    policy,
    run,
)


def require_equal(groups: list[Group], others: list[Group]) -> None:
    for group, other in zip(groups, others, strict=True):
        for a, b in zip(group.rollouts, other.rollouts, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_allclose(a.sampler_logp, b.sampler_logp, atol=1e-4)
            assert (a.fate, a.reason, a.stop_reason, a.reward) == (b.fate, b.reason, b.stop_reason, b.reward)


GATES: dict[str, Callable[[], list[Any]]] = {
    "no gate": list,
    "token gate": lambda: [HalfGate()],
    "barriers": lambda: [StepGate(1, keep=True), StepGate(2, keep=True)],
    "a cut": lambda: [StepGate(2, keep=False)],
}
ENVS: dict[str, Callable[[int], Any]] = {
    "one turn": lambda made: None,
    "turns": lambda made: EchoEnv(1 + made % 4),
    "failures": lambda made: EchoEnv(3, fail_at=1 + made % 4),  # leaders fail, too
    "some": lambda made: EchoEnv(3) if made % 2 else None,
}
CASES = [
    *(("one turn", gate) for gate in ("no gate", "token gate")),
    *((env, gate) for env in ("turns", "failures", "some") for gate in GATES),
]


@pytest.mark.parametrize("leaders", [1, 3, 9])
@pytest.mark.parametrize(("env", "gate"), CASES)
def test_rollouts_are_those_of_siblings_that_start_at_once(
    policy: tuple[Any, Any],
    leaders: int,
    env: str,
    gate: str,
) -> None:
    make, gates = ENVS[env], GATES[gate]
    stop = () if env == "one turn" else SHORT_TURNS
    options: dict[str, Any] = {"size": 6, "slots": 64, "stop": stop, "temperature": 0.3}
    with_ = run(policy, ToyTask(make), gates=gates(), leaders=leaders, **options)
    without = run(policy, ToyTask(make), gates=gates(), **options)
    require_equal(with_, without)
    assert not any(r.accepted for g in without for r in g.rollouts)
    assert not any(r.accepted for g in with_ for r in g.rollouts[:leaders])
    if (leaders, env, gate) == (1, "one turn", "no gate"):
        assert sum(r.accepted for g in with_ for r in g.rollouts) > 0


def test_each_wave_has_all_earlier_siblings_as_drafts() -> None:
    """Of eight one starts, then one more, then two, then four."""
    job = Job(Visit(0, 0, Prompt("p", 0)), 8)
    flight = Flight(job, siblings_of(job, greedy=False), [], leaders=1)
    started: list[list[int]] = [[s.rollout.sibling for s in flight.siblings if not flight.hold(s)]]
    assert flight.released() is None, "the leader runs"
    for number in range(4):
        for sibling in flight.siblings[: flight.leaders or 8]:
            sibling.running = False
        released = flight.released()
        if number == 3:
            assert released is None
            break
        assert released is not None
        started.append([s.rollout.sibling for s in released if not flight.hold(s)])
        assert len(flight.drafts) == 2**number
    assert started == [[0], [1], [2, 3], [4, 5, 6, 7]]
    assert not flight.held
