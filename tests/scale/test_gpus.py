"""Which GPU a sampler, a rank and the learner of one process get: Ray believes in two, there need be none."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from winnow import Trainer
from winnow.base import cluster
from winnow.base.errors import ConfigError
from winnow.config import RunConfig, validate
from winnow.engine import VllmOptions
from winnow.learner import Fsdp
from winnow.learner.fsdp.ranks import Ranks
from winnow.run.resolved import Machine
from winnow.sampler import Ray
from winnow.sampler.ray import ActorChannel

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> Iterator[None]:
    ray.init("local", num_cpus=8, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def config(**changes: Any) -> RunConfig:
    return validate({"model": "given", "env": "countdown"} | changes)


def visible(actors: Sequence[Any]) -> list[str]:
    """GPUs that the processes see, in order."""
    asked = [actor.__ray_call__.remote(lambda _: os.environ.get("CUDA_VISIBLE_DEVICES", "all")) for actor in actors]
    found: list[str] = ray.get(asked, timeout=180)
    return found


def samplers(n: int) -> list[ActorChannel]:
    options = Ray(samplers=n)
    return [
        ActorChannel(queue.SimpleQueue(), replace(options, num_gpus=options.gpus("auto", None)), {}, "winnow.run.serve")
        for _ in range(n)
    ]


def test_samplers_have_a_gpu_each() -> None:
    channels = samplers(2)
    try:
        assert sorted(visible([channel._actor for channel in channels])) == ["0", "1"]
    finally:
        for channel in channels:
            channel.kill()


@pytest.mark.parametrize("mine", [0, 1])
def test_the_gpu_of_the_learner_is_not_given_to_a_sampler(mine: int) -> None:
    held = cluster.hold_gpu(mine)
    (channel,) = samplers(1)
    try:
        assert visible([channel._actor]) == [str(1 - mine)]
        with pytest.raises(cluster.ClusterError, match=f"device: cuda:{1 - mine}: another job of the Ray cluster"):
            hold_soon(1 - mine)
    finally:
        channel.kill()
        cluster.release(held)
    (channel,) = samplers(1)
    try:
        assert visible([channel._actor]) == ["0"]
    finally:
        channel.kill()


def hold_soon(index: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "HOLD_S", 5.0)
        cluster.hold_gpu(index)


def test_ranks_have_a_gpu_each() -> None:
    assert Fsdp().gpus("auto") == 1
    ranks = Ranks(world=2, threads=1, num_gpus=1, timeout_s=120)
    try:
        assert sorted(visible(ranks._actors)) == ["0", "1"]
    finally:
        ranks.close()


def test_without_a_gpu_samplers_and_ranks_compute_on_the_cpu() -> None:
    assert Ray(num_gpus=0).device_of(0, "auto") == "cpu"
    assert Ray(num_gpus=1).device_of(0, "cuda:1") == "cuda"
    assert Ray(num_gpus=1).device_of(0, "auto") == "auto"
    assert Ray().gpus("cpu", None) == Fsdp().gpus("cpu") == 0
    assert Ray().gpus("auto", VllmOptions(tensor_parallel_size=2)) == 2
    with pytest.raises(ConfigError, match=r"num_gpus: too few for engine: tensor_parallel_size \(1 of 2\)"):
        Ray(num_gpus=1).gpus("auto", VllmOptions(tensor_parallel_size=2))
    with pytest.raises(ValueError, match="num_gpus=0: ranks without a GPU cannot use device: cuda"):
        Fsdp(num_gpus=0).gpus("cuda")
    with pytest.raises(ValueError, match=r"num_gpus must be 0 or 1, not 0\.5"):
        Fsdp(num_gpus=0.5)


def test_the_gpu_of_the_learner_counts(tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    there = Machine(torch.device("cuda"), threads=1, memory=64 << 30, gpu_memory=80 << 30)
    monkeypatch.setattr(Machine, "here", lambda device, **_: there)
    needs = "sync: 2 samplers need 2 CPUs and 2 GPUs, 1 learner need 0 CPUs and 1 GPUs, and the cluster has 8 CPUs"
    with pytest.raises(ConfigError, match=needs):
        Trainer(config=tiny_config | {"sync": {"name": "ray", "samplers": 2}, "max_lag": 1, "correction": "truncate"})
