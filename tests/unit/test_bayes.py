"""Selection by posterior: its probabilities against brute force, what it learns and forgets, draws, and its state."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from winnow.methods.advantage import MaxAtK
from winnow.methods.group_kind import BY_REWARDS, GroupJudge
from winnow.methods.posterior import signal_probability
from winnow.methods.select.bayes import Bayes, BayesSelector
from winnow.methods.select.thompson import Thompson
from winnow.types import GroupKind, Prompt

from ..builders.groups import make_group

PROMPTS = [Prompt(f"p{i}", i, text="") for i in range(2000)]


def selector(seed: int = 0, **options: float) -> BayesSelector:
    return Bayes(**options).build(PROMPTS, seed)


@pytest.mark.parametrize("k", [None, 1, 2, 4])
def test_the_chance_of_a_signal_is_that_of_all_sequences_of_draws(k: int | None) -> None:
    """By the rule of succession: the chance of a sequence is a product over its rollouts, one after the other.

    Under max@k fewer than k failures are no signal, unless the group has only k rollouts.
    """
    judge = GroupJudge(advantage=None if k is None else MaxAtK(k))
    for a, b, size in ((0.3, 1.7, 4), (5.0, 2.5, 5), (1.0, 9.0, 6), (9.0, 0.2, 6)):
        signal = 0.0
        for rewards in itertools.product((0, 1), repeat=size):
            chance, right, wrong = 1.0, a, b
            for reward in rewards:
                chance *= (right if reward else wrong) / (right + wrong)
                right, wrong = right + reward, wrong + 1 - reward
            kind = judge.kind(make_group(0, [float(reward) for reward in rewards]))
            signal += chance * (kind is GroupKind.SIGNAL)
        found = signal_probability(np.array([a]), np.array([b]), judge.teaching_counts(size))
        assert found == pytest.approx([signal], rel=1e-9)


def test_prompts_whose_mixed_groups_teach_nothing_are_rolled_out_rarely() -> None:
    """Under max@4 a group of 8 needs 4 failures, which are rare at a pass rate of 0.75."""
    keep = []
    for advantage in (None, MaxAtK(4)):
        chosen = Bayes().build(PROMPTS, 0, GroupJudge(advantage=advantage))
        for _ in range(5):
            chosen.observe_group(make_group(0, [1.0] * 6 + [0.0] * 2))
            chosen.observe_group(make_group(1, [1.0] * 2 + [0.0] * 6))
        keep.append(chosen.keep_probability(np.array([0, 1])).tolist())
        assert chosen.metrics()["bayes/mixed"] == (1.0 if advantage is None else 0.5)
    assert keep[0] == [1.0, 1.0]
    assert keep[1][0] < 0.2
    assert keep[1][1] == 1.0


def test_a_probe_decides_also_after_a_step_without_a_stopped_one() -> None:
    chosen = selector()
    chosen.probe = 4
    chosen.observe_group(make_group(0, [0.0] * 8))
    chosen.observe_group(make_group(1, [0.0, 1.0] * 4))
    chosen.end_step()
    teaches = BY_REWARDS.teaching_counts(4)
    seen, new = (signal_probability(*chosen.posteriors.for_prompts(np.array([i])), teaches) for i in (0, 2))
    assert chosen.keep_probability(np.array([0])) == pytest.approx((seen / new) ** Bayes.power)


def test_mirrored_posteriors_have_the_same_chance() -> None:
    """Beta(a, b) and Beta(b, a) are a tie; a last digit would rank them."""
    a_N, b_N = np.random.default_rng(0).uniform(0.05, 20, (2, 2000))
    for size in (2, 3, 4, 8, 16):
        teaches = BY_REWARDS.teaching_counts(size)
        assert (signal_probability(a_N, b_N, teaches) == signal_probability(b_N, a_N, teaches)).all()


def test_the_auroc_counts_mirrored_posteriors_as_ties() -> None:
    """One of each pair turns out mixed: half of every pair counts."""
    chosen = Thompson().build(PROMPTS, 0, BY_REWARDS)
    mirrored = [(right, right + 7) for right in range(1, 4)]
    for few, many in mirrored:
        chosen.observe_group(make_group(few, [1.0] * few + [0.0] * (7 - few)))
        chosen.observe_group(make_group(many, [0.0] * few + [1.0] * (7 - few)))
    for pair in mirrored:
        chosen.end_step()
        for swapped in (False, True):
            for prompt, rewards in zip(reversed(pair) if swapped else pair, ([1.0, 0.0], [1.0, 1.0]), strict=True):
                before = chosen.right_N[prompt], chosen.wrong_N[prompt]
                chosen.observe_group(make_group(prompt, rewards))
                chosen.right_N[prompt], chosen.wrong_N[prompt] = before
            assert chosen.metrics()["thompson/auroc"] == 0.5
            chosen.end_step()


def test_who_is_always_or_never_solved_is_rolled_out_rarely_and_who_is_new_always() -> None:
    chosen = selector()
    assert (chosen.keep_probability(np.arange(2000)) == 1).all()
    for _ in range(3):
        for ordinal, rewards in ((0, [1.0] * 8), (1, [0.0] * 8), (2, [1.0, 0.0] * 4)):
            chosen.observe_group(make_group(ordinal, rewards))
    solved, never, half, new = chosen.keep_probability(np.array([0, 1, 2, 3]))
    assert solved < 0.25
    assert never < 0.25
    assert half == new == 1
    assert chosen.keep_probability(np.array([0]))[0] >= Bayes.floor


def test_a_posterior_grows_less_sure_while_the_policy_changes_and_keeps_its_mean() -> None:
    chosen = selector(forget=0.5)
    chosen.observe_group(make_group(0, [0.0] * 8))
    before = chosen.posteriors.for_prompts(np.array([0, 1]))
    assert before[0] + before[1] == pytest.approx([Bayes.strength + 8, Bayes.strength])
    mean = before[0][0] / (before[0][0] + before[1][0])
    for wanted in (4.75, 2.375, 1.5, 1.5):
        chosen.end_step()
        a, b = chosen.posteriors.for_prompts(np.array([0, 1]))
        assert a + b == pytest.approx([wanted, Bayes.strength])
        assert a[0] / (a[0] + b[0]) == pytest.approx(mean)


def test_failed_and_undecided_rollouts_are_absent() -> None:
    chosen = selector()
    chosen.observe_group(make_group(0, [None, None, 1.0]))
    assert not chosen.posteriors.a_N.any()
    prior, _ = chosen.posteriors.prior()
    chosen.observe_group(make_group(0, [None, 0.0, 1.0, 1.0]))
    assert (chosen.posteriors.a_N[0], chosen.posteriors.b_N[0]) == pytest.approx(
        (prior + 2, Bayes.strength - prior + 1)
    )


def test_a_group_whose_rewards_differ_teaches_though_none_is_right() -> None:
    chosen = selector()
    for _ in range(3):
        chosen.observe_group(make_group(0, [0.1, 0.3, 0.1, 0.0]))
        chosen.observe_group(make_group(1, [0.1] * 4))
    partly, equal = chosen.keep_probability(np.array([0, 1]))
    assert partly == 1
    assert equal < 0.3


def test_draws_follow_the_recorded_probabilities_and_do_not_depend_on_how_many_are_asked() -> None:
    one, other = selector(seed=3), selector(seed=3)
    for each in (one, other):
        for ordinal in range(2000):
            each.observe_group(
                make_group(ordinal, [1.0] * (ordinal % 5 + 1) + [0.0] * 0 if ordinal % 2 else [0.0, 1.0])
            )
    p = one.keep_probability(np.arange(2000))
    assert 0 < p.min() < p.max() == 1
    visits = one.select(600)
    parts = [visit for _ in range(6) for visit in other.select(100)]
    assert [(v.number, v.verdict) for v in parts] == [(v.number, v.verdict) for v in visits]
    for visit in visits:
        expected = p[visit.prompt.ordinal] if visit.verdict.keep else 1 - p[visit.prompt.ordinal]
        assert visit.verdict.probability == pytest.approx(expected)
    drawn = np.array([v.verdict.keep for v in visits], float)
    wanted = np.array([p[v.prompt.ordinal] for v in visits])
    assert abs((drawn - wanted).sum()) < 4 * np.sqrt((wanted * (1 - wanted)).sum())


def test_a_resume_goes_on_exactly() -> None:
    whole, parts = selector(), selector()
    rng = np.random.default_rng(0)
    for step in range(6):
        if step == 3:
            saved = json.loads(json.dumps(parts.state_dict()))
            parts = selector()
            parts.load_state_dict(saved)
        rewards = rng.integers(0, 2, (20, 4)).astype(float)
        for each in (whole, parts):
            for visit, row in zip([v for v in each.select(20) if v.verdict.keep], rewards, strict=True):
                each.observe_group(make_group(visit.prompt.ordinal, row.tolist()))
            each.metrics()
            each.end_step()
    assert whole.state_dict() == parts.state_dict()
    assert whole.select(50) == parts.select(50)


@pytest.mark.parametrize(("options", "name"), [(Bayes(), "bayes"), (Thompson(), "thompson")])
def test_metrics_compare_prediction_and_outcome(options: Bayes | Thompson, name: str) -> None:
    chosen = options.build(PROMPTS, 0, BY_REWARDS)
    assert f"{name}/brier" not in chosen.metrics()
    for prompt, rewards in ((0, [1.0, 0.0]), (1, [1.0, 1.0]), (1, [1.0, 1.0]), (0, [0.0, 1.0])):
        chosen.observe_group(make_group(prompt, rewards))
    found = chosen.metrics()
    assert found[f"{name}/mixed"] == 0.5
    assert 0 < found[f"{name}/predicted"] < 1
    assert 0 < found[f"{name}/brier"] < 1
    assert found[f"{name}/auroc"] == 0.875  # the first two chances are the same
    chosen.end_step()
    assert f"{name}/brier" not in chosen.metrics()


def test_thompsons_chance_is_that_of_its_posterior() -> None:
    """Beta(1, 1) at first: two rollouts differ with a chance of 1/3."""
    chosen = Thompson().build(PROMPTS, 0, BY_REWARDS)
    chosen.observe_group(make_group(0, [1.0, 0.0]))
    assert chosen.metrics()["thompson/predicted"] == pytest.approx(1 / 3)


def test_the_size_of_a_group_in_parts_tells_nothing() -> None:
    """Only mixed probes go on, so sizes would predict them perfectly; of the same posterior, nothing does."""
    rng = np.random.default_rng(0)
    chosen = Thompson().build(PROMPTS, 0, BY_REWARDS)
    chosen.probe = 4
    for prompt in range(400):
        rewards = rng.integers(0, 2, 8).astype(float).tolist()
        chosen.observe_group(make_group(prompt, rewards if len(set(rewards[:4])) > 1 else rewards[:4]))
    assert chosen.metrics()["thompson/auroc"] == 0.5
    assert chosen.metrics()["thompson/mixed"] == pytest.approx(7 / 8, abs=0.05)


def test_the_first_step_knows_groups_that_are_large_enough_for_the_advantage() -> None:
    chosen = Bayes().build(PROMPTS, 0, GroupJudge(advantage=MaxAtK(16)))
    assert chosen.keep_probability(np.array([0])).tolist() == [1.0]
