"""Predict the seconds of a run's steps: the simulator of `simulate.py`, with the work of every group."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import RunConfig
from ..run.conflicts import require_sync
from ..sampler import Processes
from ..types import Group, Job, Prompt
from .costs import REUSED, Costs, Shape, Shapes, Work, add
from .simulate import Policy, Rewards, Simulation, squares


class Timeline(Rewards):
    """Finishes groups in the order of launch, each after the decode steps of its longest rollout; counts the work."""

    def __init__(self, policy: Policy, shapes: Shapes, slots: int, seed: int) -> None:
        super().__init__(policy, 1, seed)
        self.work: Work = {}
        self.shapes: dict[int, list[Shape]] = {}
        """Of each visit, those of its parts."""
        self._all_shapes, self._free = shapes, slots
        self._clock = 0
        self._running: deque[tuple[int, Group]] = deque()
        self._ends: list[tuple[int, int]] = []
        """Heap of when groups end, and how many sequences they have."""

    @property
    def pending(self) -> int:
        return len(self._jobs) + len(self._running)

    def poll(self) -> list[Group]:
        """Go on to the end of the next group."""
        self._start()
        if not self._ends:
            return []
        before, self._clock = self._clock, self._ends[0][0]
        add(self.work, {"decode_steps": self._clock - before})
        while self._ends and self._ends[0][0] == self._clock:
            self._free += heapq.heappop(self._ends)[1]
        finished = []
        while self._running and self._running[0][0] <= self._clock:
            finished.append(self._running.popleft()[1])
        return finished

    def trained(self, group: Group) -> Work:
        """Return the work of an update on a group."""
        work: Work = {}
        for shape in self.shapes[group.visit.number]:
            add(work, shape.trained(len(group.rollouts) // len(self.shapes[group.visit.number])))
        return work

    def _start(self) -> None:
        starting: list[Job] = []
        while self._jobs and (self._jobs[0].size <= self._free or not (self._ends or starting)):
            job = self._jobs.pop(0)
            self._free -= job.size
            starting.append(job)
        for group in self.run(starting) if starting else []:
            shape = self._all_shapes.next(len(group.rollouts), sum(group.known_rewards()))
            add(self.work, shape.generated())
            self.shapes.setdefault(group.visit.number, []).append(shape)
            end = self._clock + max(1, shape.length)
            heapq.heappush(self._ends, (end, len(group.rollouts)))
            self._running.append((end, group))


@dataclass
class Machine:
    """What was measured of a model on a machine."""

    costs: Costs
    shapes: Shapes
    policy: Policy
    slots: int
    ratios: float = 1 / 3
    """Seconds of the importance ratios of groups that may be used again, over those of an update on them."""
    device: str = "cpu"


@dataclass
class Prediction:
    seconds: list[float]
    """Of each step."""
    signal: float
    """Of all steps: squared deviations of the rewards of trained groups; a reused group counts `REUSED` times."""
    phases: Mapping[str, float]
    """Seconds of a step by phase."""

    @property
    def per_step(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    @property
    def per_signal(self) -> float:
        return sum(self.seconds) / max(self.signal, 1e-9)


def predict(c: RunConfig, prompts: Sequence[Prompt], machine: Machine) -> Prediction:
    """Predict the seconds of a run to `c.max_steps`. Raises ConfigError on settings that cannot be simulated."""
    source = Timeline(replace(machine.policy), machine.shapes, machine.slots, c.seed)
    simulation = Simulation(c, prompts, source)
    require_sync(c, simulation.options, machine.device)
    parallel = simulation.options.sync.samplers if isinstance(simulation.options.sync, Processes) else 0
    seconds, signal, phases = [], 0.0, Work()
    for batch in simulation:
        work, source.work = source.work | {"steps": 1.0}, {}
        for group in batch.trained_on:
            if simulation.methods.judge.teaches(group):
                add(work, source.trained(group))
        signal += sum(squares(group.known_rewards()) for group in batch.groups)
        signal += REUSED * sum(squares(group.known_rewards()) for group in batch.again)
        for used in simulation.reuse.groups if simulation.reuse is not None else []:
            add(work, source.trained(used.group), machine.ratios)
        times = {phase: machine.costs.of(work, phase) for phase in machine.costs.seconds}
        add(phases, times)
        learner = times["update"] + times["rest"]
        hidden = min(times["generate"], times["update"]) if simulation.options.overlap else 0.0
        seconds.append(max(times["generate"] / parallel, learner) if parallel else sum(times.values()) - hidden)
    return Prediction(seconds, signal, {phase: total / len(seconds) for phase, total in phases.items()})
