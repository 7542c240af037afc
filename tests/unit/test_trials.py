"""The rule by which a trial is won, lost or undecided."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from winnow.learner.batch import PassLimits, collate, micro_batches
from winnow.learner.rows import Row
from winnow.methods.correct.truncate import Truncate
from winnow.methods.group_kind import BY_REWARDS
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss.plain import Plain
from winnow.run.resolved import Options
from winnow.tasks.countdown import verify_steps
from winnow.types import Prompt, Visit

from ..builders.groups import make_group
from .learner_models import assert_equal, gpt2, gradients, learner_of, random_rows

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import trials

    return trials


def runs(differences: list[float], pass_at_8: float = 0.0, base: float = 0.3) -> tuple[list[Any], list[Any]]:
    """An arm and the base, whose seeds differ more than the arms do."""
    both = []
    for sign in (1, 0):
        both.append(
            [
                {"seed": n, "pass@1": base + 0.1 * n + sign * d, "pass@8": 0.5 + 0.1 * n + sign * pass_at_8}
                for n, d in enumerate(differences)
            ]
        )
    return both[0], both[1]


@pytest.mark.parametrize(
    ("differences", "pass_at_8", "expected"),
    [
        ([0.05, 0.051, 0.049], 0.0, "undecided"),  # too few
        ([0.05, 0.051, 0.049, 0.05], 0.0, "won"),  # clear after four
        ([0.02, 0.06, 0.04, 0.05], 0.0, "undecided"),  # not clear enough for four
        ([0.02, 0.06, 0.04, 0.05, 0.03, 0.04], 0.0, "won"),
        ([0.02, 0.06, 0.04, 0.05, 0.03, 0.04], -0.03, "lost"),  # of variety
        ([-0.02, -0.06, -0.04, -0.05, -0.03, -0.04], 0.0, "lost"),
        ([-0.05, -0.051, -0.049, -0.05], 0.0, "lost"),
        ([0.1, -0.08, 0.02, -0.03, 0.05, -0.06], 0.0, "undecided"),
    ],
)
def test_verdict(trials: Any, differences: list[float], pass_at_8: float, expected: str) -> None:
    assert trials.verdict(*runs(differences, pass_at_8)) == expected


def test_a_rate_is_the_best_on_average_over_both_tuning_seeds(trials: Any) -> None:
    found = [(1e-4, 0.2), (1e-4, 0.3), (2e-4, 0.1), (2e-4, 0.38), (4e-4, 0.24), (4e-4, 0.22)]
    assert trials.best_rate([{"rate": rate, "pass@1": passed} for rate, passed in found]) == 1e-4


def test_an_arm_runs_together_with_the_base_and_they_take_turns_on_the_cores(
    trials: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, both = [], threading.Barrier(2, timeout=30)

    def ran(track: str, name: str, rates: list[float], seeds: list[int], *_: Any, paired_with: str = "") -> None:
        both.wait()
        calls.append((seeds[0], name, rates, paired_with, os.sched_getaffinity(0)))

    monkeypatch.setattr(trials, "ran", ran)
    monkeypatch.setattr(trials, "runs_of", lambda directory, seeds: [{"rate": len(directory.name), "pass@1": 0.3}])
    before = os.sched_getaffinity(0)
    trials.ran_in_pairs("countdown", "muon-", [10, 11], "model")
    first, last = sorted(before)[-2:][0], sorted(before)[-1]
    assert sorted(calls) == [
        (10, "base", [4], "muon-", {first}),
        (10, "muon-", [5], "", {last}),
        (11, "base", [4], "muon-", {last}),
        (11, "muon-", [5], "", {first}),
    ]
    assert os.sched_getaffinity(0) == before


@pytest.mark.usefixtures("trials")
def test_pods_keeps_the_widest_rewards_and_the_size_of_the_gradient() -> None:
    from prototypes.pods import Pods, widest

    rng = np.random.default_rng(0)
    for _ in range(50):
        rewards = rng.choice([0.0, 0.25, 1.0], size=7)
        best = max(rewards[list(some)].var() for some in itertools.combinations(range(7), 4))
        assert rewards[widest(rewards, 4)].var() == pytest.approx(best)
    rewards = np.array([1.0, 0.0, np.nan, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    found = Pods()(rewards)
    assert np.isnan(found[2])
    kept = found[~np.isnan(found) & (found != 0)]
    assert (sorted(kept > 0), len(kept)) == ([False, False, True, True], 4)
    assert kept[kept > 0] == pytest.approx(2 * 0.75 * 8 / 7)


@pytest.mark.usefixtures("trials")
def test_prefixes_are_part_of_the_prompt_adapt_and_teach_no_pass_rate() -> None:
    from prototypes.prefixes import CountdownWithPrefixes, Prefixes, whole_answer_reward

    task = CountdownWithPrefixes(train_size=40, test_size=8).build()
    selector = Prefixes(share=0.5).build(task.train, 0, BY_REWARDS)

    def observe(prompt: Prompt, rewards: list[float | None]) -> None:
        group = replace(make_group(0, rewards), visit=Visit(0, 0, prompt))
        for rollout in group.rollouts:
            rollout.text = "1 + 2 = 3 , 3 * 4 = 12"
        selector.observe_group(group)

    for prompt in task.train:
        observe(prompt, [1.0, *[0.0] * 15])
    kept = [visit.prompt for visit in selector.select(10) if visit.verdict.keep]
    begun = [prompt for prompt in kept if prompt.columns["prefix"]]
    assert (len(kept), len(begun)) == (10, 5)
    ordinal = begun[0].ordinal % len(task.train)
    assert begun[0].text == f"{task.train[ordinal].text} 1 + 2"
    rates = selector.right_N.copy()
    for rewards, words in (([1.0] * 8, 2), ([0.0] * 8, 3), ([1.0, *[0.0] * 7], 3), ([None] * 8, 3)):
        observe(begun[0], rewards)
        assert selector.lengths[ordinal, True] == words
    assert (selector.right_N == rates).all()
    whole = whole_answer_reward([" , 3 * 4 = 12", "= 12"], [[1, 2, 4]] * 2, [12] * 2, ["steps"] * 2, ["1 + 2 = 3"] * 2)
    assert whole == [1.0, 0.0]


@pytest.mark.usefixtures("trials")
def test_demonstrations_begin_hard_prompts_alone_and_stay() -> None:
    from prototypes.prefixes import CountdownWithPrefixes, Demonstrations

    task = CountdownWithPrefixes(train_size=40, test_size=8).build()
    selector = Demonstrations(share=0.5).build(task.train, 0, BY_REWARDS)
    assert not any(visit.prompt.columns["prefix"] for visit in selector.select(10)), "no rate is known yet"
    for prompt in task.train:
        rewards: list[float | None] = [[0.0] * 16, [1.0] * 16][prompt.ordinal % 2]
        group = replace(make_group(0, rewards), visit=Visit(0, 0, prompt))
        for rollout in group.rollouts:
            rollout.text = "1 + 1 = 2 , 2 + 2 = 4"
        selector.observe_group(group)
    begun = [visit.prompt for visit in selector.select(10) if visit.verdict.keep and visit.prompt.columns["prefix"]]
    assert begun
    for prompt in begun:
        ordinal = prompt.ordinal % len(task.train)
        words = selector.answers[ordinal, True]
        columns = prompt.columns
        assert ordinal % 2 == 0, "the others are easy"
        assert columns["prefix"] == " ".join(words[:3])
        assert verify_steps(" ".join(words), columns["numbers"], columns["target"])
        rest = " ".join(words[3:])
        assert task.reward_funcs[0]([rest], [columns["numbers"]], [columns["target"]], ["steps"], ["1 +"]) == [0.0]
        assert task.reward_funcs[0](
            [rest], [columns["numbers"]], [columns["target"]], ["steps"], [columns["prefix"]]
        ) == [1.0]
    again = Demonstrations(share=0.5).build(task.train, 0, BY_REWARDS)
    assert again.words_for(task.train[0], True) == selector.words_for(task.train[0], True)


def gradient_of(rows: list[Row], loss: LossConfig) -> list[torch.Tensor]:
    """In float64, from a model without float32 norms, with prefix trees."""
    batches = micro_batches(rows, PassLimits(pairs=1e9), pad_id=0)
    return gradients(gpt2().double(), batches, loss)[0]


OF_TOKENS = (LossConfig(policy_loss=Plain(), correction=Truncate(level="token")), LossConfig(entropy_coef=0.05))
"""Losses whose ratios are those of tokens."""


@pytest.mark.usefixtures("trials")
@pytest.mark.parametrize("loss", OF_TOKENS)
def test_the_expected_gradient_of_random_prefixes_is_that_of_whole_rollouts(loss: LossConfig) -> None:
    from prototypes.nat import Nat, prefixes

    rows, options = random_rows(n=3, advantages=(1.0, -0.5, 2.0)), Nat(share=0.5, whole=0.25)
    whole_gradient = gradient_of(rows, loss)
    expected = [torch.zeros_like(gradient) for gradient in whole_gradient]
    for draws in itertools.product((True, False), repeat=len(rows)):
        whole_R = np.array(draws)
        probability = float(np.where(whole_R, options.whole, 1 - options.whole).prod())
        for total, gradient in zip(expected, gradient_of(prefixes(rows, whole_R, options), loss), strict=True):
            total += probability * gradient
    assert_equal(expected, whole_gradient)


@pytest.mark.usefixtures("trials")
def test_a_prefix_is_half_of_the_action_tokens_and_its_draw_is_keyed_by_the_step() -> None:
    from prototypes.nat import Nat, PrefixLearner, prefixes

    rows, options = random_rows(n=200), Nat()
    actions = np.array([row.rollout.action_mask.sum() for row in rows])
    for row, number in zip(rows, actions, strict=True):
        cut, whole = (prefixes([row], np.array([drawn]), options) for drawn in (False, True))
        assert sum(part.rollout.action_mask.sum() for part in whole) == number
        assert cut[0].rollout.action_mask.sum() == -(-number // 2)
        assert cut[0].length <= row.length
        assert [part.weight for part in whole] == [row.weight, 2 * row.weight][: len(whole)]
    local: Any = SimpleNamespace(accumulate=lambda rows, loss, iteration: rows)
    learner = PrefixLearner(local, options)

    def trained(seed: int) -> list[tuple[int, int, float]]:
        torch.manual_seed(seed)
        found: Any = learner.accumulate(rows, LossConfig())
        return [(row.rollout_number or 0, int(row.rollout.action_mask.sum()), row.weight) for row in found]

    assert trained(1) == trained(1) != trained(2)
    assert len(trained(1)) == pytest.approx(len(rows) + 0.5 * (actions > 1).sum(), abs=25)
    assert sum(number for _, number, _ in trained(1)) < actions.sum()


def used_again(rows: list[Row], norms: list[float]) -> Any:
    """A learner under the gate that has used these rows once, and whose window has these norms."""
    from prototypes.dgg import Dgg, GatedLearner

    model = gpt2().double()
    learner = GatedLearner(learner_of(model), model, Dgg(window=4))
    learner.accumulate(rows, LossConfig())
    model.zero_grad(set_to_none=True)
    learner.norms.extend(norms)
    return learner


@pytest.mark.usefixtures("trials")
def test_second_uses_are_skipped_above_the_quantile_of_first_uses() -> None:
    again, fresh = random_rows(n=6, advantages=(1.0, -0.5, 2.0)), random_rows(seed=1, n=4, advantages=(1.0, -1.0))
    loss = LossConfig()
    for norms, skipped in (([1e-9] * 4, True), ([1e9] * 4, False), ([1e-9] * 2, False)):
        learner = used_again(again, norms)
        stats = learner.accumulate([*fresh, *again], loss)
        expected, of_rows = gradients(
            gpt2().double(), [collate(fresh if skipped else [*fresh, *again], pad_id=0)], loss
        )
        assert_equal([p.grad for p in learner.parameters], expected)
        assert stats.sums == pytest.approx(of_rows.sums)
        assert sum(len(log_w_B) for log_w_B in stats.log_w_B) == 4 + 6 * (not skipped)
        assert learner.metrics()["reuse/skips"] == skipped


@pytest.mark.usefixtures("trials")
def test_the_norm_is_of_the_heads_mean_gradient_over_first_uses() -> None:
    again, fresh = random_rows(n=6, advantages=(1.0, -0.5, 2.0)), random_rows(seed=1, n=4, advantages=(1.0, -1.0))
    learner = used_again(again, [1e9] * 4)
    learner.accumulate([*again, *fresh], LossConfig())
    model = gpt2().double()
    gradients(model, [collate(fresh, pad_id=0)], LossConfig())
    mean = model.get_output_embeddings().weight.grad.norm() / sum(row.weight for row in fresh)
    assert learner.norms[-1] == pytest.approx(float(mean))
    learner.norms.extend([1.0, 2.0, 3.0, 4.0])
    assert [learner.is_excessive(norm) for norm in (3.69, 3.71)] == [False, True]  # 0.9 of the way from 1 to 4


@pytest.mark.usefixtures("trials")
def test_the_rate_follows_the_share_of_mixed_groups_within_its_bounds() -> None:
    from prototypes.mixed_rate import MixedRate

    scale = MixedRate(low=0.5, high=1.25).build()

    def after(mixed: int, equal: int, failed: int = 0) -> float:
        """The factor after a step with so many groups."""
        rewards = [[1.0, 0.0]] * mixed + [[1.0, 1.0]] * equal + [[None, None]] * failed
        groups = [make_group(number, list(of_group)) for number, of_group in enumerate(rewards)]
        for group in groups:
            BY_REWARDS.kind(group)
        scale.on_step_end(None, None, None, groups=groups, model=None)
        assert scale.metrics() == {"mixed_rate/factor": scale(0.3)}
        return scale(1.0)

    assert scale(1.0) == 1.0, "before the first step"
    assert after(0, 0, failed=2) == 1.0, "failed groups are not judged"
    assert after(4, 6, failed=5) == 1.0
    assert after(6, 4) == pytest.approx(0.6 / 0.5)
    assert after(10, 0) == 1.25, "not 1.5, the share over the mean of 0.4, 0.6 and 1"
    assert after(1, 9) == 0.5, "not 0.19"


@pytest.mark.usefixtures("trials")
def test_a_step_scale_that_goes_by_groups_is_a_callback_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from prototypes.mixed_rate import MixedRate
    from speedrun import sides

    scale, added = MixedRate().build(), []

    class Fake:
        """Trains nothing."""

        state = SimpleNamespace(log_history=[])

        def __init__(self, **given: Any) -> None:
            self.methods = SimpleNamespace(step_scale=scale)

        add_callback = staticmethod(added.append)
        save_model = train = staticmethod(lambda *args: None)

    monkeypatch.setattr("winnow.run.trainer.Trainer", Fake)
    monkeypatch.setattr(sides, "config_of", lambda spec: SimpleNamespace(model_dump=lambda mode: {}))
    spec = sides.Spec("countdown", "fastest", 0, 1e-4, "cpu", "model", "directory", 1.0, 1.25)
    sides.run_winnow(spec, SimpleNamespace())
    assert added == [scale]


def test_every_arm_is_a_valid_configuration(trials: Any) -> None:
    from speedrun.sides import config_of

    for arm in trials.ARMS.values():
        spec = replace(trials.spec_of("countdown", arm, "model", 120.0), rate=arm.rates[0])
        assert Options.from_config(config_of(spec)).methods


def test_other_sizes_have_models_records_and_tables_of_their_own(
    trials: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speedrun import run

    from winnow.study.warm_start import WarmStartConfig

    made: list[tuple[Path, WarmStartConfig]] = []
    monkeypatch.setattr(run, "WORK", tmp_path)
    monkeypatch.setattr("winnow.run.inputs.build_task", lambda env: None)
    monkeypatch.setattr("winnow.study.warm_start.warm_start", lambda task, path, config: made.append((path, config)))
    page = trials.DOCS.read_text(encoding="utf-8")
    for track in trials.SIZES:
        spec = trials.spec_of(track, trials.ARMS["base"], "model", 120.0)
        assert (spec.track, Path(spec.directory).name) == ("countdown", track)
        assert trials.records_of(track, "base", trials.CAP_S).parent.name == track
        assert f"<!-- trials-{track} -->\n" in page
        run.make_model(*trials.of_speedrun(track))
    run.make_model(*trials.of_speedrun("countdown"))
    assert [path.name for path, _ in made] == ["countdown-64", "countdown-256", "countdown"]
    sizes = [(c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.max_steps) for _, c in made]
    assert sizes == [(64, 192, 2, 1, 270), (256, 768, 8, 1, 270), (128, 384, 4, 1, 270)]


def test_arms_have_as_many_tries_and_seeds_are_unused(trials: Any) -> None:
    assert {len(arm.rates) for arm in trials.ARMS.values()} == {3}
    for arm in trials.ARMS.values():
        assert not set(arm.seeds) & {*trials.TUNING, 0, 1, 2, 3}
    assert not set(trials.SEEDS) & set(trials.FOLLOWING)


def test_averages_of_a_fixed_and_of_a_growing_window(trials: Any) -> None:
    from prototypes.averaging import Averaging

    fixed, growing = Averaging(0.75), Averaging(0.0, span=2.0)
    model = torch.nn.Linear(1, 1, bias=False)
    for step, weight in enumerate([4.0, 8.0, 16.0], 1):
        model.weight.data.fill_(weight)
        for averaging in (fixed, growing):
            averaging.on_step_end(None, SimpleNamespace(global_step=step), None, model=model)
    assert fixed.averages["weight"].item() == pytest.approx(0.75 * (0.75 * 4 + 0.25 * 8) + 0.25 * 16)
    assert growing.averages["weight"].item() == pytest.approx(0.6 * (0.5 * 4 + 0.5 * 8) + 0.4 * 16)
    seen: list[float] = []
    growing.saving(lambda directory: seen.append(model.weight.item()))("here")
    assert seen == [growing.averages["weight"].item()]
    assert model.weight.item() == 16.0, "the run goes on with its own"
