"""Ranks: Ray actors in one placement group that all run, or all stop; and the driver's handle on them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...base import cluster, dotted
from ...base.machine import gpu_gib, keep_freed_memory, resident_mib
from ...base.weights import TensorSpec, transfer_s
from ...engine.loading import CPU, load_whole
from ..base import LearnerLostError, Policy, Sizes
from ..context import LearnerContext
from .sharded import ShardedLearner

START_S = 120.0
"""Maximum time for the cluster to place and start the processes."""
LOOK_S = 1.0
"""Seconds between pulses of ranks that run a call."""
Built = tuple[Sizes, str, Mapping[str, TensorSpec]]
"""Sizes, precision and specs of the whole model."""


class Rank:
    """One of `world` ranks, in a Ray process: joins the others and runs the driver's calls.

    `folder`: the driver's, so that relative paths match; `gpu`: whether Ray assigned one.
    """

    def __init__(self, rank: int, world: int, threads: int, folder: str, gpu: bool, private: Mapping[str, str]) -> None:
        os.environ.update(private)
        if os.path.isdir(folder):
            os.chdir(folder)
        torch.set_num_threads(threads)
        keep_freed_memory()
        self.rank, self.world = rank, world
        self.gpu = gpu and torch.cuda.is_available()  # an unassigned GPU may belong to another rank

    def listen(self, timeout_s: float) -> tuple[str, int] | None:
        """Return the rendezvous host and port: rank 0 binds the port from the start, so no process can take it."""
        import ray

        if self.rank:
            return None
        host = ray.util.get_node_ip_address()
        limit = timedelta(seconds=timeout_s)
        self.store = dist.TCPStore(host, 0, self.world, is_master=True, timeout=limit, wait_for_workers=False)
        return host, self.store.port

    def join(self, host: str, port: int, timeout_s: float) -> None:
        backend = "nccl" if self.gpu else "gloo"
        limit = timedelta(seconds=timeout_s)
        if self.rank:
            self.store = dist.TCPStore(host, port, self.world, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world, timeout=limit)

    def fetch_and_build(self, sent: list[Any], context: LearnerContext, fsdp_size: int | None, limit_s: float) -> Built:
        """Shard the policy that `sent` refers to; a list keeps Ray from fetching it before the call."""
        import ray

        return self.build(ray.get(sent[0], timeout=limit_s), context, fsdp_size)

    def build(self, policy: Policy, context: LearnerContext, fsdp_size: int | None) -> Built:
        for target in context.own_classes:  # a loss is sent with the names of their modules alone
            dotted.load(target)
        device = torch.device("cuda", torch.cuda.current_device()) if self.gpu else torch.device("cpu")
        model, reference = policy.model, policy.reference
        if policy.files is None:
            model = model.to(device)
        if policy.reference_files is not None:
            reference = load_whole(policy.reference_files, CPU).requires_grad_(False).eval()
        if reference is not None:
            reference = reference.to(device)
        self.learner = learner = ShardedLearner(
            model,
            context.distribution(policy),
            context.options_for(policy),
            reference,
            fsdp_size=fsdp_size,
            gradient_baselines=context.gradient_baselines,
            device=device,
            files=policy.files,
        )
        return learner.sizes, learner.precision, learner.weights().specs

    def memory(self) -> dict[str, float]:
        return {"memory_mib": resident_mib()} | gpu_gib()

    def pulse(self) -> int:
        """Return a hash of the positions of all other threads; it changes while the rank makes progress."""
        places = []
        for thread, last in sys._current_frames().items():
            frame: FrameType | None = last
            while thread != threading.get_ident() and frame is not None:
                places.append((id(frame), frame.f_lasti))
                frame = frame.f_back
        return hash(tuple(places))

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        """Return the result of a learner method."""
        return getattr(self.learner, name)(*args, **named)


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
                actor = remote_rank().options(**cluster.actor_options(threads, num_gpus, where))
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

        sent, limit_s = [ray.put(policy)], self.timeout_s + transfer_s(self.size)
        built: Built = self.all("fetch_and_build", [(sent, context, fsdp_size, limit_s)] * self.world)[0]
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
        pending = [getattr(a, method).remote(*args, **named) for a, args in zip(self._actors, by_rank, strict=True)]
        answers: dict[Any, Any] = {}
        pulses = Pulses(self._actors)
        while len(answers) < len(pending):
            waiting = [reference for reference in pending if reference not in answers]
            ready, _ = ray.wait(waiting, timeout=min(LOOK_S, self.timeout_s))
            if not ready:
                busy = [pending.index(reference) for reference in waiting]
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
                    kind, message = type(error).__name__, str(error).strip()[-2000:]
                    self._lost(f"rank {pending.index(reference)} failed: {kind}: {message}")
        return [answers[reference] for reference in pending]

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
        self._pulses: dict[int, Any] = {}
        """Pending pulse, by rank."""
        self._places: dict[int, int] = {}
        self._last_answer_at = [time.monotonic()] * len(actors)
        self._last_progress_at = time.monotonic()

    def look(self, busy: Sequence[int], silent_s: float, stuck_s: float) -> str:
        """Return the problem of the `busy` ranks, or an empty string."""
        import ray

        for rank in busy:
            if rank in self._pulses and ray.wait([self._pulses[rank]], timeout=0)[0]:
                with contextlib.suppress(ray.exceptions.RayError):  # it exited; its call reports the error
                    self._note(rank, ray.get(self._pulses.pop(rank), timeout=LOOK_S))
            if rank not in self._pulses:
                self._pulses[rank] = self._actors[rank].pulse.remote()
        now = time.monotonic()
        if silent := [rank for rank in busy if now - self._last_answer_at[rank] > silent_s]:
            return f"rank {_listed(silent)} said nothing for {silent_s:g} s"
        if now - self._last_progress_at > stuck_s:
            return f"rank {_listed(busy)} made no progress for {stuck_s:g} s"
        return ""

    def _note(self, rank: int, place: int) -> None:
        self._last_answer_at[rank] = time.monotonic()
        if self._places.get(rank) != place:
            self._places[rank], self._last_progress_at = place, self._last_answer_at[rank]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def remote_rank() -> Any:
    """Return the actor class, which answers pulses while it runs a call."""
    import ray

    class RankActor(Rank):
        pulse = ray.method(concurrency_group="pulse")(Rank.pulse)

    return ray.remote(concurrency_groups={"pulse": 1})(RankActor)
