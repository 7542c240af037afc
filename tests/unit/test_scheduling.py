"""The lag bound, with a sampler that goes on by itself: random delays, random order, late acknowledgements."""

from __future__ import annotations

import random

import numpy as np
import pytest

from winnow.sampler import buffer as buffer_module
from winnow.sampler.buffer import Buffer
from winnow.sampler.scheduling import AsyncPace
from winnow.types import Group, Prompt, Rollout, Visit

from ..builders.buffers import oldest

PROMPT = Prompt("p", 0, text="p")


def finished(visit: Visit, versions: list[int]) -> Group:
    n = len(versions)
    rollout = Rollout(0, (1,), np.zeros(n, np.int64), np.ones(n, bool), np.zeros(n, np.float32), np.array(versions))
    return Group(visit, [rollout])


class World:
    """A learner, and a sampler that takes random times to finish groups and to hear of new weights."""

    def __init__(
        self, seed: int, prompts_per_step: int, max_lag: int, drop: float, refill: bool, fewest: int | None = None
    ) -> None:
        """`fewest`: the smallest batch, where their sizes vary; the largest is `prompts_per_step`."""
        self.refill = refill
        self.trained = self.dropped = 0
        self.random = random.Random(seed)
        self.buffer = Buffer(prompts_per_step, max_lag, carry=True)
        self.buffer.fewest = prompts_per_step if fewest is None else fewest
        self.drop = drop
        self.step = self.sampler = self.acknowledged = self.visits = 0
        self.flying: list[Group] = []
        self.lags: list[int] = []
        self.full = 0

    def turn(self) -> None:
        """What the loop does once, and what the sampler may have done meanwhile."""
        for _ in range(self.buffer.room(self.step, self.acknowledged)):
            visit = Visit(self.visits, 0, PROMPT)
            self.visits += 1
            self.buffer.launched(visit, 1, self.acknowledged)
            self.flying.append(finished(visit, [self.random.randint(self.acknowledged, self.sampler)]))
        if self.buffer.ready(self.step):
            self.train()
        chance = self.random.random
        if chance() < 0.5:
            self.sampler = self.random.randint(self.sampler, self.step)
        if chance() < 0.5:
            self.acknowledged = self.sampler
        if self.flying and chance() < 0.8:
            group = self.flying.pop(self.random.randrange(len(self.flying)))
            self.buffer.landed(group)
            if chance() >= self.drop:
                self.buffer.add(group)
            elif self.refill:
                self.dropped += 1
            else:
                self.buffer.unreplaced += 1
                self.dropped += 1

    def train(self) -> None:
        batch, stale, surplus = self.buffer.take(self.step)
        assert not stale
        assert not surplus
        assert len(batch) == self.buffer.wanted or not self.refill
        self.trained += len(batch)
        self.lags += [self.step - oldest(group, self.step) for group in batch]
        self.step += 1
        self.buffer.wanted = self.random.randint(self.buffer.fewest, self.buffer.prompts_per_step)


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("max_lag", [0, 1, 2, 5])
@pytest.mark.parametrize(("drop", "refill"), [(0.0, True), (0.4, True), (0.4, False), (0.9, False)])
def test_no_group_over_the_bound_is_ever_trained_and_none_is_lost(max_lag: int, drop: float, refill: bool) -> None:
    reached = set()
    for seed in range(8):
        world = World(seed, prompts_per_step=1 + seed % 4, max_lag=max_lag, drop=drop, refill=refill)
        for _ in range(3_000):
            world.turn()
        assert world.step > 20, "it must go on"
        assert max(world.lags) <= max_lag
        assert world.trained + world.dropped + len(world.buffer.groups) + len(world.flying) == world.visits
        if not refill:  # a step is prompts_per_step groups, trained or not
            places = world.trained + world.dropped - world.buffer.unreplaced
            assert places == world.step * world.buffer.prompts_per_step
        reached |= set(world.lags)
    assert reached == set(range(max_lag + 1)), "the bound is used in full"


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize(("drop", "refill"), [(0.3, True), (0.3, False)])
def test_the_bound_holds_for_batches_whose_other_groups_are_reused(max_lag: int, drop: float, refill: bool) -> None:
    for seed in range(8):
        world = World(seed, prompts_per_step=6, max_lag=max_lag, drop=drop, refill=refill, fewest=1 + seed % 3)
        for _ in range(3_000):
            world.turn()
        assert world.step > 20, "it must go on"
        assert max(world.lags) <= max_lag
        assert world.trained + world.dropped + len(world.buffer.groups) + len(world.flying) == world.visits


def test_without_the_wait_for_stragglers_the_bound_would_break() -> None:
    """A batch of young groups must not be taken while an old one is still out that would be too old afterwards."""
    buffer = Buffer(1, 1, carry=True)
    old, young = Visit(0, 0, PROMPT), Visit(1, 0, PROMPT)
    buffer.launched(old, 1, version=0)
    buffer.launched(young, 1, version=1)
    group = finished(young, [1])
    buffer.landed(group)
    buffer.add(group)
    assert not buffer.ready(1)
    late = finished(old, [0, 1])
    buffer.landed(late)
    buffer.add(late)
    assert buffer.ready(1)
    batch, stale, surplus = buffer.take(1)
    assert (batch, stale, surplus) == ([late], [], [])
    assert buffer.groups == [group]


