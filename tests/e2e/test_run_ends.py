"""Runs that have nothing to learn from: they stop by themselves, say why, and are saved."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.methods.filter import Filter
from winnow.methods.select import stream
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError, TaskSolvedError
from winnow.study.compare import compare
from winnow.study.compare_data import methods_of, read_run_data
from winnow.types import Group, GroupKind, Verdict

from ..builders.runs import CARRYING, assert_clean, metrics_of


def _solved(completions: list[str], **columns: object) -> list[float]:
    return [1.0] * len(completions)


def _hopeless(completions: list[str], **columns: object) -> list[float]:
    return [0.0] * len(completions)


def test_tokens_of_a_step_that_did_not_take_place_are_counted(tiny_config: dict[str, Any]) -> None:
    trainer = Trainer(config=tiny_config | {"eval_steps": None, "filter": "zero_variance"}, reward_funcs=_hopeless)
    with pytest.raises(RunStoppedError):
        trainer.train()
    run = Path(tiny_config["output_dir"])
    state = json.loads(next((run / "checkpoints").glob("step-*/state.json")).read_text())
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert state["loop"]["num_tokens"] == ledger.totals()["filtered"]["tokens"] > 0


def test_a_kl_term_alone_does_not_keep_a_run_alive(tiny_config: dict[str, Any]) -> None:
    options = {"beta": 0.01, "max_skipped_steps": 2, "max_steps": 50, "eval_steps": None}
    with pytest.raises(RunStoppedError, match="2 steps in a row"):
        Trainer(config=tiny_config | options, reward_funcs=_hopeless).train()


def test_a_best_of_k_group_short_of_k_is_not_trained_on(tiny_config: dict[str, Any]) -> None:
    def fails_once(completions: list[str], **columns: object) -> list[float | None]:
        return [None, *(float(i % 2) for i in range(len(completions) - 1))]

    options = {"advantage": {"name": "max_at_k", "k": 4}, "eval_steps": None, "max_skipped_steps": 2}
    with pytest.raises(RunStoppedError, match=r"only 3 of 4 siblings .* 25% of the rollouts failed"):
        Trainer(config=tiny_config | options, reward_funcs=fails_once).train()


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("reward", [_solved, _hopeless])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_skipped_steps": 3}, r"3 steps in a row had no group with a signal"),
        ({"filter": {"name": "zero_variance", "refill": False}, "max_skipped_steps": 3}, r"3 steps in a row"),
        ({"filter": "zero_variance"}, r"40 groups in a row had no signal"),
        (CARRYING | {"filter": {"name": "zero_variance", "max_refill_rounds": 1000}}, r"nothing is left to roll out"),
        (
            {"filter": {"name": "zero_variance", "refill": False}, "selector": "greso"},
            r"nothing is left|steps in a row",
        ),
    ],
    ids=["keep_all", "active", "dapo", "greso", "greso-active"],
)
def test_all_solved_or_all_hopeless_ends_with_a_message_and_a_saved_run(
    tiny_config: dict[str, Any], reward: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_SKIPPED_IN_A_ROW", 1000)
    trainer = Trainer(config=tiny_config | {"eval_steps": None, "max_steps": 1000} | options, reward_funcs=reward)
    run, by_selector = Path(tiny_config["output_dir"]), message.startswith("nothing is left to")
    if reward is _solved and not by_selector:
        trainer.train()
        assert (run / "model" / "config.json").exists()
    else:
        with pytest.raises(RunStoppedError, match=message):
            trainer.train()
    assert_clean(run)
    assert list((run / "checkpoints").glob("step-*")) or (run / "start.json").exists()


MANY = {"eval_steps": 4, "max_steps": 1000, "max_skipped_steps": 3, "filter": "keep_all"}


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("solved_from", [0, 2])
def test_a_solved_task_is_a_success(tiny_config: dict[str, Any], solved_from: int) -> None:
    """Saved as a model, evaluated at its end, finished; of several seeds one may be solved earlier than another."""
    runs = []
    for seed, at in ((0, 1), (1, 5 + solved_from)):

        def half(completions: list[str], trainer_state: Any, at: int = at, **columns: object) -> list[float]:
            return [float(i % 2 or trainer_state.global_step >= at) for i in range(len(completions))]

        run = Path(f"{tiny_config['output_dir']}-{seed}")
        runs.append(run)
        found = Trainer(config=tiny_config | MANY | {"output_dir": str(run), "seed": seed}, reward_funcs=half).train()
        assert found["step"] == at + 3
        rows = metrics_of(run)
        assert rows[-1]["step"] == found["step"]
        assert rows[-1]["eval/pass@1"] == found["eval/pass@1"]
        assert (run / "model" / "config.json").exists()
        assert_clean(run)
        with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.get_meta("finished") == "true"
    first, second = map(read_run_data, runs)
    assert first.solved
    assert second.solved
    assert list(methods_of([first, second]).values()) == [[first, second]]
    assert "not finished" not in str(compare(runs, seeds=False))


def test_one_that_is_solved_in_a_loop_of_ones_own(tiny_config: dict[str, Any]) -> None:
    options = {"filter": {"name": "zero_variance", "max_refill_rounds": 2}, "eval_steps": None, "max_steps": 50}
    with Trainer(config=tiny_config | options, reward_funcs=_solved) as trainer, pytest.raises(TaskSolvedError):
        trainer.step()
    assert (Path(tiny_config["output_dir"]) / "model" / "config.json").exists()


def test_refill_that_adds_nothing_stops_with_the_prompts_named(tiny_config: dict[str, Any]) -> None:
    config = tiny_config | {"filter": {"name": "zero_variance", "max_refill_rounds": 2}}
    trainer = Trainer(config=config, reward_funcs=lambda completions, **_: [0.0] * len(completions))
    with pytest.raises(RunStoppedError, match=r"countdown-.*zero variance: all rewards are 0"):
        trainer.train()
    run = Path(config["output_dir"])
    assert_clean(run)
    assert list((run / "checkpoints").glob("step-*")), "the run is saved"


def test_what_a_barren_refill_had_accepted_is_still_trained(tiny_config: dict[str, Any]) -> None:
    calls = 0

    def first_two_groups_teach(completions: list[str], **_: object) -> list[float]:
        nonlocal calls
        calls += 1
        return [float(i % 2) if calls <= 2 else 0.0 for i in range(len(completions))]

    config = tiny_config | {"filter": {"name": "zero_variance", "max_refill_rounds": 2}, "eval_steps": None}
    with pytest.raises(RunStoppedError, match="8 groups in a row"):
        Trainer(config=config, reward_funcs=first_two_groups_teach).train()
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.totals()["trained"]["visits"] == 2
        assert ledger.verify().ok


def test_a_refill_that_failures_starve_blames_the_failures(tiny_config: dict[str, Any]) -> None:
    def broken(completions: list[str], **_: object) -> list[float]:
        raise ConnectionError("judge unreachable")

    config = tiny_config | {"filter": {"name": "zero_variance", "max_refill_rounds": 2}, "max_failed_share": 1.0}
    with pytest.raises(RunStoppedError, match=r"8 had missing rewards.*judge unreachable.*Find out why rollouts fail"):
        Trainer(config=config | {"eval_steps": None}, reward_funcs=broken).train()


@dataclass(frozen=True)
class Picky(Filter):
    """Wants nothing."""

    refill: bool = True
    max_refill_rounds: int = 2

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        return Verdict(False, "not good enough")


def test_a_filter_that_rejects_what_teaches_is_blamed(tiny_config: dict[str, Any]) -> None:
    def differ(completions: list[str], **_: object) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    config = tiny_config | {"filter": f"{__name__}:Picky", "eval_steps": None}
    with pytest.raises(RunStoppedError, match=r"8 groups in a row were rejected, 8 of them.*not good enough.*filter"):
        Trainer(config=config, reward_funcs=differ).train()


def test_no_signal_anywhere_skips_updates_and_says_so(tiny_config: dict[str, Any]) -> None:
    config = tiny_config | {"filter": {"name": "zero_variance", "refill": False}, "eval_steps": None}
    Trainer(config=config, reward_funcs=lambda completions, **_: [0.0] * len(completions)).train()
    run = Path(config["output_dir"])
    lines = metrics_of(run)
    assert [m["updated"] for m in lines] == [0.0] * 4
    assert_clean(run)


def test_every_reward_failing_aborts_with_the_cause(tiny_config: dict[str, Any]) -> None:
    def broken(completions: list[str], **_: object) -> list[float]:
        raise ConnectionError("judge unreachable")

    with pytest.raises(RunStoppedError, match=r"100% of the rollouts failed.*judge unreachable"):
        Trainer(config=tiny_config | {"eval_steps": None}, reward_funcs=broken).train()
    run = Path(tiny_config["output_dir"])
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        totals = ledger.totals()
    assert_clean(run)
    db = sqlite3.connect(run / "ledger.sqlite")
    assert db.execute("SELECT COUNT(*) FROM rollouts WHERE reward IS NOT NULL").fetchone() == (0,)
    assert totals.get("trained", {}).get("rollouts", 0) == 0


def test_failures_of_small_steps_end_a_resumed_run_as_well(tiny_config: dict[str, Any]) -> None:
    def broken(completions: list[str], **_: object) -> list[float]:
        raise ConnectionError("judge unreachable")

    values = {"prompts_per_step": 1, "num_generations": 8, "filter": "keep_all", "max_steps": 6, "eval_steps": None}
    with Trainer(config=tiny_config | values, reward_funcs=broken) as trainer:
        for _ in range(3):
            trainer.step()
    with pytest.raises(RunStoppedError, match="step 3: 100% of the rollouts failed"):
        Trainer.resume(tiny_config["output_dir"], reward_funcs=broken).train()
