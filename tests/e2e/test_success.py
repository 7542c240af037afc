"""Whole runs whose rewards have several parts: nothing is called solved, or right, that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError, TaskSolvedError
from winnow.run.plan import plan
from winnow.study.compare_data import read_run_data
from winnow.study.pass_rates import profile_model
from winnow.study.report import report_data, write_report

from ..builders.runs import metrics_of

FILTERED = {"filter": {"name": "zero_variance", "max_refill_rounds": 2}, "max_steps": 50, "eval_steps": None}
EVALUATED = {"max_steps": 1, "eval_steps": 1, "eval_prompts": 2, "eval_generations": 2}
FILES = """
def style(completions, **columns):
    return [1.0] * len(completions)
def correct(completions, **columns):
    return [0.0] * len(completions)
"""


def style(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def correct(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def double(completions: list[str], **_: Any) -> list[float]:
    return [2.0] * len(completions)


def penalised(completions: list[str], **_: Any) -> list[float]:
    return [0.95] * len(completions)


def rows_of(run: str) -> list[dict[str, Any]]:
    return metrics_of(Path(run))


def warnings_of(run: str) -> list[str]:
    return [json.loads(line)["warning"] for line in (Path(run) / "warnings.jsonl").read_text().splitlines()]


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(
    ("functions", "more"),
    [
        ([style, correct], {}),
        ([style, correct, correct], {}),
        ([double], {}),
        ([style], {"reward_weights": [0.5]}),
        ([style, correct], {"success": {"function": "correct"}}),
        ([style, correct], {"success": {"at_least": 1.5}}),
        ([penalised], {}),
    ],
)
def test_a_run_without_a_right_answer_is_not_solved(tiny_config: dict[str, Any], functions: Any, more: Any) -> None:
    unfiltered = {"max_skipped_steps": 2, "max_steps": 50, "eval_steps": None}
    for name, ending in (("filtered", FILTERED), ("unfiltered", unfiltered)):
        run = f"{tiny_config['output_dir']}-{name}"
        with pytest.raises(RunStoppedError) as stopped:
            Trainer(config=tiny_config | ending | more | {"output_dir": run}, reward_funcs=functions).train()
        assert not isinstance(stopped.value, TaskSolvedError)
        decided = "success" in more or functions == [penalised]
        assert ("set `success: {function" in str(stopped.value)) != decided
        with Ledger.open(Path(run) / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.get_meta("finished") == "false"


@pytest.mark.parametrize("more", [{"success": {"function": "style"}}, {"success": 1}])
def test_one_whose_answers_are_all_right_by_the_users_word_is(tiny_config: dict[str, Any], more: Any) -> None:
    trainer = Trainer(config=tiny_config | FILTERED | more, reward_funcs=[style, correct])
    assert trainer.train()["step"] < 50
    with Ledger.open(trainer.run_dir / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.get_meta("solved") == "true"


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(
    ("functions", "success", "passed", "kind"),
    [
        ([style, correct], None, None, "frac_zero_unknown"),
        ([double], None, None, "frac_zero_unknown"),
        ([style, correct], {"function": "correct"}, 0.0, "frac_zero_hard"),
        ([style, correct], {"function": "style"}, 1.0, "frac_zero_easy"),
        ([penalised], None, 0.0, "frac_zero_hard"),
        ([penalised], 0.9, 1.0, "frac_zero_easy"),
    ],
)
def test_evaluations_and_kinds_have_one_answer(
    tiny_config: dict[str, Any], functions: Any, success: Any, passed: float | None, kind: str
) -> None:
    run = tiny_config["output_dir"]
    Trainer(config=tiny_config | EVALUATED | {"success": success}, reward_funcs=functions).train()
    start, end = rows_of(run)
    for row in (start, end):
        assert row.get("eval/pass@1") == passed
        assert row.get("eval/greedy") == passed
        assert row["eval/avg@n"] > 0.9
    assert end[kind] == 1.0
    if passed is None:
        with pytest.raises(ConfigError, match="train it with success set"):
            read_run_data(Path(run))
    write_report([Path(run)], Path(run) / "page.html")
    cards = {card["label"] for card in report_data([Path(run)])["cards"][0]}
    assert ("Held-out reward" in cards, "Held-out pass@1" in cards) == (passed is None, passed is not None)


def test_the_key_is_named_once_and_in_the_plan(tiny_config: dict[str, Any]) -> None:
    trainer = Trainer(config=tiny_config | {"max_steps": 3, "eval_steps": None}, reward_funcs=[style, correct])
    assert "undecided (2 reward functions: style, correct)" in plan(trainer)["right"]
    trainer.train()
    said = [message for message in warnings_of(tiny_config["output_dir"]) if message.startswith("success:")]
    assert len(said) == 1
    assert "set `success: {function: NAME, at_least: 1}`" in said[0]


def test_high_rewards_of_which_none_is_right_are_pointed_out(tiny_config: dict[str, Any]) -> None:
    Trainer(config=tiny_config | EVALUATED, reward_funcs=[penalised]).train()
    assert any("rewards average 0.95, but only 0% reach 1" in said for said in warnings_of(tiny_config["output_dir"]))


def test_a_resume_remembers_that_the_default_is_not_meant(tiny_config: dict[str, Any]) -> None:
    """The reward of 2 was seen before the save; afterwards everything has a reward of 1."""

    def falls(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        return [2.0 * (i % 2) if trainer_state.global_step < 2 else 1.0 for i in range(len(completions))]

    config = tiny_config | {"max_steps": 2, "save_steps": 1, "eval_steps": None, "max_skipped_steps": 2}
    Trainer(config=config, reward_funcs=falls).train()
    with pytest.raises(RunStoppedError, match="a reward of 2, above 1") as stopped:
        Trainer.resume(config["output_dir"], {"max_steps": 9}, reward_funcs=falls).train()
    assert not isinstance(stopped.value, TaskSolvedError)


def test_a_profile_of_pass_rates_needs_the_answer(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(FILES)
    functions = [f"{tmp_path / 'r.py'}:style", f"{tmp_path / 'r.py'}:correct"]
    values = tiny_config | {"reward_funcs": functions}
    with pytest.raises(Exception, match="success: this command counts right answers"):
        profile_model(tiny_config["model"], values, prompts=2, n=2, output=tmp_path / "a.jsonl")
    for name, dead in (("style", 0), ("correct", 2)):
        wanted = {"success": {"function": name}}
        found = profile_model(tiny_config["model"], values | wanted, prompts=2, n=2, output=tmp_path / f"{name}.jsonl")
        assert found["dead"] == dead


REFRESHED = {"max_steps": 2, "eval_steps": None, "selector": {"name": "pass_rate", "refresh_steps": 1, "n": 2}}


def test_no_profile_is_rolled_out_once_right_answers_are_unknown(tiny_config: dict[str, Any]) -> None:
    trainer = Trainer(config=tiny_config | REFRESHED, reward_funcs=double)
    trainer.train()
    with Ledger.open(trainer.run_dir / "ledger.sqlite", read_only=True) as ledger:
        assert not ledger.totals().get("evaluation", {}).get("rollouts")


def test_prompts_that_a_refresh_cannot_judge_are_reported(tiny_config: dict[str, Any]) -> None:
    def some_fail(completions: list[str], numbers: list[list[int]], **_: Any) -> list[float]:
        if numbers[0][0] % 2 == 0:
            raise RuntimeError("not today")
        return [float(len(text) % 2) for text in completions]

    Trainer(config=tiny_config | REFRESHED | {"max_failed_share": 1.0}, reward_funcs=some_fail).train()
    (said,) = [message for message in warnings_of(tiny_config["output_dir"]) if message.startswith("selector:")]
    assert " of 24 prompts have no new pass rate, e.g. " in said
    assert "not today" in said
