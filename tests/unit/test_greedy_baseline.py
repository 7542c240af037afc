"""The greedy rollout that ReMax needs besides each group: launched, scored and booked, but never a sibling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.engine import LocalEngine, SamplingParams
from winnow.env.prompting import decode
from winnow.env.rewards.rewarder import Rewarder
from winnow.methods.group_kind import BY_REWARDS
from winnow.record.ledger import Ledger
from winnow.record.samples import sample
from winnow.record.step_metrics import Tally
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.sampler.codec import group_from, group_state
from winnow.types import Fate, Group, GroupView, Job, Token, Verdict, Visit

from ..builders.greedy import with_greedy
from ..builders.groups import make_group
from ..builders.toy_rollouts import SHORT_TURNS, EchoEnv, StepGate, ToyTask
from ..gates import Fake, named
from ..parity import parity_reward

SIZE = 3


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


def run(policy: tuple[Any, Any], task: ToyTask, *, greedy: bool = True, gates: Any = (), **params: Any) -> list[Group]:
    engine, rewarder = LocalEngine(*policy, slots=8), Rewarder(task.reward_funcs)
    options = RolloutOptions(SamplingParams(**{"max_tokens": 12} | params), 32, seed=0, greedy_baseline=greedy)
    runner = RolloutRunner(engine, task, policy[1], rewarder, {"train": options}, named(gates))
    for number, prompt in enumerate(task.train[:3]):
        runner.launch(Job(Visit(number, 0, prompt), SIZE))
    groups: list[Group] = []
    while runner.pending:
        groups += runner.poll()
    rewarder.close()
    assert engine.pending == 0
    for group in groups:
        assert [r.sibling for r in group.rollouts] == list(range(SIZE + greedy))
        assert [r.greedy for r in group.rollouts] == [False] * SIZE + [True] * greedy
    return groups


def test_it_is_the_most_likely_completion_and_disturbs_nobody(policy) -> None:
    groups = run(policy, ToyTask(), top_p=0.9, top_k=5)
    zero = run(policy, ToyTask(), greedy=False, temperature=0.0)
    free = run(policy, ToyTask(), greedy=False, top_p=0.9, top_k=5)
    for group, best, same in zip(groups, zero, free, strict=True):
        *siblings, greedy = group.rollouts
        np.testing.assert_array_equal(greedy.token_ids, best.rollouts[0].token_ids)
        assert greedy.reward == parity_reward([greedy.text])[0] == group.greedy_reward()
        for r, undisturbed in zip(siblings, same.rollouts, strict=True):
            np.testing.assert_array_equal(r.token_ids, undisturbed.token_ids)


class PruneEverything(Fake):
    at, needs = Token(2), frozenset({"hidden"})

    def __init__(self) -> None:
        self.views: list[GroupView] = []

    def decide(self, view: GroupView) -> Verdict:
        self.views.append(view)
        return Verdict(False, "no")


def test_token_gates_are_not_asked_about_it(policy) -> None:
    gate = PruneEverything()
    groups = run(policy, ToyTask(), gates=[gate])
    assert {v.sibling for v in gate.views} <= set(range(SIZE))
    assert all(len(v.running) == len(v.actions) == len(v.observations) == SIZE for v in gate.views)
    assert all(group.rollouts[-1].reward is not None for group in groups)
    assert any(r.fate == Fate.PRUNED for group in groups for r in group.siblings)


class Reads(PruneEverything):
    needs = frozenset({"text"})


@pytest.mark.parametrize("reads", [True, False])
def test_a_rule_that_needs_it_reads_what_was_sampled(policy, reads: bool) -> None:
    gate = Reads() if reads else PruneEverything()
    groups = run(policy, ToyTask(), greedy=False, gates=[gate])
    rollouts = {(g.prompt.ordinal, r.sibling): r for g in groups for r in g.rollouts}
    assert gate.views
    for view in gate.views:
        rollout = rollouts[view.visit.prompt.ordinal, view.sibling or 0]
        assert len(rollout.token_ids) == 2, "cancelled at the event"
        assert view.text == (decode(policy[1], [rollout.token_ids])[0] if reads else "")


def slow_baseline(made: int) -> EchoEnv:
    return EchoEnv(100 if made % (SIZE + 1) == SIZE else 4)


def test_a_cut_stops_it_where_it_is_and_books_what_it_had(policy) -> None:
    """The gate neither waits for it nor sees it."""
    gate, options = StepGate(1, keep=False), {"max_tokens": 200, "stop": SHORT_TURNS}
    groups = run(policy, ToyTask(make=slow_baseline, max_turns=50), gates=[gate], **options)
    free = run(policy, ToyTask(make=slow_baseline, max_turns=50), **options)
    assert [len(v.actions) for v in gate.views] == [SIZE] * 3
    for group, undisturbed in zip(groups, free, strict=True):
        greedy = group.rollouts[-1]
        assert (greedy.fate, greedy.reward, greedy.stop_reason) == (Fate.CUT, None, "cancelled")
        assert 0 < len(greedy.token_ids) < len(undisturbed.rollouts[-1].token_ids)
        n = len(greedy.token_ids)
        np.testing.assert_array_equal(greedy.token_ids, undisturbed.rollouts[-1].token_ids[:n])
        assert greedy.turns[-1].stop == n


def test_a_step_gate_that_keeps_leaves_it_alone(policy) -> None:
    """It runs past the barrier, and the gate still decides when only the siblings have reached it."""
    gate = StepGate(2, keep=True)
    kwargs = {"max_tokens": 120, "stop": SHORT_TURNS}
    gated = run(policy, ToyTask(make=slow_baseline, max_turns=50), gates=[gate], **kwargs)
    free = run(policy, ToyTask(make=slow_baseline, max_turns=50), **kwargs)
    assert len(gate.views) == 3
    for a, b in zip(gated, free, strict=True):
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            np.testing.assert_array_equal(x.token_ids, y.token_ids)


def test_a_group_whose_baseline_failed_is_refused_with_the_reason(policy) -> None:
    task = ToyTask(make=lambda made: EchoEnv(1, fail_at=1 if made % (SIZE + 1) == SIZE else None))
    for group in run(policy, task, max_tokens=200, stop=SHORT_TURNS):
        assert group.rollouts[-1].fate == Fate.FAILED
        assert all(r.reward is not None for r in group.siblings)
        assert "the simulator went away" in str(BY_REWARDS.refusal(group))
    assert BY_REWARDS.refusal(with_greedy(make_group(0, [1.0, 0.0]), 0.0)) is None
    assert BY_REWARDS.refusal(with_greedy(make_group(0, [1.0, None]), 0.0)) == "only 1 of 2 siblings have a reward"


def test_statistics_leave_it_out_and_token_counts_do_not(tmp_path: Path) -> None:
    group = with_greedy(make_group(0, [1.0, 1.0, 1.0], [2, 2, 5]), 0.0)
    group.rollouts[-1].rewards = {"f": 0.0}
    for r in group.siblings:
        r.rewards = {"f": 1.0}
    tally = Tally(BY_REWARDS)
    tally.finished(group)
    metrics = tally.metrics()
    assert metrics["reward"] == metrics["rewards/f/mean"] == metrics["frac_zero_easy"] == 1.0
    assert metrics["groups/size_mean"] == metrics["completions/mean_length"] == 3.0
    assert (tally.sampled_tokens, metrics["rollouts/sampled"]) == (12, 4.0), "they were paid for"
    assert sample(0, group, "train")["group_rewards"] == [1.0] * 3
    for r in group.rollouts:
        r.fate = Fate.TRAINED
    tally.fated(group)
    assert tally.metrics()["tokens/trained"] == 12
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.visit([group.visit], step=0, version=0)
        ledger.finish(group, step=0)
        ledger.step(0, seconds={}, metrics={}, version=0)
        row = ledger._db.execute("SELECT group_size, mean_reward, zero_variance FROM outcomes").fetchone()
        assert row == (4, 1.0, "easy")
        assert ledger.totals()["trained"]["tokens"] == 12
        assert ledger.verify().ok


def test_a_failed_baseline_counts_among_the_failures() -> None:
    tally = Tally(BY_REWARDS)
    failed = with_greedy(make_group(0, [1.0, 0.0, 1.0]), None)
    failed.rollouts[-1] = replace(failed.rollouts[-1], fate=Fate.FAILED, reason="gone")
    tally.finished(failed)
    assert tally.failed_share() == 0.25


def test_it_survives_a_checkpoint() -> None:
    group = with_greedy(make_group(0, [1.0, 0.0]), 0.5)
    again = group_from(group_state(group), {"train": [group.prompt]})
    assert [r.greedy for r in again.rollouts] == [False, False, True]
    assert again.greedy_reward() == 0.5
