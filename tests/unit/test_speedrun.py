"""Rules of the speedrun: the clock, the target "for good", the order of runs, resume, and what a record keeps."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from winnow.methods.intervals import mean_interval
from winnow.run.inputs import build_task

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def module(name: str) -> Any:
    return importlib.import_module(f"speedrun.{name}")


def spec(**changes: Any) -> Any:
    given = {"track": "countdown", "side": "dapo", "seed": 0, "rate": 2e-4, "device": "cpu", "model": "m"}
    return module("sides").Spec(**(given | {"directory": "d", "cap_s": 60.0, "growth": 1.5} | changes))


def points(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"seconds": s, "step": int(s), "pass@1": low + 0.05, "low": low, "pass@8": 0.9} for s, low in pairs]


def test_the_target_is_reached_where_the_lower_bound_passes_it_for_good() -> None:
    reached = module("table").reached_s
    assert reached(points((1, 0.1), (2, 0.4), (3, 0.2), (4, 0.31), (5, 0.5)), 0.3) == 4
    assert reached(points((1, 0.1), (2, 0.4), (3, 0.3)), 0.3) is None, "the bound must be over it, also at the end"
    assert reached(points((1, 0.4), (2, 0.4)), 0.3) == 1


def test_the_lower_bound_is_that_of_the_mean_over_prompts() -> None:
    rates = [0.0, 0.25, 1.0, 0.5, 0.125]
    assert module("evaluation").lower_bound(rates) == mean_interval(rates).low


def test_seconds_of_saving_are_not_on_the_clock_and_models_come_at_growing_times() -> None:
    saved: list[str] = []

    def save(directory: str) -> None:
        saved.append(directory)
        now[0] += 100.0

    now = [1000.0]
    clock = module("sides").clock_of(spec(began=1000.0, cap_s=10.0, directory="d"), now=lambda: now[0])
    clock.save = save
    control = SimpleNamespace(should_training_stop=False)
    for step in range(1, 13):
        now[0] += 1.0
        clock.on_step_end(None, SimpleNamespace(global_step=step), control)
        if control.should_training_stop:
            break
    clock.keep()
    assert [point["seconds"] for point in clock.points] == [1.0, 2.0, 3.0, 5.0, 8.0, 10.0], "grown by half at least"
    assert [point["step"] for point in clock.points] == [1, 2, 3, 5, 8, 10]
    assert clock.steps == 10, "the cap ends the run"
    assert clock.excluded_s == 600.0
    assert saved[0] == "d/step-000001"


def test_sides_alternate_and_a_tuned_rate_is_used(tmp_path: Path) -> None:
    run = module("run")
    (tmp_path / "tuned.json").write_text(json.dumps({"dapo": {"rate": 4e-4}}), encoding="utf-8")
    jobs = run.jobs_of("countdown", ["trl", "dapo"], [0, 1], tmp_path, tune=False)
    assert jobs == [("trl", 2e-4, 0), ("dapo", 4e-4, 0), ("dapo", 4e-4, 1), ("trl", 2e-4, 1)]
    tries = run.jobs_of("countdown", ["trl", "dapo"], [0, 1], tmp_path, tune=True)
    assert {seed for _, _, seed in tries} == {9}
    assert sorted(rate for side, rate, _ in tries if side == "trl") == [1e-4, 2e-4, 4e-4]


def named(name: str, function: Callable[..., bool]) -> Callable[..., bool]:
    function.__name__ = name
    return function


@pytest.mark.parametrize(("track", "order"), [("countdown", "ttee"), ("arithmetic", "tete")])
def test_small_models_are_evaluated_when_all_runs_have_ended(
    track: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = module("run")
    called: list[str] = []
    for stage in ("train", "evaluate"):
        monkeypatch.setattr(run, stage, named(stage, lambda *_, stage=stage: called.append(stage[0]) or True))
    assert run.run_all([("dapo", 2e-4, 0), ("dapo", 2e-4, 1)], spec(track=track), tmp_path, again=False)
    assert "".join(called) == order


def test_what_has_a_record_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = module("run")
    called: list[Path] = []
    for stage in ("train", "evaluate"):
        monkeypatch.setattr(run, stage, named(stage, lambda spec, record, cores: called.append(record) or True))
    (tmp_path / "trl-0.0002-0.json").write_text("{}", encoding="utf-8")
    jobs = [("trl", 2e-4, 0), ("dapo", 2e-4, 0)]
    assert run.run_all(jobs, spec(), tmp_path, again=False)
    assert [path.name for path in called] == 2 * ["dapo-0.0002-0.json"]
    run.run_all(jobs, spec(), tmp_path, again=True)
    assert len(called) == 6


def test_a_training_that_failed_is_not_evaluated_and_one_that_was_another_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = module("run")
    called: list[tuple[str, int]] = []

    def child(script: str, argument: str, place: Path, cores: set[int]) -> bool:
        called.append((script, int(place.name[-1])))
        (place / "run.json").write_text(json.dumps({"points": []}), encoding="utf-8")
        return place.name[-1] == "0" and script == "sides.py"

    monkeypatch.setattr(run, "_child", child)
    jobs = [("dapo", 2e-4, 0), ("dapo", 2e-4, 1)]
    of = spec(directory=str(tmp_path / "runs"))
    assert not run.run_all(jobs, of, tmp_path / "records", again=False)
    assert sorted(called) == [("evaluation.py", 0), ("sides.py", 0), ("sides.py", 1)]
    called.clear()
    assert not run.run_all(jobs[:1], of, tmp_path / "records", again=False)
    assert called == [("evaluation.py", 0)]
    called.clear()
    run.run_all(jobs[:1], replace(of, changes=("a=1",)), tmp_path / "records", again=False)
    assert called == [("sides.py", 0), ("evaluation.py", 0)]


def test_a_record_has_the_curve_and_loads_and_an_evaluation_that_failed_is_all_that_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = module("run")
    called: list[str] = []
    works = {"evaluation.py": False}
    directory = tmp_path / "run"

    def child(script: str, argument: str, place: Path, cores: set[int]) -> bool:
        called.append(script)
        if script == "sides.py":
            given = json.loads(argument)
            assert given["began"] > 0
            (place / "run.json").write_text(
                json.dumps(given | {"steps": 3, "points": [{"model": "x"}]}), encoding="utf-8"
            )
            return True
        if works[script]:
            (place / "curve.json").write_text(json.dumps(points((1, 0.2))), encoding="utf-8")
        return works[script]

    monkeypatch.setattr(run, "_child", child)
    of = spec(directory=str(directory), changes=("a=1",))
    job = (of, tmp_path / "record.json", {0})
    assert run.train(*job)
    assert not run.evaluate(*job)
    works["evaluation.py"] = True
    assert run.train(*job)
    assert run.evaluate(*job)
    assert called == ["sides.py", "evaluation.py", "evaluation.py"]
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record["curve"] == points((1, 0.2))
    assert record["steps"] == 3
    assert not {"points", "run"} & record.keys()
    assert len(record["load_average"]) == 2
    assert not directory.exists(), "models go after their evaluation"


def test_a_table_has_ratios_over_seeds_and_says_who_did_not_get_there() -> None:
    table = module("table")

    def runs(*seconds: float | None) -> list[dict[str, Any]]:
        same = {"pass@1": 0.5, "pass@8": 0.7, "loading_s": 2.0, "tokens": {"sampled": 1e6, "computed": None}}
        return [{"seed": seed, "reached_s": s} | same for seed, s in enumerate(seconds)]

    made = table.markdown({"trl": runs(80.0, None), "dapo": runs(40.0, 40.0), "fastest": runs(8.0, 20.0)}).splitlines()
    assert made[0].startswith("| side | seeds | seconds to the target | ratio to dapo | ratio to trl |")
    assert made[2].startswith("| trl | 2 | 80; 1 of 2 did not reach it | 2.00 | 1.00 |")
    assert made[4].startswith("| fastest | 2 | 14 | 0.32 | 0.10 | 0.500 | 0.700 | 2.0 | 1.00M |")


def test_the_first_to_the_target_is_chosen_and_without_one_the_best_mean() -> None:
    chosen = module("table").chosen
    never = [{"rate": 1, "reached_s": None, "mean_pass@1": 0.3}, {"rate": 2, "reached_s": None, "mean_pass@1": 0.4}]
    assert chosen(never)["rate"] == 2
    first = {"rate": 3, "reached_s": 70.0, "mean_pass@1": 0.1}
    assert chosen([*never, first])["rate"] == 3
    alike, later = ({"rate": n, "reached_s": s, "mean_pass@1": 0.5} for n, s in ((4, 76.0), (5, 78.0)))
    assert chosen([first, later, alike])["rate"] == 4, "as soon as the saved models tell"
    assert chosen([first, later])["rate"] == 3


@pytest.mark.parametrize("track", ["countdown", "chain-sums", "arithmetic", "spell-backward"])
def test_every_side_of_every_track_is_a_valid_configuration(track: str) -> None:
    sides, tracks = module("sides"), module("tracks")
    assert set(tracks.TRACKS[track].entries) == set(tracks.SIDES)
    shared = ("model", "env", "reward_funcs", "max_prompt_length", "max_completion_length", "temperature")
    configs = {}
    for side in tracks.SIDES:
        for device in ("cpu", "cuda"):
            configs[side] = sides.config_of(spec(track=track, side=side, device=device))
        assert configs[side].model_dump(include=set(shared)) == configs["trl"].model_dump(include=set(shared))
    smaller = configs["trl"].prompts_per_step < configs["dapo"].prompts_per_step  # at 135M parameters
    assert configs["trl"].max_steps == (20 if smaller else 2 * configs["dapo"].max_steps)
    assert {config.save_dtype for config in configs.values()} == {"float32"}


@pytest.mark.parametrize("track", ["countdown", "arithmetic"])
def test_a_track_has_the_held_out_prompts_that_are_evaluated(track: str) -> None:
    c = module("sides").config_of(spec(track=track))
    assert len(build_task(c.env).test) >= c.eval_prompts


def test_every_track_has_a_place_for_its_table_in_the_docs() -> None:
    page = (ROOT / "docs" / "speedrun.md").read_text(encoding="utf-8")
    for track in module("tracks").TRACKS:
        assert f"<!-- speedrun-{track} -->\n" in page
