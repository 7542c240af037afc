"""Methods over seeds: who is a seed of whom, what is paired with what, and figures that can be computed by hand."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from winnow.base.errors import ConfigError
from winnow.methods.intervals import mean_interval, score_interval
from winnow.record.ledger import Ledger, LedgerError
from winnow.record.records import RunDirectoryError
from winnow.study.compare import Comparison, MethodResult, compare, reached_at
from winnow.study.compare_data import Point
from winnow.study.compare_view import render, write_page
from winnow.types import Fate, Group, Prompt, Visit

from ..builders.pages import HOSTILE, Page, rollout

# intervals


def test_constants_have_no_spread() -> None:
    e = mean_interval([0.25] * 4)
    assert (e.mean, e.low, e.high, e.n) == (0.25, 0.25, 0.25, 4)


def test_few_values_get_no_interval() -> None:
    for values in ([1.0], [1.0, 3.0]):
        e = mean_interval(values)
        assert e.low is e.high is None
        assert e.mean == np.mean(values)


@pytest.mark.parametrize("n", [3, 4, 5, 17, 31, 32, 100, 1000])
def test_the_interval_is_students(n: int) -> None:
    values = np.random.default_rng(n).normal(0.3, 2.0, n)
    e = mean_interval(values)
    expected = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert (e.low, e.high) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(("share", "n"), [(0.0, 3), (2 / 3, 3), (0.9, 10), (1.0, 8), (0.4, 200)])
def test_the_interval_of_a_share_is_wilsons(share: float, n: int) -> None:
    expected = stats.binomtest(round(share * n), n).proportion_ci(method="wilson")
    assert score_interval(share, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize("values", [[], [1.0, math.nan, 2.0], [math.inf], [[1.0, 2.0]]])
def test_what_has_no_mean_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        mean_interval(values)


# the level


def test_reached_at_interpolates_between_evaluations() -> None:
    curve = [Point(0, 0, 0, 0.1), Point(10, 1000, 80, 0.3), Point(20, 3000, 160, 0.2), Point(30, 4000, 240, 0.5)]
    assert reached_at(curve, 0.2, lambda p: p.tokens) == pytest.approx(500)
    assert reached_at(curve, 0.2, lambda p: p.rollouts) == pytest.approx(40)
    assert reached_at(curve, 0.3, lambda p: p.step) == 10
    assert reached_at(curve, 0.4, lambda p: p.tokens) == pytest.approx(3000 + 1000 * 2 / 3)
    assert reached_at(curve, 0.05, lambda p: p.tokens) == 0
    assert reached_at(curve, 0.51, lambda p: p.tokens) is None


# runs


def make(
    path: Path, passed: list[float], *, seed: int = 0, tokens: int = 1000, finished: bool = True, **config: Any
) -> Path:
    """A run that is evaluated every 10 of its steps; each step rolls out 4 groups of 2, `tokens` tokens in all."""
    path.mkdir(parents=True)
    steps = 10 * (len(passed) - 1)
    lines: list[dict[str, float]] = [{"step": 0, "num_tokens": 0}]
    for step in range(1, steps + 1):
        zero = 0.25 if step <= steps - steps // 10 else 0.75
        groups = {"groups/rolled_out": 4.0, "groups/size_mean": 2.0, "frac_reward_zero_std": zero}
        lines.append({"step": step, "num_tokens": tokens * step, **groups})
    for i, p in enumerate(passed):
        lines[10 * i] |= {"eval/pass@1": p, "eval/pass@4": min(1.0, 2 * p)}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = {"seed": seed, "model": f"models/s{seed}", "output_dir": str(path), "env": "countdown", "max_steps": steps}
    (path / "config.json").write_text(json.dumps(base | config))
    with Ledger.open(path / "ledger.sqlite") as ledger:
        visits = [Visit(i, 0, Prompt(f"p{i}", i, "x")) for i in range(3)]
        ledger.visit(visits, step=0, version=0)
        for visit in visits:
            members = [rollout(i, 0, reward=float(i), fate=Fate.TRAINED, tokens=tokens // 100) for i in range(2)]
            ledger.finish(Group(visit, members), step=0)
        ledger.evaluation(0, rollouts=999, tokens=9999, seconds=1.0)
        ledger.set_meta("finished", "true" if finished else "false")
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three seeds of two methods; `fast` gains 0.1 more everywhere and has half the tokens a step."""
    slow = [make(tmp_path / f"grpo-s{s}", [0.1, 0.2, 0.3 + s / 10], seed=s) for s in range(3)]
    options: dict[str, Any] = {"selector": "greso", "tokens": 500}
    fast = [make(tmp_path / f"greso-s{s}", [0.1, 0.3, 0.4 + s / 10], seed=s, **options) for s in range(3)]
    return [*slow, *fast]


