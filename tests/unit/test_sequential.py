"""Groups in two parts: a probe, and the other siblings where it has a signal."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.learner.rows import rows_of
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.group_kind import GroupJudge
from winnow.methods.size.sequential import Sequential, SequentialSize
from winnow.rollout.in_flight import zero_unrewarded_truncated
from winnow.run.build_methods import build_collector
from winnow.run.resolved import Options, step_options
from winnow.types import Group, GroupKind, Job, Prompt, Visit

from .. import parity
from ..builders.groups import make_group
from ..builders.runs import assert_clean, fingerprint
from .fake_run import FakeRun, finished

REWARD = f"{parity.__file__}:parity_reward"
SEQUENTIAL = {"group_size": {"name": "sequential", "probe": 2}, "filter": "zero_variance", "num_generations": 4}
UNBIASED = {"name": "sequential", "probe": 2, "unbiased": True}
SHRINKING = {"name": "zero_variance", "refill": False}


def by_parity(visit: Visit, size: int) -> list[float | None]:
    """Even prompts have a signal in both parts, odd ones none."""
    return [float(i % 2) if visit.prompt.ordinal % 2 == 0 else 0.0 for i in range(size)]


def test_only_a_probe_with_a_signal_is_continued(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "l.sqlite", by_parity, {"max_steps": 3, "prompts_per_step": 4} | SEQUENTIAL).run()
    trained = [group for batch in run.update.batches for group in batch]
    assert [[r.sibling for r in group.rollouts] for group in trained] == [[0, 1, 2, 3]] * 12
    totals = run.ledger.totals()
    assert totals["trained"]["rollouts"] == 12 * 4
    judged = sum(int(row["groups/judged"]) for row in run.metrics)
    assert totals["filtered"]["rollouts"] == 2 * (judged - 12) > 0
    assert all(2 < row["groups/size_mean"] < 4 for row in run.metrics)


def test_truncated_siblings_have_the_rewards_of_their_environment() -> None:
    """Also where the environment rewards only siblings of the second part."""
    probe, rest = finished(None, [0.7, 0.2]), finished(None, [None, 1.0], first=2)  # type: ignore[arg-type]
    rollouts = [*probe.rollouts, *rest.rollouts]
    for rollout in rollouts:
        rollout.fate, rollout.stop_reason = None, "length"
        rollout.rewards = {"judge": rollout.reward}
    rollouts[3].rewards = {"env": 1.0}
    zero_unrewarded_truncated(rollouts)
    assert [(r.reward, r.rewards) for r in rollouts] == [(0.0, {"env": 0.0})] * 3 + [(1.0, {"env": 1.0})]


def test_the_mean_reward_weighs_groups_by_size(tmp_path: Path) -> None:
    """Else stopping at equal rewards would bias it."""
    rng = np.random.default_rng(0)
    config = {"max_steps": 60, "prompts_per_step": 8, "num_generations": 8, "max_skipped_steps": 99} | {
        "group_size": {"name": "sequential", "probe": 4}
    }
    run = FakeRun(tmp_path / "l.sqlite", lambda visit, size: list((rng.random(size) < 0.1).astype(float)), config)
    run.run()
    rolled = np.array([row["rollouts/sampled"] for row in run.metrics])
    assert np.average([row["reward"] for row in run.metrics], weights=rolled) == pytest.approx(0.1, abs=0.012)


def test_a_probe_that_tells_nothing_is_continued() -> None:
    rule = Sequential(probe=2).build(4)
    for rewards, more in (([None, 1.0], 2), ([None, None], 0)):
        group = finished(Visit(0, 0, Prompt("p", 0, text="")), rewards)
        assert rule.additional_size(group, GroupKind.NOT_JUDGED) == more


def test_a_group_without_a_right_answer_goes_on_until_it_has_one(tmp_path: Path) -> None:
    rolled_out: Counter[int] = Counter()

    def first_right_at(visit: Visit, size: int) -> list[float | None]:
        at, start = {0: 3, 1: 5, 2: 99, 3: 3}[visit.prompt.ordinal % 4], rolled_out[visit.number]
        rolled_out[visit.number] += size
        return [float(i == at) for i in range(start, start + size)]

    config = {"max_steps": 3, "prompts_per_step": 4} | SEQUENTIAL
    config["group_size"] = {"name": "sequential", "probe": 2, "hard_size": 8}
    run = FakeRun(tmp_path / "l.sqlite", first_right_at, config).run()
    sizes: dict[int, set[int]] = {0: set(), 1: set(), 3: set()}
    for group in itertools.chain.from_iterable(run.update.batches):
        assert [r.sibling for r in group.rollouts] == list(range(len(group.rollouts)))
        sizes[group.visit.prompt.ordinal % 4].add(len(group.rollouts))
    assert sizes == {0: {4}, 1: {6}, 3: {4}}
    assert run.collector.group_size.largest == 8
    without = sum(int(row["groups/judged"]) for row in run.metrics) - 12
    assert run.ledger.totals()["filtered"]["rollouts"] == 8 * without > 0


def test_a_hard_group_whose_rewards_differ_goes_on_too() -> None:
    """A bonus for the form is no right answer; one right answer ends it, also where all sums are equal."""
    rule = Sequential(2, 6).build(4)
    for rewards, kind, more in (
        ([0.0, 0.1], GroupKind.SIGNAL, 2),
        ([0.0, 0.1, 0.0, 0.0], GroupKind.SIGNAL, 2),
        ([0.0, 0.1, 0.0, 0.0, 0.1, 0.0], GroupKind.SIGNAL, 0),
        ([0.0, 0.1, 0.0, 1.0], GroupKind.SIGNAL, 0),
        ([1.0, 1.0], GroupKind.HARD, 0),
    ):
        assert rule.additional_size(make_group(0, list(rewards)), kind) == more, rewards


class Slow:
    """Finishes one group at each poll, the oldest first."""

    def __init__(self) -> None:
        self.version = 0
        self.jobs: list[Job] = []

    @property
    def pending(self) -> int:
        return len(self.jobs)

    def spent(self) -> dict[str, float]:
        return {}

    def launch(self, job: Job) -> None:
        self.jobs.append(job)

    def poll(self) -> list[Group]:
        job = self.jobs.pop(0)
        return [finished(job.visit, by_parity(job.visit, job.size), self.version, job.size, job.first)]


def test_a_resume_keeps_the_probes_of_groups_in_flight(tmp_path: Path) -> None:
    """The others are launched again, and a group is as old as its probe."""
    config = {"prompts_per_step": 2, "max_lag": 4, "max_steps": 5, "sync": {"name": "processes"}} | SEQUENTIAL
    states = []
    for name in ("first", "resumed"):
        run = FakeRun(tmp_path / f"{name}.sqlite", by_parity, config | {"correction": "truncate"})
        source = Slow()
        collector = build_collector(
            run.config, run.methods, source, run.ledger, {"train": run.prompts}, asynchronous=True
        )
        if name == "first":
            collector.collect(0)
            states.append(collector.state_dict())
            continue
        source.version = 1
        collector.load_state_dict(states[0])
        collector.relaunch(states[0]["in_flight"])
        probed = {state["visit"][0] for state in states[0]["probes"]}
        assert probed
        assert {job.visit.number for job in source.jobs if job.first == 2 and job.size == 2} == probed
        assert all(job.first == 0 for job in source.jobs if job.visit.number not in probed)
        assert {flight.version for flight in collector.buffer.in_flight if flight.visit.number in probed} == {0}
        batch = collector.collect(1)
        assert [[r.sibling for r in group.rollouts] for group in batch.groups] == [[0, 1, 2, 3]] * 2
    with pytest.raises(ValueError, match=r"probes: "):
        collector.load_state_dict(states[0] | {"probes": [{}]})
    collector.load_state_dict(states[0])
    with pytest.raises(ValueError, match=r"have a probe, but are not in flight"):
        collector.relaunch([])
    with pytest.raises(ValueError, match=r"at most 4 rollouts \(got 6\)"):
        collector.relaunch([[visit, 4] for visit, _ in states[0]["in_flight"]])


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(
    "more",
    [
        {"selector": "greso", "audit": {"epsilon": 0.3}},
        {"max_lag": 2, "rollout_batch": "adaptive", "correction": "truncate"},
        {"reuse": {"updates": 2}, "policy_loss": "clip", "step_scale": "ess"},
        {
            "group_size": UNBIASED,
            "max_lag": 2,
            "correction": "truncate",
            "selector": "greso",
            "audit": {"epsilon": 0.3},
        },
        {"group_size": {"name": "sequential", "probe": 2, "hard_size": 7}, "max_lag": 2, "correction": "truncate"},
    ],
    ids=str,
)
def test_a_run_resumes_exactly(tiny_config: dict[str, Any], tmp_path: Path, more: dict[str, Any]) -> None:
    values = tiny_config | SEQUENTIAL | {"reward_funcs": [REWARD], "max_steps": 4, "save_steps": 1} | more
    for name, steps in (("whole", 4), ("parts", 2)):
        Trainer(config=values | {"output_dir": str(tmp_path / name), "max_steps": steps}).train()
    Trainer.resume(tmp_path / "parts", {"max_steps": 4}).train()
    assert_clean(tmp_path / "whole")
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")


@pytest.mark.slow
def test_in_other_processes(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    more = {"sync": {"name": "processes", "samplers": 2}, "max_lag": 2, "correction": "truncate", "max_steps": 6}
    more |= {"group_size": {"name": "sequential", "probe": 2, "hard_size": 6}, "audit": {"epsilon": 0.3}}
    more |= {"selector": "greso", "reward_funcs": [REWARD], "output_dir": str(tmp_path / "run")}
    values = tiny_config | SEQUENTIAL | more
    Trainer(config=values).train()
    assert_clean(tmp_path / "run")


def test_what_cannot_be_is_refused(tiny_config: dict[str, Any]) -> None:
    given = tiny_config | SEQUENTIAL | {"reward_funcs": [REWARD]}
    for change, message in (
        ({"num_generations": 2}, "group_size: probe=2 must be below num_generations=2"),
        ({"group_size": {"name": "sequential", "probe": 2, "hard_size": 2}}, "group_size: hard_size=2 must be above"),
        (
            {"group_size": {"name": "sequential", "probe": 2, "hard_size": 3, "balanced": True}},
            "group_size: hard_size=3 must not be below num_generations=4",
        ),
        (
            {"group_size": {"name": "sequential", "probe": 2, "hard_size": 6, "unbiased": True}},
            "group_size: unbiased supports a single probe only",
        ),
        (
            {"group_size": UNBIASED, "advantage": {"name": "max_at_k", "k": 2}},
            "group_size: unbiased needs advantage: rloo, grpo or dr_grpo",
        ),
        (
            {"group_size": UNBIASED, "beta": 0.1},
            "group_size: unbiased weighs the rewards' gradient alone",
        ),
        (
            {"group_size": UNBIASED, "teacher": {"model": tiny_config["model"]}},
            "group_size: unbiased weighs the rewards' gradient alone; .* teacher",
        ),
        (
            {"group_size": UNBIASED, "filter": "keep_all"},
            "group_size: unbiased needs groups of one size .* group_weighting: equal, or a filter that refills",
        ),
        (
            {"group_size": UNBIASED, "filter": SHRINKING, "loss_type": "grpo", "group_weighting": "size"},
            "group_size: unbiased needs groups of one size",
        ),
        ({"gates": [{"name": "random", "k": 1}]}, "group_size: gates compare the siblings of a group"),
        ({"advantage": "remax", "filter": "keep_all"}, "group_size: advantage: remax needs a greedy rollout a group"),
        ({"advantage": {"name": "remax"}, "filter": "keep_all"}, "group_size: advantage: remax needs a greedy rollout"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(config=given | change)


def judged(rewards: list[float]) -> tuple[Group, GroupKind]:
    mean = sum(rewards) / len(rewards)
    kind = GroupKind.SIGNAL if 0 < mean < 1 else GroupKind.EASY if mean else GroupKind.HARD
    return finished(Visit(0, 0, Prompt("p", 0, text="")), rewards), kind


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(("hard_size", "balanced"), [(None, False), (5, False), (5, True)])
@pytest.mark.parametrize("advantage", ["rloo", "grpo", "dr_grpo"])
def test_stopping_keeps_the_direction_of_a_prompts_gradient(
    advantage: str, hard_size: int | None, balanced: bool
) -> None:
    """Enumerated over all groups of five kinds of answers, two of them right: it is a multiple of the gradient of p."""
    rule, method = Sequential(2, hard_size, balanced).build(4), ADVANTAGES[advantage]()
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    reward_of = [1.0, 0.0, 1.0, 0.0, 0.0]
    logp = logits.log_softmax(0)
    score = [torch.autograd.grad(logp[answer], logits, retain_graph=True)[0] for answer in range(5)]
    rate = logp.exp()[[0, 2]].sum()
    of_rate = torch.autograd.grad(rate, logits, retain_graph=True)[0]
    gradient = torch.zeros_like(of_rate)
    for answers in itertools.product(range(5), repeat=rule.largest):
        size = rule.size_for(Prompt("p", 0, text=""))
        while more := rule.additional_size(*judged([reward_of[answer] for answer in answers[:size]])):
            size += more
        seen = answers[:size]
        advantages = method(np.array([reward_of[answer] for answer in seen]))
        p = float(logp[list(answers)].sum().exp())
        for answer, a in zip(seen, advantages, strict=True):
            gradient += p * a / size * score[answer]
    weight = float(gradient @ of_rate / (of_rate @ of_rate))
    assert weight > 0
    torch.testing.assert_close(gradient, weight * of_rate)


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("reward_of", [[1.0, 0.0, 1.0, 0.0, 0.0], [1.0, 0.3, 0.5, 0.3, None]], ids=["binary", "graded"])
@pytest.mark.parametrize("advantage", ["rloo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("probe", [2, 3])
def test_unbiased_weights_undo_the_stop(advantage: str, reward_of: list[float | None], probe: int) -> None:
    """Enumerated over all groups: the gradient is that of whole groups, also with graded and with missing rewards."""
    method = ADVANTAGES[advantage]()
    rule = Sequential(probe, unbiased=True).build(4)
    judge = GroupJudge(advantage=method)
    rule.begin([], judge)
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    score = torch.stack([torch.autograd.grad(logp[answer], logits, retain_graph=True)[0] for answer in range(5)])
    whole, weighted, unweighted = torch.zeros(3, 5, dtype=torch.float64)
    for answers in itertools.product(range(5), repeat=4):
        group, first = ([reward_of[a] for a in answers[:n]] for n in (4, probe))
        group, first = (finished(Visit(0, 0, Prompt("p", 0, text="")), rewards) for rewards in (group, first))
        known = [i for i, reward in enumerate(group.rewards()) if not np.isnan(reward)]
        if len(known) < 2:
            continue
        advantages = torch.tensor(method.of_batch([group])[0][known])
        part = float(logp[list(answers)].sum().exp()) * (advantages @ score[[answers[i] for i in known]])
        whole += part
        if rule.additional_size(first, judge.kind(first)):
            rule.observe_group(group)
            weighted += part / group.rollouts[0].survival_p
            unweighted += part
    torch.testing.assert_close(weighted, whole, rtol=1e-12, atol=1e-14)
    assert (unweighted - whole).abs().max() > 0.01


def outcomes(rate: float, rule: SequentialSize | None) -> list[tuple[float, Group]]:
    """Return every group of a prompt with its probability; without `rule`, groups are whole."""
    found = []
    for rewards in itertools.product([1.0, 0.0], repeat=4):
        chance = float(np.prod([rate if reward else 1 - rate for reward in rewards]))
        group = make_group(0, list(rewards))
        if rule is not None and not rule.additional_size(*judged(list(rewards[:2]))):
            group = make_group(0, list(rewards[:2]))
        elif rule is not None:
            rule.observe_group(group)
        found.append((chance, group))
    return found


def weights_of_prompts(
    rates: Sequence[float], rule: SequentialSize | None, refill: bool, **options: Any
) -> list[float]:
    """Return the expected gradient of each prompt in batches of two groups of random prompts, in units of grad p."""
    of_prompts = [outcomes(rate, rule) for rate in rates]
    if refill:
        of_prompts = [[(p, g) for p, g in found if 0 < np.mean(g.rewards()) < 1] for found in of_prompts]
    weights = [0.0] * len(rates)
    for number, rate in enumerate(rates):
        for (p, own), (q, other) in itertools.product(of_prompts[number], itertools.chain(*of_prompts)):
            rows = rows_of([own, other], ADVANTAGES["rloo"](), max_completion_length=4, unbiased=True, **options)
            for row in rows[: len(own.rollouts)]:
                score = 1 / rate if row.rollout.reward else -1 / (1 - rate)
                weights[number] += p * q * row.weight * row.advantage * score
    return weights


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize(("refill", "equal_groups"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "sequence_sum"])
def test_unbiased_weights_keep_the_weights_between_prompts(loss_type: str, refill: bool, equal_groups: bool) -> None:
    """Enumerated over all batches of a rare and an even prompt: a group does not enlarge its own denominator."""
    rule = Sequential(2, unbiased=True).build(4)
    rule.begin([], GroupJudge(advantage=ADVANTAGES["rloo"]()))
    options = {"loss_type": loss_type, "equal_groups": equal_groups}
    rare, even = weights_of_prompts([0.02, 0.5], rule, refill, **options)
    rare_whole, even_whole = weights_of_prompts([0.02, 0.5], None, refill, **options)
    assert (rare / even) / (rare_whole / even_whole) == pytest.approx(1, rel=1e-12)


def test_unbiased_weights_reach_the_update(tmp_path: Path) -> None:
    config = {"max_steps": 2, "prompts_per_step": 2} | SEQUENTIAL
    config["group_size"] = UNBIASED
    run = FakeRun(tmp_path / "l.sqlite", by_parity, config).run()
    groups = [group for batch in run.update.batches for group in batch]
    assert [rollout.survival_p for group in groups for rollout in group.rollouts] == pytest.approx([4 / 6] * 16)
    assert step_options(run.config, Options.from_config(run.config)).unbiased
    assert run.methods.selector.probe == 2
    weights = [
        row.weight
        for row in rows_of(groups, ADVANTAGES["rloo"](), "sequence_sum", max_completion_length=4, unbiased=True)
    ]
    assert weights == pytest.approx([1.5 / 16] * 16)


def test_a_balanced_group_goes_on_until_half_are_right_and_half_wrong() -> None:
    rule = Sequential(2, 10, balanced=True).build(4)
    for rewards, more in (
        ([1.0, 0.0], 2),
        ([1.0, 1.0, 1.0, 0.0], 2),
        ([1.0, 1.0, 0.0, 0.0], 0),
        ([1.0] * 9, 1),
        ([0.0] * 10, 0),
        ([0.2, 0.7, 0.3, 0.9], 0),
    ):
        assert rule.additional_size(*judged(rewards)) == more, rewards
