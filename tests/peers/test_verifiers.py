"""Environments of the package verifiers in whole runs; `make test-peers` installs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers")

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.record.stop_conditions import RunStoppedError
from winnow.tasks.agents.verifiers import VerifiersConfig

from ..builders.runs import assert_clean, fingerprint, metrics_of
from ..builders.tokenizers import chat_model
from . import sums_env

__all__ = ["chat_model"]  # a fixture

HERE = Path(__file__).parent


def environment(**more: Any) -> dict[str, Any]:
    harness, taskset = more.pop("harness", {}), more.pop("taskset", {})
    agent = {"harness": {"id": "sums_env"} | harness, "runtime": {"type": "subprocess"}}
    return {"name": "verifiers", "config": {"taskset": {"id": "sums_env"} | taskset, "agent": agent}} | more


@pytest.fixture
def config(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setitem(__import__("sys").modules, "sums_env", sums_env)
    sums_env.SEEN.clear()
    return {
        "model": str(chat_model),
        "env": environment(test_size=2, max_turn_length=8),
        "output_dir": str(tmp_path / "run"),
        "threads": 1,
        "max_steps": 4,
        "prompts_per_step": 3,
        "num_generations": 4,
        "max_prompt_length": 200,
        "max_completion_length": 96,
        "learning_rate": 1e-3,
        "save_steps": 1,
        "eval_steps": 2,
    }


def test_it_trains_on_what_their_traces_saw_and_resumes_exactly(config: dict[str, Any], tmp_path: Path) -> None:
    Trainer(config=config | {"log_completions": 50}).train()
    run = Path(config["output_dir"])
    assert_clean(run)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    trained = [s for s in samples if s["split"] == "train"]
    assert trained
    seen = {"Sure?".join(said) for said in sums_env.SEEN}
    for sample in trained:
        first, _, second = sample["completion"].partition("Sure?")
        assert f"{first}Sure?{second}" in seen
        assert sample["reward"] == float(len(first + second) % 2)
        assert len(sample["turns"]) == 2
        assert sample["prompt"][0] == {"role": "system", "content": "Be brief."}
    other = tmp_path / "other"
    Trainer(config=config | {"output_dir": str(other), "max_steps": 2}).train()
    Trainer.resume(other, {"max_steps": 4}).train()
    computed = "num_computed_tokens"  # depends on when programs ask
    assert fingerprint(other, computed) == fingerprint(run, computed)


def test_a_trace_that_branches_has_a_segment_for_each(config: dict[str, Any], tmp_path: Path) -> None:
    """And the reward is that of all that was said. How much is computed depends on when programs ask."""
    config |= {"env": environment(test_size=2, max_turn_length=8, harness={"forget": True}), "log_completions": 50}
    Trainer(config=config).train()
    run = Path(config["output_dir"])
    assert_clean(run)
    rows = metrics_of(run)
    assert {row["segments/mean"] for row in rows if "segments/mean" in row} == {2.0}
    other = tmp_path / "other"
    Trainer(config=config | {"output_dir": str(other), "max_steps": 2}).train()
    Trainer.resume(other, {"max_steps": 4}).train()
    assert fingerprint(other, "num_computed_tokens") == fingerprint(run, "num_computed_tokens")
    assert_clean(other)


def test_an_episode_that_fails_is_no_reward_of_0(config: dict[str, Any]) -> None:
    broken = environment(harness={"fail": True})
    with pytest.raises(RunStoppedError, match=r"the episode failed: .*the program is broken"):
        Trainer(config=config | {"env": broken, "eval_steps": None}).train()


def test_what_cannot_be_is_refused_by_name(config: dict[str, Any]) -> None:
    refused = [
        (environment(taskset={"id": "no_such_taskset"}), "no_such_taskset"),
        (environment(taskset={"endless": True}), "taskset sums_env has no end"),
        (environment(test_size=8), "test_size 8 would hold out 8 of 8 tasks"),
        (environment(harness={"qestion": "x"}), "qestion"),
    ]
    for env, reason in refused:
        options = {key: value for key, value in env.items() if key != "name"}
        with pytest.raises((ValueError, ConfigError), match=reason):
            VerifiersConfig(**options).build()


def test_held_out_tasks_are_the_same_whatever_the_order(config: dict[str, Any]) -> None:
    options = {key: value for key, value in config["env"].items() if key != "name"}
    one, two = VerifiersConfig(**options).build(), VerifiersConfig(**options).build()
    assert (len(one.train), len(one.test)) == (6, 2)
    assert [p.id for p in one.test] == [p.id for p in two.test]
    assert one.fingerprint() == two.fingerprint()
    assert [p.ordinal for p in one.train] == list(range(6))