def by_name(found: Comparison) -> dict[str, MethodResult]:
    return {m.name: m for m in found.methods}


def test_methods_are_paired_by_seed(runs: list[Path]) -> None:
    found = compare(runs[::-1], baseline="grpo")
    methods = by_name(found)
    assert list(methods) == ["greso", "grpo"]
    assert [r.seed for r in methods["greso"].runs] == [2, 1, 0]
    greso = methods["greso"]
    assert greso.means["pass@1"] is not None
    assert greso.means["pass@1"].mean == pytest.approx(0.5)
    difference = greso.against["pass@1"]
    assert difference is not None
    assert (difference.low, difference.mean, difference.high) == pytest.approx((0.1, 0.1, 0.1)), "seeds cancel"
    assert greso.against["pass@4"] is not None
    assert greso.against["pass@4"].mean == pytest.approx((0.2 + 0.2 + 0.0) / 3)
    tokens = greso.against["tokens"]
    assert tokens is not None
    assert (tokens.low, tokens.mean, tokens.high) == pytest.approx((0.5, 0.5, 0.5))
    assert greso.means["tokens"] is not None
    assert greso.means["tokens"].mean == 6 * 5, "of the ledger, without evaluation"
    assert greso.means["rollouts"] is not None
    assert greso.means["rollouts"].mean == 6, "of the ledger, without evaluation"
    assert greso.means["zero_variance"] is not None
    assert greso.means["zero_variance"].mean == pytest.approx(0.75)
    assert not any(methods["grpo"].against.values())


