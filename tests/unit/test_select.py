"""GRESO, backoff, rollout batches: formulas by hand, the stream, memory and exact resume."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.methods.advantage import ADVANTAGES
from winnow.methods.group_kind import GroupJudge
from winnow.methods.pass_rates import PassRate
from winnow.methods.select import SELECTORS
from winnow.methods.select.backoff import Backoff
from winnow.methods.select.greso import Greso, GresoSelector, adjust, rollout_batch_size, skip_probability
from winnow.methods.select.stream import MAX_SKIPPED_IN_A_ROW
from winnow.methods.size import ROLLOUT_BATCHES
from winnow.methods.success import Success
from winnow.types import Group, GroupKind, Prompt, Visit

from ..builders.groups import make_group

PROMPTS = [Prompt(f"p{i}", i, text=str(i)) for i in range(10)]
EASY, HARD, MIXED = [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]


def finished(visit: Visit, rewards: list[Any]) -> Group:
    group = make_group(visit.number, rewards)
    group.visit = visit
    return group


def kept(visits: list[Visit]) -> list[Visit]:
    return [v for v in visits if v.verdict.keep]


class TestFormulas:
    def test_skip_probability(self) -> None:
        assert skip_probability(0, 0.5) == 0.0
        assert skip_probability(0, 0.0) == 0.0, "unseen prompts are never skipped"
        assert skip_probability(3, 0.5) == 0.875
        np.testing.assert_allclose(skip_probability(np.array([0, 1, 2]), np.array([0.2, 0.2, 0.1])), [0, 0.8, 0.99])

    @pytest.mark.parametrize(
        ("missing", "share", "default", "expected"),
        [
            (256, 0.0, 384, 320),
            (256, 0.5, 384, 384),
            (4, 0.5, 384, 10),
            (1, 0.9, 384, 13),
            (8, 1.0, 48, 48),
            (0, 0.3, 48, 0),
        ],
    )
    def test_rollout_batch_size(self, missing: int, share: float, default: int, expected: int) -> None:
        assert rollout_batch_size(missing, share, default) == expected

    def test_adjust(self) -> None:
        assert adjust(0.5, share=0.3, target=0.3) == pytest.approx(0.49), "at the target counts as over it"
        assert adjust(0.5, share=0.29, target=0.3) == pytest.approx(0.51)
        assert adjust(0.05, 1.0, 0.1) == 0.05
        assert adjust(1.0, 0.0, 0.1) == 1.0
        assert adjust(0.95, 0.0, 0.1, cap=0.95) == 0.95

    @pytest.mark.parametrize("easy_share", [1 / 3, 1 / 5, 2 / 3])
    def test_a_share_that_is_the_target_counts_as_over_it(self, easy_share: float) -> None:
        """Whatever both are in floating point: 4/24 hard groups are at the default target of 0.25 * (1 - 1/3)."""
        for part in (easy_share, 1 - easy_share):
            target = Fraction(1, 4) * Fraction(part).limit_denominator(100)
            for groups in range(1, 400):
                for zero in range(groups + 1):
                    lower = adjust(0.5, zero / groups, 0.25 * part) < 0.5
                    assert lower == (Fraction(zero, groups) >= target), (zero, groups)


class TestGreso:
    def build(self, **options: Any) -> GresoSelector:
        return Greso(**options).build(PROMPTS, seed=1)

    def test_the_first_epoch_skips_nothing(self) -> None:
        selector = self.build()
        visits = selector.select(10)
        assert all(v.verdict.keep for v in visits)
        assert sorted(v.prompt.ordinal for v in visits) == list(range(10))

    def test_the_trace_counts_runs_of_either_kind_and_an_effective_visit_resets(self) -> None:
        selector = self.build()
        for rewards, z in ((HARD, 1), (EASY, 2), (EASY, 3), (MIXED, 0), (HARD, 1), ([None, 0.0], 1), ([None, None], 1)):
            selector.observe_group(finished(Visit(0, 0, PROMPTS[4]), rewards))
            assert selector.z_N[4] == z
        assert selector.z_N.sum() == 1

    def test_the_last_visit_decides_which_base_probability_counts(self) -> None:
        selector = self.build(p_easy=0.9, p_hard=0.1)
        for rewards in (HARD, HARD, EASY):
            selector.observe_group(finished(Visit(0, 0, PROMPTS[0]), rewards))
        assert selector._keep_probability(np.array([0]))[0] == pytest.approx(0.9**3)
        selector.observe_group(finished(Visit(0, 0, PROMPTS[0]), HARD))
        assert selector._keep_probability(np.array([0]))[0] == pytest.approx(0.1**4)

    def test_skips_at_the_rate_it_says(self) -> None:
        prompts = [Prompt(str(i), i, text="") for i in range(4000)]
        selector = Greso().build(prompts, seed=0)
        for prompt in prompts:
            for _ in range(2):
                selector.observe_group(finished(Visit(0, 0, prompt), HARD))
        visits = selector.select(500)
        share = len(kept(visits)) / len(visits)
        assert share == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / len(visits)) ** 0.5)
        assert {v.verdict.probability for v in kept(visits)} == {0.25}
        skipped = next(v for v in visits if not v.verdict.keep)
        assert skipped.verdict.reason == "greso: hard, 2 zero-variance visits in a row"
        assert skipped.verdict.probability == 0.75

    def test_adjusts_once_a_step_and_only_after_the_first_epoch(self) -> None:
        selector = self.build()
        for visit in selector.select(6):
            selector.observe_group(finished(visit, HARD))
        selector.end_step()
        assert (selector.p[0], selector.p[1]) == (0.5, 0.5), "still in the first epoch"
        visits = selector.select(6)
        for visit, rewards in zip(kept(visits), [HARD, HARD, MIXED, MIXED, MIXED, MIXED], strict=True):
            selector.observe_group(finished(visit, rewards))
        selector.end_step()
        assert selector.p[0] == pytest.approx(0.51), "0 of 6 easy, target 1/12"
        assert selector.p[1] == pytest.approx(0.49), "2 of 6 hard, target 1/6"
        selector.end_step()
        assert selector.p[0] == pytest.approx(0.51), "a step without groups says nothing"

    def test_a_tie_of_groups_that_were_seen_in_part(self) -> None:
        """A sixth of the groups is hard, a twelfth easy, and of each `seen` of `size` siblings are known."""
        for size, seen in ((6, 2), (7, 3), (10, 3), (12, 5)):
            for times in (1, 2, 3, 5):
                selector = Greso().build([Prompt(str(i), i, text="") for i in range(60)], seed=1)
                selector.select(60)
                visits = selector.select(60)
                for visit, kind in zip(visits, [EASY, HARD, HARD, *[MIXED] * 9] * times, strict=False):
                    selector.observe_group(finished(visit, [*kind, *[kind[0]] * (seen - 2), *[None] * (size - seen)]))
                selector.end_step()
                assert [selector.p[0], selector.p[1]] == pytest.approx([0.49, 0.49]), (size, seen, times)

    def test_easy_means_all_at_the_maximum_reward_of_the_run(self) -> None:
        selector = Greso().build(PROMPTS, 0, GroupJudge(Success(at_least=2.0)))
        selector.observe_group(finished(Visit(0, 0, PROMPTS[0]), EASY))
        assert selector.kind_N[0] == 2
        selector.observe_group(finished(Visit(0, 0, PROMPTS[0]), [2.0, 2.0]))
        assert selector.kind_N[0] == 1

    def test_shares_come_to_their_targets(self) -> None:
        """Prompts that never teach: half easy, a quarter hard; both p find what lets 1/12 and 1/6 through."""
        prompts = [Prompt(str(i), i, text="") for i in range(400)]
        selector = Greso(step=0.02).build(prompts, seed=0)
        rewards = {i: EASY if i % 4 < 2 else HARD if i % 4 == 2 else MIXED for i in range(400)}
        shares = []
        for _ in range(600):
            groups = [finished(v, rewards[v.prompt.ordinal]) for v in kept(selector.select(32))]
            for group in groups:
                selector.observe_group(group)
            kinds = [tuple(g.rewards()) for g in groups]
            shares.append((kinds.count((1.0, 1.0)) / 32, kinds.count((0.0, 0.0)) / 32))
            selector.end_step()
        easy, hard = np.mean(shares[300:], axis=0)
        assert easy == pytest.approx(0.25 / 3, abs=0.05)
        assert hard == pytest.approx(0.25 * 2 / 3, abs=0.05)

    def test_options_are_checked(self) -> None:
        for options in ({"target": 1.5}, {"p_easy": 0.01}, {"cap": 0.4}, {"step": -1}):
            with pytest.raises(ValueError, match=r"must|Input should be"):
                Greso(**options)

    @pytest.mark.parametrize("name", ["target", "easy_share", "floor", "cap"])
    def test_options_of_the_controller_have_no_effect_without_it(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} has no effect with step: 0"):
            Greso(step=0, **{name: 0.4})
        assert Greso(step=0, p_easy=0.01).p_easy == 0.01, "no floor either"

    def test_a_million_prompts_select_fast_in_sixteen_bytes_each(self) -> None:
        """The time is printed, not asserted."""
        n = 1_000_000
        selector = Greso().build(_Many(n), seed=0)  # type: ignore[arg-type]
        rng = np.random.default_rng(0)
        selector.z_N[:] = rng.integers(0, 6, n)
        selector.kind_N[:] = np.where(selector.z_N > 0, rng.integers(1, 3, n), 0)
        started = time.perf_counter()
        visits = selector.select(256)
        print(f"{time.perf_counter() - started:.4f} s for {len(visits)} visits")
        assert len(kept(visits)) == 256
        arrays = [v for v in vars(selector).values() if isinstance(v, np.ndarray)]
        assert sum(a.nbytes for a in arrays) <= 16 * n


class _Many:
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(str(i), i, text="")


class TestBackoff:
    def test_k_in_a_row_skips_k_epochs(self) -> None:
        selector = Backoff().build(PROMPTS, seed=0)
        seen = []
        for _ in range(12):
            visits = []
            epoch = selector.epoch
            while selector.epoch == epoch:
                visits += selector.select(1)
                for v in kept(visits[-1:]):
                    selector.observe_group(finished(v, HARD if v.prompt.ordinal == 3 else MIXED))
            seen += [v.epoch for v in visits if v.prompt.ordinal == 3 and v.verdict.keep]
        assert seen == [0, 2, 5, 9], "skips 1, then 2, then 3 epochs"


def test_a_group_with_too_few_rewards_teaches_a_selector_nothing() -> None:
    judge = GroupJudge(advantage=ADVANTAGES["max_at_k"](k=4))
    assert judge.kind(make_group(0, [1.0, 1.0, 1.0, None])) is GroupKind.NOT_JUDGED
    selector = Greso().build(PROMPTS, 0, judge)
    selector.observe_group(finished(Visit(0, 0, PROMPTS[0]), [1.0, 1.0, 1.0, None]))
    assert selector.z_N[0] == 0


class TestRolloutBatches:
    def test_exact_replaces_one_by_one(self) -> None:
        exact = ROLLOUT_BATCHES["exact"]().build(32)
        assert exact.next(32, 0, 1.0) == 32
        assert exact.next(32, 30, 0.5) == 2
        assert exact.next(5, 5, 0.5) == 0
        assert not exact.carry

    def test_rounds_wait_for_the_one_before(self) -> None:
        fixed, adaptive = ROLLOUT_BATCHES["fixed"]().build(32), ROLLOUT_BATCHES["adaptive"]().build(32)
        for rounds in (fixed, adaptive):
            assert rounds.next(32, 1, 0.5) == 0
            assert rounds.next(0, 0, 0.5) == 0
            assert rounds.next(32, 0, 1.0) == 48
        assert fixed.next(1, 0, 0.0) == 48
        assert adaptive.next(1, 0, 0.5) == 3
        assert adaptive.next(32, 0, 0.1) == 45
        assert ROLLOUT_BATCHES["adaptive"](size=20).build(32).next(32, 0, 0.1) == 20


@pytest.mark.parametrize("name", ["greso", "backoff"])
def test_an_exhausted_stream_gives_fewer_and_never_hangs(name: str) -> None:
    selector = SELECTORS[name](**({"p_easy": 0.05, "p_hard": 0.05} if name == "greso" else {})).build(PROMPTS, 0)
    selector.z_N[:] = 60_000
    selector.kind_N[:] = 2
    visits = selector.select(4)
    assert len(visits) == MAX_SKIPPED_IN_A_ROW
    assert not kept(visits)


@pytest.mark.parametrize("name", ["uniform", "greso", "backoff", "bayes", "thompson"])
def test_no_prompt_has_an_epoch_twice_and_the_calls_do_not_matter(name: str) -> None:
    visits = SELECTORS[name]().build(PROMPTS, 7).select(40)
    assert len({(v.epoch, v.prompt.ordinal) for v in visits}) == len(visits)
    one_by_one, parts = SELECTORS[name]().build(PROMPTS, 7), []
    while len(parts) < len(visits):
        parts += one_by_one.select(1)
    assert parts == visits


@pytest.mark.parametrize("name", ["greso", "backoff", "bayes", "thompson"])
@pytest.mark.parametrize("k", [1, 5, 11, 17])
def test_resume_with_history_is_exact(name: str, k: int) -> None:
    def build() -> Any:
        return SELECTORS[name]().build(PROMPTS, 7)

    def play(selector: Any, steps: range) -> list[Visit]:
        seen = []
        for step in steps:
            visits = selector.select(3)
            for v in kept(visits):
                rewards = [EASY, HARD, MIXED][(v.prompt.ordinal + step) % 3 if v.prompt.ordinal > 4 else 1]
                selector.observe_group(finished(v, rewards))
            seen += visits
            selector.metrics()
            selector.end_step()
        return seen

    whole, part = build(), build()
    before = play(whole, range(k))
    assert play(part, range(k)) == before
    resumed = build()
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert play(resumed, range(k, 30)) == play(whole, range(k, 30))
    assert resumed.state_dict() == whole.state_dict()


class TestPassRate:
    def write(self, path: Path, rates: dict[str, float]) -> str:
        path.write_text("".join(PassRate(i, 16, int(16 * r), r).line() + "\n" for i, r in rates.items()))
        return str(path)

    def test_dead_and_solved_are_skipped_and_unprofiled_stay(self, tmp_path: Path) -> None:
        profile = self.write(tmp_path / "p.jsonl", {"p0": 0.0, "p1": 1.0, "p2": 1 / 16, "elsewhere": 0.5})
        selector = SELECTORS["pass_rate"](profile=profile).build(PROMPTS, 0)
        visits = [v for v in selector.select(24) if v.epoch < 3]
        assert {v.prompt.ordinal for v in visits if not v.verdict.keep} == {0, 1}
        assert {v.prompt.ordinal for v in kept(visits)} == set(range(2, 10))
        reasons = {v.verdict.reason.split(",")[0] for v in visits if not v.verdict.keep}
        assert reasons == {"pass_rate: 0", "pass_rate: 1"}
        assert selector.metrics()["pass_rate/in_band"] == 0.8

    def test_the_edges_of_the_band_are_in_it(self) -> None:
        selector = SELECTORS["pass_rate"](refresh_steps=1, low=0.2, high=0.8).build(PROMPTS, 0)
        selector.profiled(PassRate(p.id, 10, p.ordinal, p.ordinal / 10) for p in PROMPTS)
        assert selector.in_band().tolist() == [2 <= i <= 8 for i in range(10)]

    def test_a_refresh_replaces_the_rates(self) -> None:
        selector = SELECTORS["pass_rate"](refresh_steps=5, n=4, low=0.3, high=0.7).build(PROMPTS, 0)
        assert [selector.wants_profile(step) for step in (1, 4, 5, 10)] == [0, 0, 4, 4]
        assert len(selector.select(10)) == 10
        assert selector.profiled(PassRate(p.id, 4, p.ordinal % 5, 0.5) for p in PROMPTS) == 10
        assert {v.prompt.ordinal for v in kept(selector.select(4))} == {2, 7}
        again = SELECTORS["pass_rate"](refresh_steps=5, n=4, low=0.3, high=0.7).build(PROMPTS, 0)
        again.load_state_dict(json.loads(json.dumps(selector.state_dict())))
        assert again.select(6) == selector.select(6)

    def test_what_cannot_be_used_is_refused(self, tmp_path: Path) -> None:
        build = SELECTORS["pass_rate"]
        for options, message in (
            ({}, "give profile"),
            ({"refresh_steps": 0}, "refresh_steps"),
            ({"refresh_steps": 1, "low": 0.9, "high": 0.1}, "band"),
            ({"refresh_steps": 1, "n": 0}, r"n\n.*greater than 0 "),
            ({"profile": "p.jsonl", "n": 8}, "n has no effect without refresh_steps"),
        ):
            with pytest.raises(ValueError, match=message):
                build(**options)
        other = self.write(tmp_path / "other.jsonl", {"x": 0.5})
        with pytest.raises(ValueError, match=r"other.jsonl: none of its 1 prompts is in this task"):
            build(profile=other).build(PROMPTS, 0)
        dead = self.write(tmp_path / "dead.jsonl", {p.id: 0.0 for p in PROMPTS})
        with pytest.raises(ValueError, match=r"dead.jsonl: no prompt has a pass rate in"):
            build(profile=dead).build(PROMPTS, 0)


def graded(*levels: Any) -> list[Prompt]:
    return [Prompt(f"p{i}", i, text=str(i), columns={"level": level, "n": i}) for i, level in enumerate(levels)]


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"descending": True}, [4, 3, 2, 1, 0]),
        ({"by": "level"}, [2, 4, 0, 3, 1]),
        ({"by": "level", "descending": True}, [1, 0, 3, 2, 4]),
        ({"by": "level", "levels": ["2", "-1", "30.5"]}, [0, 3, 2, 4, 1]),
    ],
)
def test_ordered(options: dict[str, Any], order: list[int]) -> None:
    """The same in every epoch, whatever the seed; prompts of one level keep the order of the data."""
    for seed in (0, 1):
        visits = SELECTORS["ordered"](**options).build(graded(2, 30.5, -1, 2, -1), seed).select(12)
        assert [v.prompt.ordinal for v in visits] == (order * 3)[:12]
        assert [v.epoch for v in visits] == [0] * 5 + [1] * 5 + [2] * 2


@pytest.mark.parametrize(
    ("options", "levels", "message"),
    [
        ({"by": "levl"}, [1], r"'p0' has no column 'levl' \(columns: level, n\)\. Did you mean 'level'\?"),
        ({"by": "level"}, [1, None], "'p1' has no value in column 'level'"),
        ({"by": "level"}, [1, float("nan")], "'p1' has nan in column 'level', which is no number"),
        ({"by": "level"}, ["hard", "easy"], r"'p0' has the word 'hard' .* levels: \[hard, easy\]"),
        ({"by": "level", "levels": ["easy"]}, ["easy", "hard"], "'p1' has level 'hard', which is none of levels: easy"),
        ({"levels": ["easy"]}, [1], "levels has no effect without by"),
        ({"by": "level", "levels": ["a", "a"]}, ["a"], "a value twice"),
    ],
)
def test_what_cannot_be_ordered(options: dict[str, Any], levels: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SELECTORS["ordered"](**options).build(graded(*levels), 0)
