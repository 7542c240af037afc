from __future__ import annotations

import inspect
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.learner.batch import PASS_TOKENS, PassLimits, collate, micro_batches, packed
from winnow.learner.rows import Row, rows_of, token_weights, with_gradient
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.filter import FILTERS
from winnow.methods.group_kind import BY_REWARDS, GroupJudge, are_equal
from winnow.methods.loss import LossConfig
from winnow.record.step_metrics import Tally
from winnow.record.stop_conditions import Limits, StopConditions
from winnow.sampler.buffer import Buffer, oldest_version
from winnow.types import Decision, EnvStep, GroupKind, Verdict

from ..builders.groups import make_group, make_rollout


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "sequence_sum"])
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_token_weights_are_the_named_means(loss_type: str, lengths: list[int]) -> None:
    """Summing weight x per-token value equals each loss type's own definition."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=n) for n in lengths]
    weights = token_weights(np.array(lengths, float), loss_type, 50)
    total = sum(w * v.sum() for w, v in zip(weights, values, strict=True))
    expected = {
        "dapo": np.concatenate(values).mean(),
        "grpo": np.mean([v.mean() for v in values]),
        "dr_grpo": np.mean([v.sum() / 50 for v in values]),
        "sequence_sum": np.mean([v.sum() for v in values]),
    }[loss_type]
    assert total == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_absent_members_are_absent_and_zero_rows_stay_in_the_denominator() -> None:
    groups = [make_group(0, [1.0, 0.0, None, 0.0], [2, 4, 9, 6]), make_group(1, [1.0] * 4)]
    rows = rows_of(groups, ADVANTAGES["rloo"](), "dapo", max_completion_length=16)
    assert len(rows) == 7
    assert rows[0].weight == pytest.approx(1 / (2 + 4 + 6 + 16))
    teaching = with_gradient(rows, LossConfig())
    assert [r.rollout.sibling for r in teaching] == [0, 1, 3]
    assert len(with_gradient(rows, LossConfig(beta=0.1))) == 7
    assert len(with_gradient(rows, LossConfig(entropy_coef=0.1))) == 7


def test_truncated_completions_can_be_masked() -> None:
    group = make_group(0, [1.0, 0.0, 0.0])
    group.rollouts[2].stop_reason = "length"
    rows = rows_of([group], ADVANTAGES["rloo"](), "dapo", max_completion_length=8, mask_truncated=True)
    assert [r.rollout.sibling for r in rows] == [0, 1]
    assert rows[0].advantage == pytest.approx(1.0), "it still counts in its siblings' baseline"


def test_collate_keeps_tokens_masks_and_log_probs_in_place() -> None:
    group = make_group(0, [1.0, 0.0], [2, 5])
    group.rollouts[1] = make_rollout(1, 5, 0.0, env_tokens=2)
    rows = rows_of([group], ADVANTAGES["rloo"](), "dapo", max_completion_length=8)
    batch = collate(rows, pad_id=99)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 10, 11, 99, 99, 99], [5, 6, 7, 10, 11, 12, 13, 14]]
    assert batch.mask_BT.int().tolist() == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert (batch.sampler_logp_BT[batch.mask_BT] == -1).all()
    torch.testing.assert_close(batch.advantages_B, torch.tensor([1.0, -1.0], dtype=torch.float64))


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30), budget=st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    group = make_group(0, [float(i % 2) for i in range(len(lengths))], lengths)
    rows = rows_of([group], ADVANTAGES["grpo"](), "dapo", max_completion_length=64)
    batches = micro_batches(rows, PassLimits(budget), pad_id=0)
    assert sum(len(b.input_ids_BT) for b in batches) == len(lengths)
    assert sum(int(b.mask_BT.sum()) for b in batches) == sum(lengths)
    for part in packed(rows, PassLimits(budget)):
        assert part.computed <= budget or len(part.rows) == 1


def rows_with_prompts(groups: int, prompt: int, lengths: list[int]) -> list[Row]:
    """A group of rows of these lengths for each prompt."""
    rows: list[Row] = []
    for g in range(groups):
        group = make_group(g, [float(i % 2) for i in range(len(lengths))], lengths)
        for rollout in group.rollouts:
            rollout.prompt_ids = (g,) * prompt
            rollout.token_ids = rollout.token_ids + 100 * rollout.sibling  # all begin differently
        rows += rows_of([group], ADVANTAGES["grpo"](), "dapo", max_completion_length=64)
    return rows


class TestPacked:
    def test_siblings_stay_together_where_prompts_are_most_of_the_tokens(self) -> None:
        rows = rows_with_prompts(8, 50, [9, 10, 9, 12, 11, 10, 9, 8])
        limits = PassLimits(2 * (50 + 8 * 12), pass_tokens=64, pairs=1e9)
        parts = packed(rows, limits)
        assert [len({row.rollout.prompt_ids for row in part.rows}) for part in parts] == [2] * 4
        assert all(part.computed <= limits.tokens for part in parts)
        apart = packed(rows, replace(limits, pairs=0))
        assert len(apart) == 8 * 8 // (limits.tokens // 62), "as many as before, where each row has its prompt"

    def test_rows_of_one_length_stay_together_unless_lanes_need_no_padding(self) -> None:
        rows = rows_with_prompts(8, 4, [3, 60, 3, 60])
        parts = packed(rows, PassLimits(16 * 64, pass_tokens=64))
        assert [{len(row.rollout.token_ids) for row in part.rows} for part in parts] == [{60}, {3}]
        (part,) = packed(rows, PassLimits(16 * 64, pass_tokens=64, pairs=1000))
        assert part.computed < 16 * 64 + 16 * 7

    def test_a_batch_of_a_row_a_pass_is_divided_in_a_loop(self) -> None:
        """Calls nested once a pass would end a large update with a RecursionError."""
        rows = rows_with_prompts(150, 4, [60, 60])
        usual = sys.getrecursionlimit()
        sys.setrecursionlimit(2 * len(inspect.stack(0)) + 100)
        try:
            parts = packed(rows, PassLimits(64, pass_tokens=64, pairs=1000.0))
        finally:
            sys.setrecursionlimit(usual)
        assert len(parts) == len(rows) == 300

    def test_a_large_model_shares_and_pads_by_smaller_savings(self) -> None:
        assert PassLimits.for_model(1, 500_000, share=True).pass_tokens == PASS_TOKENS
        assert 64 < PassLimits.for_model(1, 2_000_000, share=True).pass_tokens < PASS_TOKENS
        assert PassLimits.for_model(1, 135_000_000, share=True).pass_tokens == 64


@given(st.lists(st.sampled_from([0.0, 1.0, 0.1, 1.0 + 1e-10, float("nan")]), min_size=1, max_size=8))
def test_zero_variance_equals_the_definition(rewards: list[float]) -> None:
    there = [r for r in rewards if r == r]
    expected = all(abs(a - b) <= 1e-8 for a in there for b in there)
    assert are_equal(there, 1e-8) == expected
    kind = GroupJudge().of_rewards(there)
    assert (kind is GroupKind.NOT_JUDGED) == (len(there) < 2)
    assert kind.zero_variance == (expected and len(there) >= 2)
    if kind.zero_variance:
        group = make_group(0, [r if r == r else None for r in rewards])
        assert GroupJudge().kind(group) == ("easy" if there[0] >= 1 - 1e-8 else "hard")


def test_a_format_bonus_is_not_zero_variance() -> None:
    group = make_group(0, [0.0, 0.1, 0.0])
    assert FILTERS["zero_variance"]().admit(group, GroupJudge().kind(group)).keep
    verdict = FILTERS["zero_variance"]().admit(make_group(1, [1.0, 1.0]), GroupKind.EASY)
    assert not verdict.keep
    assert "all rewards are 1" in verdict.reason
    assert FILTERS["keep_all"]().admit(make_group(1, [1.0, 1.0]), GroupKind.EASY).keep
    with pytest.raises(ValueError, match="max_refill_rounds"):
        FILTERS["zero_variance"](max_refill_rounds=0)


def test_failures_of_single_groups_add_up_until_they_can_end_a_run() -> None:
    """Also over resumes, and from a state of an earlier version."""
    errors, state = [], {"skipped_steps": 0, "solved_steps": 0}
    for step in range(4):
        conditions = StopConditions(BY_REWARDS, Limits(9, 0.5, 9), FILTERS["keep_all"](), 1)
        conditions.load_state_dict(state)
        tally = Tally(BY_REWARDS)
        tally.finished(make_group(step, [None] * 8))
        errors.append(conditions.of_failures(step, tally, 1))
        state = conditions.state_dict()
        if errors[-1] is not None:
            assert state["unjudged_rollouts"] == 0, "or they would stop a resume once more"
        conditions.of_step(step, [], {"updated": 0.0}, tally, 1)
        state = conditions.state_dict()
    assert errors[:3] == [None] * 3
    assert "100% of the rollouts failed" in str(errors[3])
    assert state["unjudged_rollouts"] == 0, "or they would stop a resume once more"
    alone = Tally(BY_REWARDS)
    alone.finished(make_group(0, [None] * 64))
    fresh = StopConditions(BY_REWARDS, Limits(9, 0.5, 9), FILTERS["keep_all"](), 1)
    assert fresh.of_failures(0, alone, 1) is None


def test_failures_at_the_start_of_a_step_are_compared_with_the_whole_step() -> None:
    conditions = StopConditions(BY_REWARDS, Limits(9, 0.5, 9), FILTERS["keep_all"](), 8)
    tally = Tally(BY_REWARDS)
    errors = []
    for number in range(5):
        tally.finished(make_group(number, [None] * 32))
        errors.append(conditions.of_failures(0, tally, 8))
    assert errors[:4] == [None] * 4
    assert "62% of the rollouts failed" in str(errors[4])


def test_a_refill_rejects_enough_groups_before_it_ends_a_run() -> None:
    limits = Limits(9, 0.5, 9, fewest_rejected=12)
    conditions = StopConditions(BY_REWARDS, limits, FILTERS["zero_variance"](), 1)
    for number in range(12):
        assert conditions.of_refill(0) is None
        conditions.rejected(make_group(number, [0.0] * 4), "zero variance", None)
    assert "12 groups in a row had no signal (max_refill_rounds=10, and at least 12" in str(conditions.of_refill(0))


def test_a_refill_that_gates_starve_blames_the_gates() -> None:
    conditions = StopConditions(BY_REWARDS, Limits(9, 0.5, 9), FILTERS["zero_variance"](), 1)
    for number in range(10):
        group = make_group(number, [None] * 4 if number else [0.0] * 4)
        group.decisions = [Decision("mine", EnvStep(5), Verdict(number == 0, "all alike"))]
        conditions.rejected(group, "all alike", "cut" if number else None)
    error = str(conditions.of_refill(0))
    assert "of 10 groups in a row gates cut 9, and the others had no signal" in error
    assert "Let gates cut later or less" in error


class TestBuffer:
    def test_missing_counts_what_waits_and_what_is_spent(self) -> None:
        buffer = Buffer(4, 0)
        assert buffer.missing == 4
        buffer.add(make_group(0, [1.0, 0.0]))
        buffer.unreplaced += 1
        assert buffer.missing == 2

    @pytest.mark.parametrize("carry", [True, False])
    def test_takes_in_visit_order_and_what_is_left_waits_or_is_given_back(self, carry: bool) -> None:
        buffer = Buffer(2, 1, carry=carry)
        for number in (4, 0, 2):
            buffer.add(make_group(number, [1.0, 0.0]))
        batch, stale, surplus = buffer.take(0)
        assert [g.visit.number for g in batch] == [0, 2]
        assert not stale
        assert [g.visit.number for g in buffer.groups] == ([4] if carry else [])
        assert [g.visit.number for g in surplus] == ([] if carry else [4])
        assert buffer.missing == (1 if carry else 2)

    @pytest.mark.parametrize("carry", [True, False])
    def test_rejected_groups_take_the_places_that_are_left(self, carry: bool) -> None:
        buffer = Buffer(3, 1, carry=carry)
        buffer.add(make_group(0, [1.0, 0.0]))
        for _ in range(4):
            buffer.unreplaced += 1
        assert buffer.missing == 0
        batch, _, _ = buffer.take(0)
        assert [g.visit.number for g in batch] == [0]
        assert buffer.unreplaced == (2 if carry else 0)
        batch, _, _ = buffer.take(1)
        assert batch == []
        assert buffer.unreplaced == 0

    def test_never_hands_out_what_is_over_the_bound(self) -> None:
        buffer = Buffer(2, 1)
        buffer.add(make_group(0, [1.0, 0.0], version=0))
        buffer.add(make_group(1, [1.0, 0.0], version=1))
        batch, stale, _ = buffer.take(2)
        assert [g.visit.number for g in batch] == [1]
        assert [g.visit.number for g in stale] == [0]

    def test_lag_counts_the_oldest_token(self) -> None:
        group = make_group(0, [1.0, 0.0], version=5)
        group.rollouts[1].versions[0] = 3
        assert oldest_version(group) == 3
        assert oldest_version(make_group(0, [None], lengths=[0])) is None