def test_metrics_that_end_early_are_noted(tmp_path: Path) -> None:
    """A finished run whose last line is torn is not a shorter run."""
    whole, torn = make(tmp_path / "a", [0.1, 0.2, 0.3]), make(tmp_path / "b", [0.1, 0.2, 0.3])
    lines = (torn / "metrics.jsonl").read_text().splitlines()
    (torn / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    found = compare([whole, torn], seeds=False)
    assert any("took 20 steps, but the last evaluation in it is of 10" in note for note in found.notes)


def test_rollouts_count_greedy_ones(tmp_path: Path) -> None:
    run = make(tmp_path / "a", [0.1, 0.2])
    lines = [json.loads(line) | {"rollouts/sampled": 12.0} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare([run, make(tmp_path / "b", [0.1, 0.2])], seeds=False).methods[0].runs[0].curve[-1].rollouts == 132


def test_cost_of_reaching_the_baseline(runs: list[Path]) -> None:
    methods = by_name(compare(runs))
    assert methods["greso"].paired == methods["greso"].reached == 3
    # levels 0.3, 0.4, 0.5 on greso's curves 0.1, 0.3, 0.4 + s/10
    steps = [10, 10 + 10 * 0.1 / 0.2, 10 + 10 * 0.2 / 0.3]
    for run, wanted in zip(methods["greso"].runs, steps, strict=True):
        assert run.values["steps_to_baseline"] == pytest.approx(wanted)
        assert run.values["tokens_to_baseline"] == pytest.approx(500 * wanted)
        assert run.values["rollouts_to_baseline"] == pytest.approx(8 * wanted)
    assert all(run.values["steps_to_baseline"] == 20 for run in methods["grpo"].runs)
    ratio = methods["greso"].against["tokens_to_baseline"]
    assert ratio is not None
    assert ratio.mean == pytest.approx(math.prod(500 * s / 20_000 for s in steps) ** (1 / 3))


def test_not_reached_is_counted_and_shown(runs: list[Path]) -> None:
    found = compare(runs, baseline="greso")
    grpo = by_name(found)["grpo"]
    assert (grpo.paired, grpo.reached) == (3, 0)
    assert grpo.means["tokens_to_baseline"] is None
    assert "0 of 3 seeds reached it" in text(found)


def text(found: Comparison) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(found, 200))
    return console.export_text()


def test_names_come_from_directories(tmp_path: Path) -> None:
    def names(*paths: str, **config: Any) -> list[str]:
        made = [make(tmp_path / p, [0.1, 0.2], seed=i, **config) for i, p in enumerate(paths)]
        other = make(tmp_path / paths[0] / "other-s7", [0.1, 0.2], seed=7, advantage="rloo")
        return list(by_name(compare([*made, other])))

    assert names("a/grpo-s0", "a/grpo-s1") == ["grpo", "other"]
    assert names("b/greso-k4_seed0", "b/greso-k4_seed1") == ["greso-k4", "other"]
    assert names("c/dapo/s0", "c/dapo/s1") == ["dapo", "other"]
    assert names("d/dapo/0") == ["dapo", "other"]
    assert names("e/rloo-a", "e/rloo-b") == ["rloo", "other"]
    assert names("f/0/same", "f/1/same") == ["same", "other"]


def test_equal_names_are_told_apart_and_defaults_do_not_matter(tmp_path: Path) -> None:
    a = make(tmp_path / "a/grpo-s0", [0.1, 0.2], seed=0)
    b = make(tmp_path / "b/grpo-s0", [0.1, 0.2], seed=0, learning_rate=1.0)
    c = make(tmp_path / "c/grpo-s1", [0.1, 0.2], seed=1, beta=0.0)  # a key that an older run does not have
    found = compare([a, b, c])
    assert {name: len(m.runs) for name, m in by_name(found).items()} == {"grpo": 2, "grpo (2)": 1}
    assert "grpo (2) is a method of its own, as its runs differ from grpo's in learning_rate." in found.notes
    assert not any("of its own" in note for note in compare([a, b], seeds=False).notes)


def test_what_auto_chose_on_another_machine_is_no_other_method(tmp_path: Path) -> None:
    a = make(tmp_path / "grpo-s0", [0.1, 0.2], seed=0, tokens_per_microbatch=879, threads=2)
    b = make(tmp_path / "grpo-s1", [0.1, 0.2], seed=1, tokens_per_microbatch=16_384, gradient_checkpointing=True)
    assert {name: len(m.runs) for name, m in by_name(compare([a, b])).items()} == {"grpo": 2}


def test_what_a_resume_or_the_free_memory_changes_is_no_other_method(tmp_path: Path) -> None:
    engine = {"name": "vllm", "gpu_memory_utilization": 0.25, "slots": 64}
    a = make(tmp_path / "grpo-s0", [0.1, 0.2], seed=0, engine="vllm", run_name="grpo-s0")
    b = make(tmp_path / "grpo-s1", [0.1, 0.2], seed=1, engine=engine, save_steps=10, reward_timeout_s=60.0)
    c = make(tmp_path / "grpo-s2", [0.1, 0.2], seed=2, engine=engine | {"dtype": "bfloat16"})
    d = make(tmp_path / "grpo-s3", [0.1, 0.2], seed=3, engine=engine | {"max_length": 64})  # where rollouts end
    found = compare([a, b, c, d])
    assert {name: len(m.runs) for name, m in by_name(found).items()} == {"grpo": 2, "grpo (2)": 1, "grpo (3)": 1}
    assert any("differ from grpo's in engine" in note for note in found.notes)


@pytest.mark.parametrize(("width", "tables"), [(60, 5), (80, 4), (400, 1)])
def test_many_methods_stay_legible_in_a_narrow_terminal(tmp_path: Path, width: int, tables: int) -> None:
    found = compare([make(tmp_path / f"method-named-{c}", [0.1, 0.2], seed=0, beta=ord(c) / 10) for c in "abcdefghij"])
    page = io.StringIO()
    Console(width=width, file=page).print(render(found, width))
    shown = page.getvalue()
    assert shown.count("┏") == tables
    assert all(f"method-named-{c}" in shown for c in "abcdefghij")
    assert "…" not in shown


def test_the_profile_of_a_seed_is_no_other_method(tmp_path: Path) -> None:
    made = []
    for s in range(2):
        profile = tmp_path / f"p{s}.jsonl"
        profile.with_name(profile.name + ".meta.json").write_text(json.dumps({"cost": {"tokens": 1000 * (s + 1)}}))
        selector = {"name": "pass_rate", "profile": str(profile), "refresh_steps": 5}
        made.append(make(tmp_path / f"pass_rate-s{s}", [0.1, 0.2], seed=s, selector=selector))
    found = compare([*made, make(tmp_path / "grpo-s0", [0.1, 0.2])])
    assert list(by_name(found)) == ["pass_rate", "grpo"]
    assert any("profiles cost 1,500 tokens" in note for note in found.notes)
    assert any("during training" in note and "cost 9,999 tokens" in note for note in found.notes)


def test_what_cannot_be_compared_is_named(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two"):
        compare(runs[:1])
    with pytest.raises(ConfigError, match=r"no method 'gres'.*Did you mean 'greso'"):
        compare(runs, baseline="gres")
    with pytest.raises(ConfigError, match=r"grpo-s0 and .*copy.*same seed 0"):
        compare([*runs, make(tmp_path / "copy", [0.1, 0.2, 0.3])])
    longer = make(tmp_path / "grpo-s9", [0.1, 0.2, 0.3, 0.4], seed=9, max_steps=20)
    with pytest.raises(ConfigError, match=r"grpo-s0 and .*grpo-s9: one method, evaluated at different steps"):
        compare([*runs, longer])
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        compare([*runs, tmp_path])
    bare = make(tmp_path / "bare", [0.1, 0.2])
    (bare / "metrics.jsonl").write_text('{"step": 1, "num_tokens": 5}\n')
    with pytest.raises(ConfigError, match="bare: has no held-out evaluation"):
        compare([*runs, bare])
    (runs[0] / "ledger.sqlite").write_bytes(b"not a ledger, surely not" * 50)
    with pytest.raises(LedgerError, match="ledger"):
        compare(runs)


def test_unfinished_runs(runs: list[Path], tmp_path: Path) -> None:
    short = make(tmp_path / "short-s0", [0.1, 0.2], finished=False, max_steps=20)
    with pytest.raises(ConfigError, match=r"not finished: .*short-s0"):
        compare([*runs, short])
    found = compare([*runs, short], seeds=False)
    assert [m.name for m in found.methods] == [p.name for p in [*runs, short]]
    assert any("short-s0 is not finished; it ends at step 10" in note for note in found.notes)
    difference = by_name(found)["greso-s2"].against["pass@1"]
    assert difference is not None
    assert difference.mean == pytest.approx(0.6 - 0.3), "without seeds every run is compared with the first"
    assert difference.low is None


def test_notes_say_what_spoils_a_comparison(runs: list[Path], tmp_path: Path) -> None:
    assert compare(runs).notes == ()
    odd = make(tmp_path / "odd-s0", [0.3, 0.4], model="another", eval_temperature=0.6, beta=0.1)
    lone = make(tmp_path / "odd-s8", [0.3, 0.4], seed=8, eval_temperature=0.6, beta=0.1)
    found = compare([*runs, odd, lone])
    notes = "\n".join(found.notes)
    assert "differ in eval_temperature" in notes
    assert "odd: starts from another model than grpo at seed 0" in notes
    assert "odd: grpo has no run of seed 8; not paired" in notes
    assert "fewer than 3 seeds: odd" in notes
    assert "before any training at seed 0" in notes
    assert by_name(found)["odd"].against["tokens_to_baseline"] is None


def test_rewards_decide_what_is_right(tmp_path: Path) -> None:
    """So runs with other rewards are not of the same thing; one of a version that had no such key is."""
    same = [make(tmp_path / f"a-s{seed}", [0.1, 0.2], seed=seed, filter="keep_all") for seed in range(3)]
    own = {"env": {"name": "countdown"}, "beta": 0.2}
    named = [make(tmp_path / f"b-s{seed}", [0.1, 0.2], seed=seed, **own) for seed in range(3)]
    other = [make(tmp_path / f"c-s{seed}", [0.1, 0.2], seed=seed, reward_funcs=["math"]) for seed in range(3)]
    assert not any("differ in" in note for note in compare([*same, *named]).notes)
    assert any("differ in reward_funcs" in note for note in compare([*same, *other]).notes)


def test_a_run_whose_right_answers_became_unknown(tmp_path: Path) -> None:
    run = make(tmp_path / "a-s0", [0.1, 0.2, 0.3])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        if "eval/pass@1" in line:
            line["eval/avg@n"] = line.pop("eval/pass@1") + 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="right answers became unknown during the run; train it with success set"):
        compare([run, run])


def test_views(runs: list[Path], tmp_path: Path) -> None:
    hostile = make(
        tmp_path / HOSTILE.replace("/", "").replace("\x00", "").replace("\ud800", ""), [0.2, 0.3], seed=3, beta=0.2
    )
    found = compare([*runs, hostile])
    assert json.loads(json.dumps(asdict(found), allow_nan=False))["baseline"] == "grpo"
    assert "\x1b" not in text(found)
    shown = text(compare(runs))
    assert "+0.100 [+0.100, +0.100]" in shown
    assert "×0.50 [0.50, 0.50]" in shown
    write_page(found, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert len(page.text) < 2_000_000
    assert page.tags.count("body") == 1
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    greso = page.data["methods"][1]
    assert greso["curve"]["num_tokens"] == [0, 5000, 10_000]
    assert greso["curve"]["low"] == pytest.approx([0.1, 0.3, 0.4])
    assert greso["curve"]["mean"] == pytest.approx([0.1, 0.3, 0.5])
    assert greso["curve"]["high"] == pytest.approx([0.1, 0.3, 0.6])
    assert len(greso["cells"]) == len(page.data["measures"])
    with pytest.raises(FileNotFoundError, match="folder does not exist"):
        write_page(found, tmp_path / "no" / "page.html")


def test_a_seed_that_solved_its_task_may_have_fewer_evaluations(tmp_path: Path) -> None:
    long, short = (make(tmp_path / f"a-s{i}", [0.1, 0.2, 0.9, 0.9][: 4 - i], seed=i, max_steps=30) for i in range(2))
    with Ledger.open(short / "ledger.sqlite") as ledger:
        ledger.set_meta("solved", "true")
    write_page(compare([long, short, make(tmp_path / "b", [0.1] * 4, beta=0.1)]), tmp_path / "page.html")
    assert Page(tmp_path / "page.html").data["methods"][0]["curve"]["step"] == [0, 10, 20]
