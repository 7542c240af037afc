"""Runs with the gate arrol, end to end: booked, resumed to the bit, and voted on with the head they leave."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.cli.main import app
from winnow.config import validate
from winnow.methods.gate.arrol.head import FILE, HeadWeights
from winnow.rollout.runner import RolloutRunner

from ..builders.runs import assert_clean, fingerprint, metrics_of, resume_after_each, train

ARROL = {"name": "arrol", "at": 3, "cold_start": 1, "min_survivors": 1}


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize(
    "options",
    [
        {"gates": [ARROL]},
        {"gates": [ARROL], "audit": {"epsilon": 0.3}},
        {"gates": [ARROL | {"balance": "distinct"}]},
    ],
    ids=["head", "audited", "distinct"],
)
def test_resume_is_bit_exact(tiny_config: dict[str, Any], tmp_path: Path, options: dict[str, Any]) -> None:
    whole = tmp_path / "whole"
    train(tiny_config | options | {"output_dir": str(whole)})
    assert_clean(whole)
    with sqlite3.connect(whole / "ledger.sqlite") as db:
        pruned = db.execute("SELECT COUNT(*) FROM rollouts WHERE fate = 'pruned'").fetchone()[0]
    assert pruned > 0
    part = resume_after_each(tiny_config | options | {"output_dir": str(tmp_path / "part")}, (1, 3))
    assert fingerprint(part) == fingerprint(whole)
    assert_clean(part)
    assert (whole / "model" / FILE).is_file()


def test_survival_is_in_the_metrics(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    train(tiny_config | {"gates": [ARROL | {"min_survivors": 2}], "output_dir": str(tmp_path / "run")})
    rows = metrics_of(tmp_path / "run")[1:]
    assert rows[0]["gate/arrol/keep_rate"] == 1
    assert rows[-1]["gate/arrol/keep_rate"] < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gates": [ARROL, ARROL | {"keep_rate": 0.4}]}, "arrol: only one is allowed"),
        ({"gates": [ARROL | {"at": 500}]}, "at: 500 comes after max_completion_length"),
        ({"gates": [ARROL | {"min_survivors": 4}]}, "min_survivors: 4 of groups that may have only 4"),
    ],
)
def test_what_would_mislead_is_refused(tiny_config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(config=validate(tiny_config | changes, "test"))


def test_survivors_are_as_many_as_the_advantage_needs(tiny_config: dict[str, Any]) -> None:
    gate = {key: value for key, value in ARROL.items() if key != "min_survivors"}
    for advantage, least in (("grpo", 2), ({"name": "max_at_k", "k": 3}, 3)):
        trainer = Trainer(config=validate(tiny_config | {"gates": [gate], "advantage": advantage}, "test"))
        assert trainer.methods.gates["arrol"].least == least


AMOUNT = ("eval_generations=4", "eval_prompts=6")


def vote(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["vote", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


COUNTDOWN = "reward_funcs=countdown"
"""For a run whose reward was an object."""


def test_unknown_right_answers_are_told_before_anything_is_rolled_out(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RolloutRunner, "launch", lambda *args: pytest.fail("a group was launched"))
    rewards = "reward_funcs=[tests.parity:parity_reward, tests.parity:parity_reward]"
    result = CliRunner().invoke(app, ["vote", str(tiny_model), "env=countdown", *AMOUNT, rewards])
    assert result.exit_code == 1
    assert "success: this command counts right answers" in " ".join(result.output.split())


def test_the_head_votes(tiny_config: dict[str, Any]) -> None:
    train(tiny_config | {"gates": [ARROL]})
    run = Path(tiny_config["output_dir"])
    HeadWeights.load(run / "model")  # raises if it is none
    assert (run / "checkpoints" / "step-000004" / FILE).is_file()
    every = "majority,head"
    found = vote(str(run), COUNTDOWN, *AMOUNT, "--weights", every, "--json")
    assert set(found["votes"]) == set(every.split(","))
    for v in found["votes"].values():
        assert v["low"] <= v["share"] <= min(v["high"], found["pass@4"])
    assert found["votes"]["majority"]["difference"] == 0
    assert found == vote(str(run), COUNTDOWN, *AMOUNT, "--weights", every, "--json") | {"seconds": found["seconds"]}
    assert "head@4" in vote(str(run), COUNTDOWN, *AMOUNT, "--weights", "majority,head")
    for weights, message in (("majorty", "unknown weights 'majorty'"), ("head", "head needs")):
        (run / "model" / FILE).unlink(missing_ok=True)
        result = CliRunner().invoke(app, ["vote", str(run), COUNTDOWN, "eval_generations=2", "--weights", weights])
        assert result.exit_code != 0
        assert message in result.output.replace("\n", " ") + str(result.stderr).replace("\n", " ")


def test_a_vote_reads_answers_as_rewards_do_or_says_so(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": f"numbers {i} 2 3 target 6 :", "ground_truth": "6"} for i in range(1, 7)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "c.yaml"
    env = {"name": "dataset", "path": str(tmp_path / "d.jsonl"), "test_size": 3}
    (tmp_path / "r.py").write_text("def half(completions, **columns):\n    return [0.5] * len(completions)\n")
    reward = {"reward_funcs": [f"{tmp_path / 'r.py'}:half"], "success_reward": 0.5}
    config.write_text(json.dumps({"env": env, "max_completion_length": 8} | reward))
    result = CliRunner().invoke(app, ["vote", str(tiny_config["model"]), "--config", str(config), "eval_generations=2"])
    assert result.exit_code != 0
    assert "reads no answer in any of the 6 completions" in (result.output + result.stderr).replace("\n", " ")
    config.write_text(json.dumps({"env": env, "max_completion_length": 8, "reward_funcs": ["exact"]}))
    found = vote(str(tiny_config["model"]), "--config", str(config), "eval_generations=2", "--json")
    assert (found["answered"], found["judged"]) == (1.0, 3), "all of a completion is the answer where `exact` rewards"
