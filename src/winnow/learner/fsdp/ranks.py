"""The driver's handle on ranks: Ray actors in one placement group that all run, or all stop."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ...base import cluster
from ...base.weights import transfer_s
from ..base import LearnerLostError, Policy
from ..context import LearnerContext
from .rank import Built, Rank

START_S = 120.0
"""Maximum time for the cluster to place and start the processes."""
LOOK_S = 1.0
"""Seconds between pulses of ranks that run a call."""


class Ranks:
    """`world` actors. If a rank fails, exits or is silent for `timeout_s`, all stop with LearnerLostError.

    A call may take any time: ranks answer pulses meanwhile, from another thread. The call ends when no rank makes
    progress for `timeout_s` plus the allowed time to move `size` bytes, the model's.
    """

    def __init__(
        self,
        world: int,
        threads: int,
        num_gpus: float,
        timeout_s: float,
        size: int = 0,
        private: Mapping[str, str] | None = None,
    ) -> None:
        """`private`: environment variables that the ranks set."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.world = world
        self.timeout_s, self.size = timeout_s, size
        self._actors: list[Any] = []
        self._started = False
        self._place = placement_group([{"CPU": threads, "GPU": num_gpus}] * world, strategy="PACK")
        try:
            if not self._place.wait(START_S):
                raise LearnerLostError(f"the cluster found no room for {world} ranks within {START_S:g} s")
            for rank in range(world):
                where = PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=rank)
                actor = remote_rank().options(
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
            self._started = True
            limit_s = 2 * timeout_s + transfer_s(size)  # the pulse names the stuck rank, so it must fire first
            self.all("join", [(host, port, limit_s)] * world)
        except BaseException:
            self.close()
            raise

    def build(self, policy: Policy, context: LearnerContext, fsdp_size: int | None = None) -> Built:
        """Shard the model."""
        import ray

        built: Built = self.all("build", [(ray.put(policy), context, fsdp_size)] * self.world)[0]
        return built

    def same(self, name: str, *args: Any) -> list[Any]:
        """Return each rank's result of a learner method, called with the same arguments on all ranks."""
        return self.each(name, [args] * self.world)

    def each(self, name: str, by_rank: Sequence[tuple[Any, ...]], **named: Any) -> list[Any]:
        """Return each rank's result of a learner method, with separate arguments per rank; `named` go to all."""
        return self.all("call", [(name, *args) for args in by_rank], **named)

    def all(self, method: str, by_rank: Sequence[tuple[Any, ...]], **named: Any) -> list[Any]:
        """Return the results of all ranks, in order. Re-raises numerical errors of a rank."""
        import ray
        from ray.exceptions import ObjectStoreFullError, OutOfDiskError

        harmless = FloatingPointError, ValueError, ObjectStoreFullError, OutOfDiskError  # no rank waits on another
        asked = [getattr(a, method).remote(*args, **named) for a, args in zip(self._actors, by_rank, strict=True)]
        answers: dict[Any, Any] = {}
        pulses = Pulses(self._actors)
        while len(answers) < len(asked):
            waiting = [reference for reference in asked if reference not in answers]
            ready, _ = ray.wait(waiting, timeout=min(LOOK_S, self.timeout_s))
            if not ready:
                busy = [asked.index(reference) for reference in waiting]
                silent_s = self.timeout_s if self._started else max(self.timeout_s, START_S)
                if trouble := pulses.look(busy, silent_s, silent_s + transfer_s(self.size)):
                    self._lost(trouble)
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
            with contextlib.suppress(Exception):  # it may have exited
                ray.kill(actor, no_restart=True)
        self._actors = []
        with contextlib.suppress(Exception):
            remove_placement_group(self._place)


class Pulses:
    """Liveness of ranks that run a call, from its start."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors
        self._asked: dict[int, Any] = {}
        """Pending pulse, by rank."""
        self._places: dict[int, int] = {}
        self._heard = [time.monotonic()] * len(actors)
        self._moved = time.monotonic()

    def look(self, busy: Sequence[int], silent_s: float, stuck_s: float) -> str:
        """Return the problem of the `busy` ranks, or an empty string."""
        import ray

        for rank in busy:
            if rank in self._asked and ray.wait([self._asked[rank]], timeout=0)[0]:
                with contextlib.suppress(ray.exceptions.RayError):  # it exited; its call reports the error
                    self._note(rank, ray.get(self._asked.pop(rank), timeout=LOOK_S))
            if rank not in self._asked:
                self._asked[rank] = self._actors[rank].pulse.remote()
        now = time.monotonic()
        if silent := [rank for rank in busy if now - self._heard[rank] > silent_s]:
            return f"rank {_listed(silent)} said nothing for {silent_s:g} s"
        if now - self._moved > stuck_s:
            return f"rank {_listed(busy)} made no progress for {stuck_s:g} s"
        return ""

    def _note(self, rank: int, place: int) -> None:
        self._heard[rank] = time.monotonic()
        if self._places.get(rank) != place:
            self._places[rank], self._moved = place, self._heard[rank]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def remote_rank() -> Any:
    """Return the actor class, which answers pulses while it runs a call."""
    import ray

    class RankActor(Rank):
        pulse = ray.method(concurrency_group="pulse")(Rank.pulse)

    return ray.remote(concurrency_groups={"pulse": 1})(RankActor)