def test_room_counts_what_waits_what_flies_and_what_was_spent() -> None:
    buffer = Buffer(4, 2, carry=True)
    assert buffer.room(5, 5) == 12
    assert buffer.room(5, 3) == 4
    assert buffer.room(5, 2) == 0
    buffer.launched(Visit(0, 0, PROMPT), 1, 5)
    buffer.add(finished(Visit(1, 0, PROMPT), [5]))
    buffer.unreplaced += 1
    assert buffer.room(5, 5) == 9


def one_by_one(buffer: Buffer, version: int) -> bool:
    """`ready`, by going through every group."""
    if buffer.missing:
        return False
    waiting = sorted(oldest(group, version) for group in buffer.groups)[buffer.prompts_per_step :]
    ages = sorted([*waiting, *(flight.version for flight in buffer.in_flight)])
    return all(age + buffer.max_lag > version + i // buffer.prompts_per_step for i, age in enumerate(ages))


def test_readiness_is_that_of_going_through_every_group() -> None:
    draws, found = random.Random(0), set()
    for _ in range(3_000):
        buffer, version = Buffer(draws.randint(1, 4), draws.randint(0, 4), carry=True), 9
        for number in range(draws.randint(0, 12)):
            visit, oldest_possible = Visit(number, 0, PROMPT), draws.randint(version - buffer.max_lag, version)
            buffer.launched(visit, 1, oldest_possible)
            if draws.random() < 0.8:
                tokens = [draws.randint(oldest_possible, version) for _ in range(draws.randint(0, 3))]
                buffer.landed(group := finished(visit, tokens))
                buffer.add(group)
        if draws.random() < 0.3:
            buffer.take(version)
        assert buffer.ready(version) == one_by_one(buffer, version)
        found.add(buffer.ready(version))
    assert found == {True, False}


def test_a_poll_reads_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group's age is read once, when it comes, however often the loop asks whether the batch may be taken."""
    reads, real = [], buffer_module.oldest_version

    def counted(group: Group) -> int | None:
        reads.append(group)
        return real(group)

    monkeypatch.setattr(buffer_module, "oldest_version", counted)
    buffer = Buffer(8, 4, carry=True)
    buffer.launched(Visit(1_000, 0, PROMPT), 1, 0)  # a straggler that blocks the batch
    for number in range(32):
        buffer.add(finished(Visit(number, 0, PROMPT), [4]))
        for _ in range(10):
            assert not buffer.ready(4)
    buffer.take(4)
    buffer.expire(4)
    assert len(reads) == 32


class InTurn:
    """Learner and sampler of one process: the batch of the next step is collected ahead; groups stay in flight."""

    def __init__(self, seed: int, fewest: int, max_lag: int, lifetimes: tuple[int, int], drop: float) -> None:
        self.random, self.lifetimes, self.drop = random.Random(seed), lifetimes, drop
        self.buffer = Buffer(8, max_lag, carry=True)
        self.buffer.fewest = fewest
        self.pace = AsyncPace(self.buffer, self)  # type: ignore[arg-type]
        self.version = self.visits = 0
        self.flying: list[tuple[int, Group]] = []
        self.lags: list[int] = []
        self.polls_ahead: list[int] = []

    @property
    def pending(self) -> int:
        return len(self.flying)

    def fill(self, step: int, *, ahead: bool) -> int:
        """As the collector does; the number of polls."""
        self.pace.begin_fill(ahead=ahead)
        for polls in range(1000):
            for _ in range(self.pace.room(step + ahead, 100, None)):
                visit = Visit(self.visits, 0, PROMPT)
                self.visits += 1
                self.buffer.launched(visit, 1, self.version)
                self.flying.append((self.random.randint(*self.lifetimes), finished(visit, [self.version])))
            if self.pace.ready(step + ahead) and not self.pace.goes_on():
                return polls
            self.pace.count_poll()
            self.flying = [(left - 1, group) for left, group in self.flying]
            while self.flying and self.flying[0][0] <= 0:  # in the order of launch
                group = self.flying.pop(0)[1]
                self.buffer.landed(group)
                if self.random.random() >= self.drop:
                    self.buffer.add(group)
        pytest.fail(f"step {step}: it polls for ever")

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.buffer.wanted = self.random.randint(self.buffer.fewest, 8)
            self.fill(step, ahead=False)
            batch, stale, _ = self.buffer.take(step)
            assert not stale
            self.lags += [step - int(group.rollouts[0].versions[0]) for group in batch]
            self.polls_ahead.append(self.fill(step, ahead=True))
            self.version = step + 1


@pytest.mark.parametrize("seed", range(20))
def test_what_is_collected_ahead_is_trained_in_time(seed: int) -> None:
    """Also where the next batch wants fewer groups than was thought."""
    max_lag = 1 + seed % 5
    run = InTurn(seed, fewest=(2, 4, 8)[seed % 3], max_lag=max_lag, lifetimes=(3, 40), drop=seed % 4 / 5)
    run.run(60)
    assert max(run.lags) <= max_lag


def test_generation_is_spread_over_the_updates() -> None:
    """Although all groups that are in flight end at the same time."""
    run = InTurn(0, fewest=8, max_lag=4, lifetimes=(40, 40), drop=0.0)
    run.run(60)
    assert min(run.polls_ahead[10:]) >= 4
    assert sum(run.polls_ahead[10:]) / 50 <= 14, "a group takes 40 polls, and 4 batches of groups may be in flight"
