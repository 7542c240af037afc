"""What the learner makes of its samplers' messages and deaths, without any process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from winnow.base.weights import StateWeights
from winnow.methods.gate import GateContext, NamedRule, rule_from
from winnow.methods.gate.base import Overrides
from winnow.methods.gate.random_cut import RandomCut
from winnow.run.serve import alone_on
from winnow.sampler import Processes, SamplersLostError, pool
from winnow.sampler.base import SamplerRefusedError
from winnow.sampler.codec import group_state, job_state
from winnow.sampler.handle import InFlightJob, Stage
from winnow.sampler.pool import SamplerPool
from winnow.sampler.weights import PublishedWeights
from winnow.types import Fate, Group

from .fake_samplers import HELD_OUT, channel_of, channel_of_member, evaluation, group, job, visit


def test_work_is_shared_and_comes_back_in_visit_order(sampler: SamplerPool) -> None:
    for number in range(4):
        sampler.launch(job(number))
    first, second = sampler._members
    assert [sorted(m.flights) for m in (first, second)] == [
        [("train", 0), ("train", 2)],
        [("train", 1), ("train", 3)],
    ]
    channel_of_member(second).says({"group": group_state(group(visit(3)))})
    channel_of_member(first).says({"group": group_state(group(visit(0)))})
    assert [g.visit.number for g in sampler.poll()] == [0, 3]
    assert sampler.pending == 2


def test_a_late_or_double_result_is_dropped(sampler: SamplerPool) -> None:
    sampler.launch(job(0))
    child = sampler._members[0]
    for _ in range(2):
        channel_of_member(child).says({"group": group_state(group(visit(0)))})
    assert len(sampler.poll()) == 1
    sampler.launch(job(1))
    channel_of_member(child).says(None)
    assert sampler.poll() == []
    channel_of_member(child).says({"group": group_state(group(visit(1)))})
    assert sampler.poll() == [], "what a replaced sampler still says does not count"
    assert sampler.pending == 1


def test_a_dead_samplers_groups_are_launched_once_more_then_failed(sampler: SamplerPool) -> None:
    sampler.launch(job(0, 3))
    sampler.publish({}, [], 1)
    channel_of(sampler, 0).says(None)
    assert sampler.poll() == []
    assert channel_of(sampler, 1).told[-1] == {"launch": job_state(job(0, 3))}, "at once, on another"
    again = sampler._members[0]
    assert again.version == 1
    (start,) = channel_of(sampler, 0).told
    assert start["start"]["version"] == 1, "the newest weights"
    channel_of(sampler, 1).says(None)
    (failed,) = sampler.poll()
    assert [r.fate for r in failed.rollouts] == [Fate.FAILED] * 3
    assert "two samplers" in failed.rollouts[0].reason
    assert sampler.pending == 0
    assert sampler.metrics()["sampler/redispatched"] == 1


def test_a_sampler_that_never_began_does_not_count(sampler: SamplerPool) -> None:
    sampler.launch(job(0))
    for slot in (0, 1, 0):
        sampler._members[slot].stage = Stage.BUILT
        channel_of(sampler, slot).says(None)
        assert sampler.poll() == []
    assert sampler.pending == 1


def test_deaths_in_a_row_end_the_run_but_a_group_in_between_forgives(sampler: SamplerPool) -> None:
    for number in range(3):
        channel_of(sampler, 0).says(None)
        sampler.poll()
        sampler._members[0].flights = {("train", number): InFlightJob(job(number))}
        channel_of(sampler, 0).says({"group": group_state(group(visit(number)))})
        sampler.poll()
    for _ in range(2):
        channel_of(sampler, 0).says(None)
        sampler.poll()
    channel_of(sampler, 0).says(None)
    with pytest.raises(SamplersLostError, match=r"sampler 0 on here exited(.|\n)*3 times in a row"):
        sampler.poll()


def test_silence_is_death(sampler: SamplerPool) -> None:
    silent = sampler._members[1]
    silent.last_message_at = 0.0
    sampler.poll()
    assert channel_of_member(silent).killed
    assert sampler._members[1] is not silent
    assert sampler.metrics()["sampler/restarts"] == 1


def test_what_is_in_flight_at_the_end_comes_back_whatever_the_samplers_do(sampler: SamplerPool) -> None:
    for number in range(3):
        sampler.launch(job(number))
    first, second = sampler._members
    channel_of_member(first).says({"stopped": [group_state(group(visit(0)))]})
    channel_of_member(second).says(None)
    groups = sampler.close()
    assert sorted(g.visit.number for g in groups) == [0, 1, 2]
    assert all(channel_of_member(m).killed for m in (first, second))
    assert sampler.close() == []


def test_a_lost_sampler_does_not_hold_up_the_end(sampler: SamplerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "STOP_S", 60.0)
    for _ in range(3):
        channel_of(sampler, 0).says(None)
        if sampler._members[0].consecutive_failures < 2:
            sampler.poll()
    with pytest.raises(SamplersLostError):
        sampler.poll()
    (left,) = sampler._members
    channel_of_member(left).says({"stopped": []})
    channel_of_member(left).says(None)
    assert sampler.close() == []
    assert channel_of_member(left).killed


def test_new_groups_go_to_samplers_that_work(sampler: SamplerPool) -> None:
    sampler._members[0].stage = Stage.BUILT
    for number in range(3):
        sampler.launch(job(number))
    assert [len(member.flights) for member in sampler._members] == [0, 3]


def test_only_the_newest_weights_are_kept_on_disk(made: Any, tmp_path: Path) -> None:
    sampler = made(transport=PublishedWeights(tmp_path / ".weights"))
    for version in range(1, 12):
        sampler.publish({}, [], version)
    assert sorted(int(p.stem) for p in (tmp_path / ".weights").iterdir()) == [9, 10, 11]
    sampler.close()
    assert not (tmp_path / ".weights").exists()


def test_weights_of_another_run_are_left_alone_until_the_first_are_written(tmp_path: Path) -> None:
    """A second start of a run, which its lock refuses, is built and closed before that."""
    theirs = tmp_path / ".weights" / "7.safetensors"
    theirs.parent.mkdir()
    theirs.write_bytes(b"")
    second = PublishedWeights(theirs.parent)
    second.remove()
    assert theirs.exists()
    second.write(StateWeights({}), 0)
    assert [file.name for file in theirs.parent.iterdir()] == ["0.safetensors"]


def test_groups_that_failed_with_a_sampler_come_back_although_the_next_ends_the_run(sampler: SamplerPool) -> None:
    sampler.launch(job(0))
    first, second = sampler._members
    first.flights = {key: sent._replace(again=True) for key, sent in first.flights.items()}
    second.consecutive_failures = 3
    for member in (first, second):
        member.last_message_at = 0.0
    sampler._needed = 2
    with pytest.raises(SamplersLostError):
        sampler.poll()
    (failed,) = sampler.close()
    assert failed.visit.number == 0


def test_weights_travel_in_the_type_of_the_engines(made: Any, tmp_path: Path) -> None:
    """In float32 until all samplers have told theirs, and where one computes in it."""
    embedding, matrix, norm = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    weights = {embedding: torch.randn(4, 3), matrix: torch.randn(4, 3), norm: torch.randn(3)}
    adapter = {"model.layers.0.mlp.up_proj.lora_A.weight": torch.randn(2, 3)}
    transport = PublishedWeights(tmp_path / ".weights")
    sampler = made(transport=transport)
    for types, half in (("unknown", "unknown"), False), (("bfloat16", "float32"), False), (("bfloat16",) * 2, True):
        for member, dtype in zip(sampler._members, types, strict=True):
            member.dtype = dtype
        sampler.publish(StateWeights(weights | adapter), [], transport.version + 1)
        found = load_file(transport.message()["weights"])
        expected = weights | adapter | ({matrix: weights[matrix].bfloat16()} if half else {})
        assert found.keys() == expected.keys()
        assert all(found[name].dtype == expected[name].dtype for name in expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_samplers_are_told_weights_and_rules_together(sampler: SamplerPool) -> None:
    rule = RandomCut(k=3, share=0.4).build(GateContext("random", 7)).rule()
    named = NamedRule("random", rule, Overrides("random", 7, 0.25))
    sampler.publish({}, [named], 1)
    for slot in range(2):
        told = json.loads(json.dumps(channel_of(sampler, slot).told[-1]))
        assert (told["weights"], told["version"]) == ("somewhere", 1)
        assert [rule_from(state, type(rule)) for state in told["rules"]] == [named]
    channel_of(sampler, 0).says(None)
    sampler.poll()
    assert channel_of(sampler, 0).told[0]["start"]["rules"] == told["rules"], "one that is started later, too"


def test_jobs_come_back_in_order_while_groups_for_training_wait_for_poll(sampler: SamplerPool) -> None:
    sampler.launch(job(0))
    sampler.launch(job(1))
    first, second = (channel_of(sampler, slot) for slot in range(2))
    for number, channel in ((2, first), (0, first), (3, second), (1, second)):  # 0 and 2 go to the first
        channel.says({"group": group_state(group(visit(number, HELD_OUT), "eval"))})
        if number == 0:
            channel.says({"group": group_state(group(visit(0)))})
    found = sampler.run(evaluation(4))
    assert [(g.visit.number, g.purpose, g.prompt.id) for g in found] == [(i, "eval", f"t{i}") for i in range(4)]
    assert sampler.pending == 2, "one landed, one in flight; both are still to be polled"
    assert [(g.visit.number, g.purpose, g.prompt.id) for g in sampler.poll()] == [(0, "train", "p0")]
    second.says({"group": group_state(group(visit(1)))})
    assert [g.visit.number for g in sampler.poll()] == [1]
    assert sampler.pending == 0


def test_equal_visit_numbers_of_two_purposes_are_two_groups(sampler: SamplerPool) -> None:
    sampler.launch(job(0))
    sampler._members[1].stage = Stage.BUILT  # everything goes to the first
    first = channel_of(sampler, 0)
    first.says({"group": group_state(group(visit(0, HELD_OUT), "eval"))})
    (found,) = sampler.run(evaluation(1))
    assert (found.prompt.id, sampler.pending) == ("t0", 1)


def test_a_job_whose_samplers_die_fails_and_does_not_hang(sampler: SamplerPool) -> None:
    for slot in range(2):
        channel_of(sampler, slot).says(None)
    (found,) = sampler.run(evaluation(1, size=3))
    assert [r.fate for r in found.rollouts] == [Fate.FAILED] * 3
    assert found.purpose == "eval"
    assert sampler.poll() == []


def test_few_environments_are_alive_beside_training(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_LIVE", 4)
    sampler, most = made(max_turns=5), 0
    sampler.launch(job(8, size=100))  # training does not count

    def heard(*, wait: bool) -> list[Group]:
        nonlocal most
        flying = [s.job for m in sampler._members for s in m.flights.values() if s.job.purpose == "eval"]
        most = max(most, sum(other.size for other in flying))
        for member in sampler._members:
            member.flights = {k: s for k, s in member.flights.items() if s.job.purpose == "train"}
        return [group(other.visit, "eval") for other in flying]

    monkeypatch.setattr(sampler, "_receive", heard)
    assert [g.visit.number for g in sampler.run(evaluation(9, size=3))] == list(range(9))
    assert most == 6, "two groups of three: four environments for each of two samplers"
    assert len(sampler.run(evaluation(1, size=50))) == 1, "one group at least"


@pytest.mark.parametrize("where", ["poll", "run"])
def test_a_sampler_that_refuses_ends_the_run_where_no_other_works(sampler: SamplerPool, where: str) -> None:
    sampler._members[0].stage = Stage.BUILT
    channel_of(sampler, 1).says({"refused": "gate divergence needs what is not there"})
    with pytest.raises(SamplerRefusedError, match="gate divergence needs what is not there"):
        sampler.poll() if where == "poll" else sampler.run(evaluation(2))
    assert issubclass(SamplerRefusedError, SamplersLostError), "the loop saves, and says why"


def test_samplers_take_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler sees its own GPU alone, whatever the driver was shown."""
    options = Processes(samplers=3, devices=("cuda:1", "cuda:2"))
    assert [options.device_of(slot, "auto") for slot in range(3)] == ["cuda:1", "cuda:2", "cuda:1"]
    assert Processes().device_of(0, "auto") is None
    for visible, shown in ((None, "1"), ("4,6", "6")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert alone_on("cuda:1") == "cuda"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == shown
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert alone_on("cuda:0") == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5", "the only one that it sees, not the machine's first"
    assert alone_on("cpu") == "cpu"
    with pytest.raises(ValueError, match="devices: expected cpu, cuda or cuda:N, not 'gpu1'"):
        Processes(devices=("gpu1",))
    with pytest.raises(ValueError, match="devices: 2 for 1 sampler; raise samplers"):
        Processes(devices=("cuda:1", "cuda:2"))
