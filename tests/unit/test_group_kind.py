"""The one answer to "has it a signal?", and everybody who asks: tally, eq. 6, Adaptive-K, selectors, filter, ledger."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.methods.advantage import ADVANTAGES
from winnow.methods.group_kind import GroupJudge
from winnow.methods.select.backoff import Backoff
from winnow.methods.select.greso import Greso, GresoSelector, rollout_batch_size
from winnow.methods.size.adaptive_k import AdaptiveK
from winnow.record.step_metrics import Tally
from winnow.types import Fate, Group, GroupKind, Prompt, Segment, Verdict, Visit

from ..builders.groups import make_group
from .fake_run import FakeRun, Outcome, finished

PROMPTS = [Prompt(f"p{i}", i, text="") for i in range(10)]
CONVERGED = Verdict(False, "converged: prefix_edit_distance 0.05 < 0.12 at step 10", counts_as=GroupKind.UNKNOWN)
STUCK = Verdict(False, "stuck: best progress 0 <= 0 at step 10", counts_as=GroupKind.HARD)
RANDOM = Verdict(False, "random cut at step 10", 0.2)
EASY, HARD, MIXED = [1.0] * 4, [0.0] * 4, [0.0, 1.0, 0.0, 1.0]


def of(outcome: Outcome, number: int = 0, prompt: int = 0) -> Group:
    return finished(Visit(number, 0, PROMPTS[prompt]), outcome, size=4)


def tally_of(*outcomes: Outcome) -> Tally:
    tally = Tally(GroupJudge())
    for outcome in outcomes:
        tally.finished(of(outcome))
    return tally


def test_group_sizes_see_the_share_without_what_audits_forced() -> None:
    tally = tally_of(MIXED, HARD)
    forced = of(HARD)
    forced.visit = replace(forced.visit, verdict=Verdict(True, "audit: skipped", 0.1, override_probability=0.1))
    tally.finished(forced)
    metrics = tally.metrics()
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert tally.without_forced(metrics) == metrics | {"frac_reward_zero_std": 0.5}
    alone = Tally(GroupJudge())
    alone.finished(forced)
    assert "frac_reward_zero_std" not in alone.without_forced(alone.metrics())


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (MIXED, GroupKind.SIGNAL),
        (EASY, GroupKind.EASY),
        (HARD, GroupKind.HARD),
        ([0.5] * 4, GroupKind.HARD),
        ([1.0, None, 1.0, None], GroupKind.EASY),
        ([1.0, None, None, None], GroupKind.NOT_JUDGED),
        ([None] * 4, GroupKind.NOT_JUDGED),
        (CONVERGED, GroupKind.UNKNOWN),
        (STUCK, GroupKind.HARD),
        (RANDOM, GroupKind.NOT_JUDGED),
        (Verdict(False, "my own gate"), GroupKind.NOT_JUDGED),
    ],
)
def test_kinds(outcome: Outcome, kind: GroupKind, tmp_path: Path) -> None:
    """GroupJudge, tally and ledger say the same."""
    group = of(outcome)
    assert GroupJudge().kind(group) is kind
    assert tally_of(outcome).kinds == {kind: 1}
    booked = {GroupKind.SIGNAL: "none", GroupKind.NOT_JUDGED: None}.get(kind, str(kind))
    run = FakeRun(tmp_path / "l", lambda v, n: outcome, {"prompts_per_step": 1, "max_steps": 1, "num_generations": 4})
    run.run()
    with sqlite3.connect(run.ledger.path) as db:
        assert db.execute("SELECT DISTINCT zero_variance FROM outcomes").fetchall() == [(booked,)]


class TestCutGroups:
    def test_are_no_effective_groups(self) -> None:
        """30 cut, 40 zero, 30 teach: the share is 0.70, and 32 missing groups need 134 (before: 0.40, and 67)."""
        tally = tally_of(*[CONVERGED] * 30, *[EASY] * 15, *[HARD] * 25, *[MIXED] * 30)
        share = tally.zero_share()
        assert share == pytest.approx(0.70)
        assert rollout_batch_size(32, share, default=1000) == 134
        metrics = tally.metrics()
        assert metrics["frac_reward_zero_std"] == pytest.approx(0.70)
        assert [metrics[f"frac_zero_{kind}"] for kind in ("easy", "hard", "unknown")] == [0.15, 0.25, 0.30]
        assert metrics["groups/judged"] == metrics["groups/rolled_out"] == 100

    def test_cut_at_random_or_failed_are_in_no_share(self) -> None:
        tally = tally_of(*[RANDOM] * 50, *[[None] * 4] * 10, *[HARD] * 10, *[MIXED] * 30)
        assert tally.zero_share() == 0.25
        assert tally.metrics()["groups/judged"] == 40
        nothing = tally_of(RANDOM, [None] * 4)
        assert nothing.zero_share() is None
        assert "frac_reward_zero_std" not in nothing.metrics()

    def test_raise_the_size_of_groups(self) -> None:
        """Adaptive-K at tau 0.5 sees 0.7 where it saw 0.4, and steps that judged nothing only pass time."""
        size = AdaptiveK(base=4, high=8, window=2).build(4)
        size.observe_step(tally_of(RANDOM, [None] * 4).metrics())
        for _ in range(2):
            assert size.size_for(PROMPTS[0]) == 4
            size.observe_step(tally_of(*[CONVERGED] * 3, *[HARD] * 4, *[MIXED] * 3).metrics())
        assert size.size_for(PROMPTS[0]) == 8

    def test_leave_the_trace_as_it_was(self) -> None:
        selector = Greso().build(PROMPTS, 0)
        for outcome, z in ((HARD, 1), (CONVERGED, 1), (STUCK, 1), (RANDOM, 1), (EASY, 2), (CONVERGED, 2), (MIXED, 0)):
            selector.observe_group(of(outcome))
            assert selector.z_N[0] == z, outcome

    def test_count_for_the_controller_of_greso(self) -> None:
        """Of 10 groups 2 are hard by rewards and 2 were stuck; those cut at random are not there."""
        selector = Greso(easy_share=0.5, target=0.7).build(PROMPTS, 0)
        selector.visits = len(PROMPTS)
        for outcome in [HARD] * 2 + [STUCK] * 2 + [CONVERGED] * 3 + [MIXED] * 3 + [RANDOM] * 5:
            selector.observe_group(of(outcome))
        selector.end_step()
        assert selector.p[0] == pytest.approx(0.51), "0 of 10 easy, target 0.35"
        assert selector.p[1] == pytest.approx(0.49), "4 of 10 hard, target 0.35"

    def test_make_backoff_wait_anew(self) -> None:
        """A prompt that is cut at its visit is not visited every epoch from then on."""
        selector = Backoff().build(PROMPTS, 0)
        epochs = []
        for _ in range(9):
            epoch = selector.epoch
            while selector.epoch == epoch:
                for visit in selector.select(1):
                    if visit.verdict.keep:
                        outcome: Outcome = MIXED if visit.prompt.ordinal else CONVERGED if epochs else HARD
                        epochs += [visit.epoch] if visit.prompt.ordinal == 0 else []
                        selector.observe_group(finished(visit, outcome, size=4))
        assert epochs == [0, 2, 4, 6, 8]


class TestPrunedGroups:
    def test_equal_survivors_count_by_the_share_that_was_seen(self) -> None:
        """Two of four equal: half a zero-variance visit; before, a whole one."""
        selector = Greso(p_hard=0.5).build(PROMPTS, 0)
        for outcome, z in (
            ([0.0, 0.0, None, None], 0.5),
            ([0.0, 0.0, 0.0, None], 1.25),
            ([0.0, None, None, None], 1.25),
            (HARD, 2.25),
            ([0.0, 1.0, None, None], 0.0),
        ):
            selector.observe_group(of(outcome))
            assert selector.z_N[0] == z
        selector.observe_group(of([0.0, 0.0, None, None]))
        assert selector._keep_probability(np.array([0]))[0] == pytest.approx(0.5**0.5)
        skipped = selector.verdict_on(0, False)
        assert skipped.reason == "greso: hard, 0.5 zero-variance visits in a row"
        assert skipped.probability == pytest.approx(1 - 0.5**0.5)

    def test_a_prompt_that_teaches_is_not_given_up_for_its_pruning(self) -> None:
        """Pass rate 0.1, half of 16 pruned: the survivors agree in 43% of the visits, all 16 would in 19%.

        The trace must lie between: what it takes for zero variance, per visit, is less than the survivors say.
        """
        rng = np.random.default_rng(0)
        selector = Greso().build(PROMPTS, 0)
        kept = []
        for _ in range(4000):
            rewards: list[Any] = [float(r) for r in rng.random(16) < 0.1]
            for i in rng.choice(16, 8, replace=False):
                rewards[i] = None
            selector.observe_group(of(rewards))
            kept.append(selector._keep_probability(np.array([0]))[0])
        whole, blind = 0.0, 0.0  # by hand: z of a geometric run, of all 16 and of 8 taken for 16
        for q, name in ((0.9**16, "whole"), (0.9**8, "blind")):
            mean = sum((1 - q) * q**z * 0.5**z for z in range(60))
            whole, blind = (mean, blind) if name == "whole" else (whole, mean)
        assert blind < np.mean(kept) < 1
        assert np.mean(kept) == pytest.approx(whole, abs=0.15)
        assert np.mean(kept) - blind > 0.05

    def test_backoff_waits_once_whole_visits_were_seen(self) -> None:
        selector = Backoff().build(PROMPTS, 0)
        third = [0.0, 0.0, None, None, None, None]
        for seen in (0, 0, 1):
            selector.observe_group(of(third))
            assert int(np.floor(selector.z_N[0] + 1e-3)) == seen

    def test_survive_a_resume(self) -> None:
        selector = Greso().build(PROMPTS, 0)
        selector.observe_group(of([0.0, 0.0, None, None]))
        again = Greso().build(PROMPTS, 0)
        again.load_state_dict(json.loads(json.dumps(selector.state_dict())))
        assert again.z_N.tolist() == selector.z_N.tolist()
        assert again.state_dict() == selector.state_dict()


def test_visits_that_an_audit_forced_move_the_trace_but_not_the_controller() -> None:
    """With every skip overridden, all hopeless prompts are rolled out; the controller must not take that for its own
    exploration. Before, p_hard fell by a step."""

    def step(selector: GresoSelector) -> None:
        selector.visits = len(PROMPTS)
        for prompt in PROMPTS[:6]:
            forced = Visit(0, 1, prompt, Verdict(True, "audit: greso: hard, 1 zero-variance visits in a row", 0.2, 0.2))
            selector.observe_group(finished(forced, HARD))
        for prompt in PROMPTS[6:]:
            selector.observe_group(finished(Visit(0, 1, prompt), MIXED))
        selector.end_step()

    selector = Greso().build(PROMPTS, 0)
    step(selector)
    assert selector.z_N.tolist() == [1] * 6 + [0] * 4
    assert selector.p == pytest.approx((0.51, 0.51))


@pytest.mark.parametrize("name", ["reinforce_pp", "remax"])
def test_groups_that_are_not_compared_among_themselves_teach_with_equal_rewards(name: str) -> None:
    judge = GroupJudge(advantage=ADVANTAGES[name]())
    assert judge.kind(of(EASY)) is GroupKind.EASY
    assert judge.teaches(of(EASY))
    assert not judge.teaches(of([1.0, None, None, None]))
    assert not judge.teaches(of(CONVERGED))
    assert not GroupJudge().teaches(of(EASY))


def test_a_step_begins_with_a_round_of_the_default_size(tmp_path: Path) -> None:
    """GRESO's Algorithm 1: 12 for batches of 8, whatever the last step saw; then eq. 6.

    Before, the first round of the second step had 10 groups: 1.25 * 8 by the last step's share.
    """
    config = {
        "prompts_per_step": 8,
        "num_generations": 4,
        "max_steps": 3,
        "filter": "zero_variance",
        "rollout_batch": {"name": "adaptive", "surplus": "discard"},
    }
    run = FakeRun(tmp_path / "l", lambda v, n: MIXED, config).run()
    assert run.sampler.rounds == [(0, 12), (1, 12), (2, 12)]
    half = FakeRun(tmp_path / "h", lambda v, n: MIXED if v.number % 2 else HARD, config).run()
    assert half.sampler.rounds == [(step, n) for step in range(3) for n in (12, 5)], "2 missing, 1.25 * 2 / 0.5"


def test_carried_groups_make_the_first_round_smaller(tmp_path: Path) -> None:
    config = {
        "prompts_per_step": 8,
        "num_generations": 4,
        "max_steps": 3,
        "max_lag": 1,
        "filter": "zero_variance",
        "rollout_batch": {"name": "adaptive", "surplus": "carry"},
    }
    run = FakeRun(tmp_path / "l", lambda v, n: MIXED, config).run()
    assert run.sampler.rounds == [(0, 12), (1, 6), (2, 9)], "4 carried: half of 12 for half a batch; then 2"
    fates = [r.fate for group in run.update.batches[1] for r in group.rollouts]
    assert set(fates) == {Fate.TRAINED}


def test_segments_of_a_step_are_counted_where_any_rollout_has_several() -> None:
    tally = tally_of(MIXED)
    assert "segments/mean" not in tally.metrics()
    group = of(MIXED, 1)
    group.rollouts[0].later_segments = [Segment(1, (5,)), Segment(2, (6, 7))]
    group.rollouts[1].greedy, group.rollouts[1].later_segments = True, [Segment(1, (5,))]
    tally.finished(group)
    assert tally.metrics()["segments/mean"] == (4 + 3 + 1 + 1) / 7


@pytest.mark.parametrize(
    ("right", "kind"), [(0, "hard"), (1, "signal"), (4, "signal"), (5, "easy"), (7, "easy"), (8, "easy")]
)
def test_under_max_at_k_too_few_failures_teach_nothing(right: int, kind: str) -> None:
    rewards = [1.0] * right + [0.0] * (8 - right)
    group, again = make_group(0, rewards), make_group(1, rewards)
    judge = GroupJudge(advantage=ADVANTAGES["max_at_k"](k=4))
    assert judge.kind(group) == kind
    signal = np.abs(judge.advantage.of_batch([group])[0]).sum()
    assert (signal == 0) == (kind != GroupKind.SIGNAL)
    assert GroupJudge(advantage=ADVANTAGES["rloo"]()).kind(again) == (kind if right in (0, 8) else GroupKind.SIGNAL)


def test_the_tolerance_is_that_of_the_filter() -> None:
    assert GroupJudge().kind(make_group(0, [0.0, 0.1])) is GroupKind.SIGNAL
    assert GroupJudge(atol=0.2).kind(make_group(0, [0.0, 0.1])) == "hard"


def test_groups_that_are_not_compared_among_themselves_go_by_rewards() -> None:
    for name in ("remax", "reinforce_pp"):
        assert GroupJudge(advantage=ADVANTAGES[name]()).kind(make_group(0, [1.0, 1.0])) == "easy"
        assert GroupJudge(advantage=ADVANTAGES[name]()).kind(make_group(0, [1.0, 0.0])) is GroupKind.SIGNAL
