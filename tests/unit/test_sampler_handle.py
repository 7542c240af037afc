"""Samplers that come, start and go, and what is known of each, without any process."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from winnow.base.machine import gpu_gib
from winnow.learner.base import Sizes
from winnow.learner.fsdp.learner import FsdpLearner
from winnow.learner.fsdp.ranks import Rank
from winnow.sampler import SamplersLostError, pool
from winnow.sampler.base import PoolOptions
from winnow.sampler.codec import group_state
from winnow.sampler.handle import Stage
from winnow.sampler.pool import SamplerPool

from .fake_samplers import FakeChannel, channel_of, channel_of_member, evaluation, group, job, visit, working


def test_samplers_that_go_together_fail_nothing(sampler: SamplerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one was working on is not sent to another of the same node just before that one is missed, too."""
    monkeypatch.setattr(pool, "REDISPATCH_DELAY_S", 60.0)
    sampler.launch(job(0))
    for slot in (0, 1):
        channel_of(sampler, slot).says(None)
        assert sampler.poll() == []
        working(sampler._members[slot])
    assert sampler.pending == 1
    sampler._dispatch_after = 0.0
    sampler.poll()
    assert sum(len(member.flights) for member in sampler._members) == 1


def test_work_goes_to_samplers_that_are_heard_of(sampler: SamplerPool) -> None:
    first, second = sampler._members
    first.last_message_at = time.monotonic() - 0.6 * sampler.options.timeout_s
    for number in range(3):
        sampler.launch(job(number))
    assert [len(member.flights) for member in (first, second)] == [0, 3]


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is started from now on waits."""
    monkeypatch.setattr(FakeChannel, "room", False)


def test_a_sampler_that_has_no_place_is_waited_for(sampler: SamplerPool, no_room: None) -> None:
    """It is neither told anything nor given work, counts for no version, and is not taken for silent."""
    sampler.launch(job(0))
    channel_of(sampler, 0).says(None)
    sampler.poll()
    waits = sampler._members[0]
    waits.last_message_at = 0.0
    sampler.publish({}, [], 1)
    sampler.publish({}, [], 2)
    sampler.launch(job(1))
    assert sampler.poll() == []
    assert (sampler._members[0], channel_of_member(waits).told) == (waits, [])
    assert [len(member.flights) for member in sampler._members] == [0, 2]
    channel_of(sampler, 1).says({"loaded": 2, "dtype": "float32", "logged": {}})
    sampler.poll()
    assert sampler.version == 2
    channel_of_member(waits).says({"placed": "there"})
    sampler.poll()
    (start,) = channel_of_member(waits).told
    assert (start["start"]["version"], waits.version, waits.name) == (2, 2, "sampler 0 on there")


def test_work_waits_for_a_place_and_the_run_does_not_wait_for_ever(
    sampler: SamplerPool, no_room: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "START_TIMEOUT_S", 0.0)
    sampler.launch(job(0))
    for slot in (1, 0):
        channel_of(sampler, slot).says(None)
        sampler.poll()
    assert (sampler.pending, sampler.version) == (1, 0)
    sampler.launch(job(1))
    channel_of(sampler, 1).says({"placed": "there"})
    sampler.poll()
    assert [told["launch"]["visit"][0] for told in channel_of(sampler, 1).told[1:]] == [0, 1]
    channel_of(sampler, 1).says(None)
    sampler.options = PoolOptions(samplers=2, max_restarts=9, timeout_s=0.1)
    with pytest.raises(SamplersLostError, match=r"only 0 of 2 samplers could be .* 0\.1 s .*; their imports take"):
        sampler.run(evaluation(1))
    assert sorted(group.visit.number for group in sampler.close()) == [0, 1]


def test_work_begins_when_as_many_as_asked_for_have_a_place(sampler: SamplerPool) -> None:
    first, second = sampler._members
    first.stage, second.stage, sampler._needed = Stage.PLACED, Stage.WAITING, 2
    for number in range(4):
        sampler.launch(job(number))
    assert not first.flights
    channel_of_member(second).says({"placed": "there"})
    sampler.poll()
    assert [len(member.flights) for member in (first, second)] == [2, 2]


def test_figures_of_each_sampler(sampler: SamplerPool) -> None:
    for number in range(3):
        sampler.launch(job(number))
    held = {"memory_mib": 321.0, "gpu_memory_gib": 3.5}
    channel_of(sampler, 0).says({"group": group_state(group(visit(0)))})
    parts = {"prefill": 1.0, "sampling": 2.0}
    alive = {"seconds": 10.0, "idle_s": 4.0, "tokens": 100.0}
    channel_of(sampler, 0).says({"alive": alive, "spent": parts, "memory": held})
    channel_of(sampler, 0).says({"loaded": 0, "dtype": "float32", "logged": {}})
    sampler.poll()
    sampler.publish({}, [], 1)
    channel_of(sampler, 0).says({"loaded": 1, "dtype": "float32", "logged": {}})
    sampler.poll()
    sampler.publish({}, [], 2)
    channel_of(sampler, 1).says(None)
    sampler.poll()
    found = sampler.metrics()
    memory = {"memory_mib": 321, "gpu_memory_gib": 3.5}
    own = {"restarts": 0, "groups": 1, "lag": 0, "idle": 0.4, "tokens_per_s": 10} | memory
    assert {k: v for k, v in found.items() if k.startswith("sampler/0/")} == {
        f"sampler/0/{k}": v for k, v in own.items()
    }
    assert {k: v for k, v in found.items() if k.startswith("sampler/1/")} == {
        "sampler/1/restarts": 1,
        "sampler/1/groups": 0,
        "sampler/1/lag": 1,
    }
    assert (found["sampler/ready"], found["idle/sampler"]) == (1, 0.4)
    spent_on = {"total": 10, "waiting": 4, "prefill": 1, "sampling": 2}
    assert {k: v for k, v in found.items() if k.startswith("sampler/seconds/")} == {
        f"sampler/seconds/{k}": v for k, v in spent_on.items()
    }
    assert sampler.nodes == {"sampler/0": "here", "sampler/1": "here"}
    spent = {"seconds": 4.0, "idle_s": 1.0, "tokens": 0}
    channel_of(sampler, 0).says({"alive": spent, "spent": parts, "memory": held | {"memory_mib": 300.0}})
    sampler.poll()
    again = sampler.metrics()
    assert (again["sampler/0/idle"], again["sampler/0/tokens_per_s"], again["sampler/0/memory_mib"]) == (0.25, 0, 300)
    assert (again["sampler/0/groups"], again["sampler/1/restarts"]) == (0, 0)


def test_gpu_memory_of_a_process_is_known_where_it_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_gib() == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**29)
    assert gpu_gib() == {"gpu_memory_gib": 1.5}
    rank = Rank(0, 1, 1, "", gpu=False, private={})
    ranks = SimpleNamespace(
        world=2,
        all=lambda name, by_rank: [getattr(rank, name)() for _ in by_rank],
        same=lambda name: [{"optimizer": 1.0}, {"optimizer": 9.0}],
    )
    found = FsdpLearner(ranks, Sizes(1, 1, 1, None), "float32", {}, read=True).metrics()  # type: ignore[arg-type]
    assert found["rank/1/gpu_memory_gib"] == 1.5
    assert found["rank/0/memory_mib"] > 50
    assert found["seconds/update/optimizer"] == 1.0, "rank 0's"


def test_the_version_is_the_oldest_that_is_known(sampler: SamplerPool) -> None:
    for slot in range(2):
        channel_of(sampler, slot).says({"loaded": 0, "dtype": "float32", "logged": {}})
    sampler.poll()
    sampler.publish({}, [], 1)
    assert sampler.version == 0
    channel_of(sampler, 0).says({"loaded": 1, "dtype": "float32", "logged": {"mine": 2.0}})
    sampler.poll()
    assert sampler.version == 0
    channel_of(sampler, 1).says({"loaded": 1, "dtype": "float32", "logged": {"mine": 4.0}})
    sampler.poll()
    assert sampler.version == 1
    assert sampler.logged()["mine"] == 3.0


def test_a_sampler_that_starts_holds_nobody_up(sampler: SamplerPool) -> None:
    """It is sent no weights until its engine is built, and then the newest; after that it counts like the others."""
    starts = sampler._members[1]
    starts.stage = Stage.PLACED
    for version in (1, 2, 3):
        sampler.publish({}, [], version)
        channel_of(sampler, 0).says({"loaded": version, "dtype": "float32", "logged": {}})
        sampler.poll()
        assert sampler.version == version
    assert versions_sent(sampler, 1) == []
    channel_of(sampler, 1).says({"built": True})
    sampler.poll()
    assert versions_sent(sampler, 1) == [3]
    assert sampler.metrics()["sampler/1/lag"] <= 1
    sampler.publish({}, [], 4)
    channel_of(sampler, 0).says({"loaded": 4, "dtype": "float32", "logged": {}})
    sampler.poll()
    assert versions_sent(sampler, 1) == [3, 4]
    assert sampler.version == 3, "its first jobs may have tokens of version 3"


def versions_sent(sampler: SamplerPool, slot: int) -> list[int]:
    """Versions of the weights that a sampler was sent, with its start or later."""
    told = [message.get("start", message) for message in channel_of(sampler, slot).told]
    return [message["version"] for message in told if "weights" in message]


def test_a_sampler_that_freezes_while_it_starts_is_noticed_like_any_other(sampler: SamplerPool) -> None:
    starts, waits = sampler._members[1], channel_of(sampler, 1)
    starts.stage = Stage.PLACED
    starts.last_progress_at = time.monotonic()
    waits.says({"busy": True})
    sampler.poll()
    starts.last_message_at -= sampler.options.timeout_s - 5
    sampler.poll()
    assert sampler._members[1] is starts
    starts.last_message_at -= 10
    sampler.poll()
    assert sampler._members[1] is not starts
    assert waits.killed


def test_a_long_start_is_waited_for_by_the_bytes_of_the_weights(sampler: SamplerPool) -> None:
    """28 GB at 10 MB/s are 2,800 s, on top of `timeout_s`. What hangs for longer is replaced though it answers."""
    starts, waits = sampler._members[1], channel_of(sampler, 1)
    starts.stage = Stage.PLACED
    sampler._transport.bytes = 28_000_000_000
    for seconds, there in ((3_000, True), (3_200, False)):
        starts.last_progress_at = time.monotonic() - seconds
        waits.says({"busy": True})
        sampler.poll()
        assert (sampler._members[1] is starts) == there


def test_what_landed_is_not_lost_when_the_samplers_are(sampler: SamplerPool) -> None:
    sampler._landed = [group(visit(0))]
    for attempt in range(3):
        channel_of(sampler, 1).says({"refused": "model: '/m' is missing"})
        if attempt < 2:
            sampler._receive(wait=False)
    with pytest.raises(SamplersLostError):
        sampler.poll()
    assert [landed.visit.number for landed in sampler._landed] == [0]


@pytest.mark.parametrize(("least", "ended"), [(2, True), (1, False)])
def test_a_sampler_that_keeps_refusing_is_given_up_where_fewer_are_enough(
    sampler: SamplerPool, monkeypatch: pytest.MonkeyPatch, least: int, ended: bool
) -> None:
    monkeypatch.setattr(PoolOptions, "least", least)
    sampler.launch(job(0))
    sampler.launch(job(1))
    for attempt in range(3):
        channel_of(sampler, 1).says({"refused": "model: '/m' is missing"})
        if attempt < 2:
            assert sampler.poll() == []
            assert sampler._members[1].consecutive_failures == attempt + 1
        elif ended:
            with pytest.raises(SamplersLostError, match=r"sampler 1 .*refused \(model: '/m' is missing\)\n3 times"):
                sampler.poll()
        else:
            with pytest.warns(UserWarning, match=r"'/m' is missing(.|\n)*the run goes on with 1 of 2 samplers"):
                sampler.poll()
            assert len(sampler._members) == 1
            assert len(sampler._members[0].flights) == 2, "the other has its work"
    assert sampler.pending == 2
