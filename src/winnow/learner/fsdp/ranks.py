"""Ranks as Ray actors in one placement group, from the driver's side: all do the same, or none goes on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ...base import cluster
from ...base.weights import TensorSpec
from ...config import RunConfig
from ..base import LearnerLostError, Policy, Sizes
from .rank import Rank

START_S = 120.0
"""Most that a cluster may take to find room and to start the processes."""


class Ranks:
    """`world` actors. A rank that fails, dies or is silent for `timeout_s` ends all of them: LearnerLostError."""

    def __init__(
        self, world: int, threads: int, num_gpus: float, timeout_s: float, private: Mapping[str, str] | None = None
    ) -> None:
        """`private`: variables for the ranks to set."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.world = world
        self.timeout_s = timeout_s
        self._actors: list[Any] = []
        self._place = placement_group([{"CPU": threads, "GPU": num_gpus}] * world, strategy="PACK")
        try:
            if not self._place.wait(START_S):
                raise LearnerLostError(f"the cluster found no room for {world} ranks within {START_S:g} s")
            for rank in range(world):
                where = PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=rank)
                actor = ray.remote(Rank).options(
                    num_cpus=threads,
                    num_gpus=num_gpus,
                    max_restarts=0,
                    max_task_retries=0,
                    scheduling_strategy=where,
                    runtime_env=cluster.environment(threads),
                )
                gpu = num_gpus > 0
                self._actors.append(actor.remote(rank, world, threads, os.getcwd(), gpu, dict(private or {})))
            host, port = self.all("listen", [(timeout_s,)] * world)[0]
            self.all("join", [(host, port, timeout_s)] * world)
        except BaseException:
            self.close()
            raise

    def build(
        self, policy: Policy, config: RunConfig, fsdp_size: int | None = None
    ) -> tuple[Sizes, str, Mapping[str, TensorSpec]]:
        """Cut the model: sizes, precision and weights of the whole."""
        import ray

        found = self.all("build", [(ray.put(policy), config, fsdp_size)] * self.world)[0]
        return found["sizes"], found["precision"], found["specs"]

    def same(self, name: str, *args: Any) -> list[Any]:
        """What a method of the learner gives on each rank, with the same arguments for all."""
        return self.each(name, [args] * self.world)

    def each(self, name: str, by_rank: Sequence[tuple[Any, ...]], **named: Any) -> list[Any]:
        """The same with arguments of its own for every rank; `named` are for all."""
        return self.all("call", [(name, *args) for args in by_rank], **named)

    def all(self, method: str, by_rank: Sequence[tuple[Any, ...]], **named: Any) -> list[Any]:
        """Answers of all ranks, in order. What one of them raises about numbers is raised here."""
        import ray
        from ray.exceptions import ObjectStoreFullError, OutOfDiskError

        harmless = FloatingPointError, ValueError, ObjectStoreFullError, OutOfDiskError  # no rank waits for another
        asked = [getattr(a, method).remote(*args, **named) for a, args in zip(self._actors, by_rank, strict=True)]
        answers: dict[Any, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(answers) < len(asked):
            waiting = [reference for reference in asked if reference not in answers]
            ready, _ = ray.wait(waiting, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                silent = ", ".join(str(asked.index(reference)) for reference in waiting)
                self._lost(f"rank {silent} said nothing for {self.timeout_s:g} s")
            for reference in ready:
                try:
                    answers[reference] = ray.get(reference, timeout=self.timeout_s)
                except Exception as error:
                    cause = getattr(error, "cause", None)
                    if isinstance(cause, harmless):
                        raise cause from None
                    kind, said = type(error).__name__, str(error).strip()[-2000:]
                    self._lost(f"rank {asked.index(reference)} failed: {kind}: {said}")
        return [answers[reference] for reference in asked]

    def _lost(self, what: str) -> NoReturn:
        self.close()
        raise LearnerLostError(f"learner: {what}")

    def close(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            with contextlib.suppress(Exception):  # it may be gone
                ray.kill(actor, no_restart=True)
        self._actors = []
        with contextlib.suppress(Exception):
            remove_placement_group(self._place)
