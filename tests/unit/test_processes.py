"""What the learner makes of its samplers' messages and deaths, without any process."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from winnow.config import validate
from winnow.sampler import SamplersLostError, processes
from winnow.sampler.codec import group_state
from winnow.sampler.pipe import Message
from winnow.sampler.processes import Processes, ProcessSampler
from winnow.types import Fate, Group, Prompt, Rollout, Visit

PROMPTS = [Prompt(f"p{i}", i, text="p") for i in range(9)]
ZEROS = (np.zeros(2, np.int64), np.ones(2, bool), np.zeros(2, np.float32), np.zeros(2, np.int32))


class FakeChild:
    """Remembers what it is told; the test speaks for it."""

    def __init__(self, slot: int, inbox: queue.SimpleQueue[Message], threads: int, start: dict[str, Any]) -> None:
        self.slot, self.inbox, self.version = slot, inbox, start["version"]
        self.ready, self.flights, self.counts, self.heard = True, {}, {}, float("inf")
        self.told: list[dict[str, Any]] = []
        self.killed = False

    def send(self, content: dict[str, Any]) -> None:
        self.told.append(content)

    def kill(self) -> str:
        self.killed = True
        return "signal SIGKILL"

    def says(self, content: dict[str, Any] | None) -> None:
        self.inbox.put(Message(self, content))  # type: ignore[arg-type]


def group(visit: Visit) -> Group:
    return Group(visit, [Rollout(0, (1,), *ZEROS, reward=1.0)])


def visit(number: int) -> Visit:
    return Visit(number, 0, PROMPTS[number])


@pytest.fixture
def sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessSampler:
    monkeypatch.setattr(processes, "Child", FakeChild)
    monkeypatch.setattr(processes, "fingerprints", lambda task, tokenizer: {})
    monkeypatch.setattr(processes, "POLL_S", 0.01)
    monkeypatch.setattr(processes, "STOP_S", 0.01)
    config = validate({"model": "m", "env": "countdown", "output_dir": str(tmp_path)})
    runner = SimpleNamespace(
        engine=SimpleNamespace(version=0),
        task=SimpleNamespace(train=PROMPTS),
        tokenizer=None,
        options=SimpleNamespace(greedy_baseline=False),
    )
    made = Processes(samplers=2, max_restarts=2).build(runner, config, 2)  # type: ignore[arg-type]
    made.publish({}, 0)
    return made


def test_work_is_shared_and_comes_back_in_visit_order(sampler: ProcessSampler) -> None:
    for number in range(4):
        sampler.launch(visit(number), 1)
    first, second = sampler._children
    assert [sorted(c.flights) for c in (first, second)] == [[0, 2], [1, 3]]
    second.says({"group": group_state(group(visit(3)))})
    first.says({"group": group_state(group(visit(0)))})
    assert [g.visit.number for g in sampler.poll()] == [0, 3]
    assert sampler.pending == 2


def test_a_late_or_double_result_is_dropped(sampler: ProcessSampler) -> None:
    sampler.launch(visit(0), 1)
    child = sampler._children[0]
    for _ in range(2):
        child.says({"group": group_state(group(visit(0)))})
    assert len(sampler.poll()) == 1
    sampler.launch(visit(1), 1)
    child.says(None)
    assert sampler.poll() == []
    child.says({"group": group_state(group(visit(1)))})
    assert sampler.poll() == [], "what a replaced sampler still says does not count"
    assert sampler.pending == 1


def test_a_dead_samplers_groups_are_launched_once_more_then_failed(sampler: ProcessSampler) -> None:
    sampler.launch(visit(0), 3)
    sampler.publish({}, 1)
    sampler._children[0].says(None)
    assert sampler.poll() == []
    again = sampler._children[0]
    assert again.version == 1
    assert again.told == [{"launch": [0, 0, 0, {"keep": True, "reason": "", "probability": 1.0}], "size": 3}]
    again.says(None)
    sampler.poll()
    (failed,) = sampler.poll()
    assert [r.fate for r in failed.rollouts] == [Fate.FAILED] * 3
    assert "two samplers" in failed.rollouts[0].reason
    assert sampler.pending == 0
    assert sampler.metrics()["sampler/redispatched"] == 1


def test_a_sampler_that_never_began_does_not_count(sampler: ProcessSampler) -> None:
    sampler.launch(visit(0), 1)
    sampler._children[0].ready = False
    sampler._children[0].says(None)
    sampler.poll()
    sampler._children[0].says(None)
    assert sampler.poll() == sampler.poll() == []
    assert sampler.pending == 1


def test_deaths_in_a_row_end_the_run_but_a_group_in_between_forgives(sampler: ProcessSampler) -> None:
    for number in range(3):
        sampler._children[0].says(None)
        sampler.poll()
        sampler._children[0].flights = {}
        sampler._send(sampler._children[0], processes.Sent(visit(number), 1, False))
        sampler._children[0].says({"group": group_state(group(visit(number)))})
        sampler.poll()
    for _ in range(2):
        sampler._children[0].says(None)
        sampler.poll()
    sampler._children[0].says(None)
    with pytest.raises(SamplersLostError, match="3 times in a row"):
        sampler.poll()


def test_silence_is_death(sampler: ProcessSampler) -> None:
    silent = sampler._children[1]
    silent.heard = 0.0
    sampler.poll()
    assert silent.killed
    assert sampler._children[1] is not silent
    assert sampler.metrics()["sampler/restarts"] == 1


def test_the_version_is_the_oldest_that_is_known(sampler: ProcessSampler) -> None:
    sampler.publish({}, 1)
    assert sampler.version == 0
    sampler._children[0].says({"loaded": 1, "metrics": {"mine": 2.0}})
    sampler.poll()
    assert sampler.version == 0
    sampler._children[1].says({"loaded": 1, "metrics": {"mine": 4.0}})
    sampler.poll()
    assert sampler.version == 1
    assert sampler.metrics()["mine"] == 3.0


def test_what_is_in_flight_at_the_end_comes_back_whatever_the_samplers_do(sampler: ProcessSampler) -> None:
    for number in range(3):
        sampler.launch(visit(number), 1)
    first, second = sampler._children
    first.says({"stopped": [group_state(group(visit(0)))]})
    second.says(None)
    groups = sampler.close()
    assert sorted(g.visit.number for g in groups) == [0, 1, 2]
    assert all(c.killed for c in (first, second))
    assert sampler.close() == []


def test_a_lost_sampler_does_not_hold_up_the_end(sampler: ProcessSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_S", 60.0)
    for _ in range(3):
        sampler._children[0].says(None)
        if sampler._deaths[0] < 2:
            sampler.poll()
    with pytest.raises(SamplersLostError):
        sampler.poll()
    (left,) = sampler._children
    left.says({"stopped": []})
    assert sampler.close() == []
    assert left.killed


def test_new_groups_go_to_samplers_that_work(sampler: ProcessSampler) -> None:
    sampler._children[0].ready = False
    for number in range(3):
        sampler.launch(visit(number), 1)
    assert [len(child.flights) for child in sampler._children] == [0, 3]


def test_only_the_newest_weights_are_kept_on_disk(sampler: ProcessSampler, tmp_path: Path) -> None:
    for version in range(1, 12):
        sampler.publish({}, version)
    assert sorted(int(p.stem) for p in (tmp_path / ".weights").iterdir()) == [9, 10, 11]
    sampler.close()
    assert not (tmp_path / ".weights").exists()
