"""Samplers and ranks elsewhere: what is waited for, where they write, what they log, which cluster they join."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from winnow.base import cluster
from winnow.base.errors import ConfigError
from winnow.config import RunConfig, validate
from winnow.learner.base import Sizes
from winnow.learner.fsdp import learner as learner_module
from winnow.learner.fsdp.learner import FsdpLearner
from winnow.rollout import answers
from winnow.rollout.answers import Answers, Awaited
from winnow.run import preflight
from winnow.run.preflight import PROBED, check_agreement, require_places
from winnow.run.resolved import Options
from winnow.sampler.handle import Stage
from winnow.sampler.pool import SamplerPool
from winnow.types import Group, Job

from .fake_samplers import channel_of


@pytest.mark.parametrize("independent", [True, False])
def test_life_is_shown_while_an_environment_is_waited_for(monkeypatch: pytest.MonkeyPatch, independent: bool) -> None:
    """A queue of slow resets may take longer than the silence after which a sampler counts as stuck."""
    monkeypatch.setattr(answers, "PATIENCE_S", 0.05)
    seen: list[float] = []
    waiting = Answers(lambda: seen.append(time.monotonic()))
    answer: Future[Any] = Future()
    one: Any = None
    waiting.pending.append(Awaited(one, one, answer, 0, independent))
    timer = Timer(0.3, answer.set_result, ["a start"])
    timer.start()
    taken = waiting.take(0)
    timer.join()
    assert len(seen) >= (2 if independent else 1)
    assert [each.answer for each in taken] == ([answer] if independent else [])


def test_a_start_is_waited_for_by_the_size_of_the_model(sampler: SamplerPool) -> None:
    """Adapters alone are published, and the whole model is read."""
    starts, waits = sampler._members[1], channel_of(sampler, 1)
    starts.stage = Stage.PLACED
    sampler._transport.bytes, sampler._model_bytes = 20_000_000, 28_000_000_000
    for seconds, there in ((3_000, True), (3_200, False)):
        starts.last_progress_at = time.monotonic() - seconds
        waits.says({"busy": True})
        if there:
            sampler.poll()
        else:
            with pytest.warns(UserWarning, match=r"busy starting .*raise sync\.timeout_s"):
                sampler.poll()
        assert (sampler._members[1] is starts) == there


def test_what_rewards_log_elsewhere_is_no_metric_of_the_sampler(sampler: SamplerPool) -> None:
    """The run leaves out names that it has itself, and can tell only if the two come apart."""
    for slot, value in ((0, 2.0), (1, 4.0)):
        channel_of(sampler, slot).says({"loaded": 0, "dtype": "float32", "logged": {"reward": value}})
    sampler.poll()
    assert "reward" not in sampler.metrics()
    assert sampler.logged() == {"reward": 3.0}
    assert sampler.logged() == {}


def ranks_that_write(folder: Path, elsewhere: Path) -> Any:
    """Rank 0 writes to the given folder; rank 1, on another machine, to a folder of the same name."""

    def same(name: str, *args: Any) -> list[Any]:
        if name == "sees":
            return [args[0].is_file(), (elsewhere / args[0].name).is_file()]
        written = [["model/config.json"], ["optimizer/shard-2"] if name == "save" else []]
        for root, files in zip((folder, elsewhere), written, strict=True):
            for file in files:
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                (root / file).touch()
        return written

    return SimpleNamespace(world=2, same=same, close=lambda: None)


def test_ranks_whose_files_are_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "SEEN_S", 0.2)
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / "config.json").touch()
    learner = FsdpLearner(ranks_that_write(here, there), Sizes(1, 1, 1, None), "float32", {}, read=True)
    with pytest.raises(ConfigError, match=r"output_dir: rank 1 does not see .*here; all machines with ranks must have"):
        learner.require_shared(here / "config.json")
    with pytest.raises(ConfigError, match=r"what rank 1 wrote, optimizer/shard-2, is not in .*here"):
        learner.save(here)
    learner.export(here)
    shared = FsdpLearner(ranks_that_write(here, here), Sizes(1, 1, 1, None), "float32", {}, read=True)
    shared.require_shared(here / "config.json")
    shared.save(here)


def run_on(tmp_path: Path, **options: Any) -> Any:
    c: RunConfig = validate({"model": "m", "env": "countdown", "output_dir": str(tmp_path), **options})
    return SimpleNamespace(config=c, options=Options.from_config(c), engine=None, device=SimpleNamespace(type="cpu"))


def test_samplers_and_ranks_join_one_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []
    monkeypatch.setattr(cluster, "join", lambda *args: joined.append(args[:2]))
    for part in ("_places", "_nodes", "_not_free", "does_not_fit"):
        monkeypatch.setattr(preflight, part, lambda *_: {})
    for sync, learner, expected in (
        ({}, {"ray_address": "auto"}, ("learner", "auto")),
        ({"ray_address": "auto"}, {}, ("sync", "auto")),
        ({}, {}, ("sync", None)),
    ):
        require_places(run_on(tmp_path, sync={"name": "ray"} | sync, learner={"name": "fsdp"} | learner))
        assert joined.pop() == expected
    both = {"sync": {"name": "ray", "ray_address": "auto"}, "learner": {"name": "fsdp", "ray_address": "a:1"}}
    with pytest.raises(ConfigError, match="ray_address: sync: auto and learner: a:1; samplers and ranks share one"):
        require_places(run_on(tmp_path, **both))


def test_every_sampler_is_compared_with_the_learner() -> None:
    asked: list[Job] = []

    def roll_out(jobs: Any) -> list[Group]:
        asked.extend(jobs)
        return []

    prompts: Any = [SimpleNamespace(id=str(i)) for i in range(20)]
    learner: Any = None
    for samplers, n in ((1, PROBED), (6, 6)):
        with pytest.raises(ConfigError, match="none of the first"):
            check_agreement(prompts, roll_out, learner, lambda: "float32", samplers)
        assert len(asked) == n
        asked.clear()
