"""Runs whose sampler is a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.record.costs import costs_of
from winnow.record.stop_conditions import RunStoppedError
from winnow.sampler.handle import SamplerHandle
from winnow.sampler.pool import SamplerPool

from .. import parity
from ..builders.runs import assert_clean, metrics_of, metrics_so_far
from ..builders.samplers import process_of

REWARD = f"{parity.__file__}:parity_reward"


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return tiny_config | {"sync": "processes", "max_lag": 2, "max_steps": 8, "save_steps": 3, "reward_funcs": [REWARD]}


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[SamplerHandle]:
    """Every sampler that is started, in order."""
    started: list[SamplerHandle] = []
    original = SamplerPool._start

    def remember(self: SamplerPool, slot: int) -> SamplerHandle:
        started.append(original(self, slot))
        return started[-1]

    monkeypatch.setattr(SamplerPool, "_start", remember)
    return started


def lags(run: Path, fates: str = "'trained'") -> list[int]:
    """Of every rollout of these fates."""
    with sqlite3.connect(run / "ledger.sqlite") as db:
        query = f"SELECT version - first_version FROM rollouts JOIN steps USING (step) WHERE fate IN ({fates})"
        return [row[0] for row in db.execute(query)]


SLOW = """
import time

def slow(completions, **columns):
    time.sleep(1)
    return [float(len(text) % 2) for text in completions]
"""


@pytest.mark.slow
def test_a_sampler_that_waits_for_slow_rewards_is_not_stuck(config: dict[str, Any], tmp_path: Path) -> None:
    """Twelve groups of a second each, two at a time, take longer than `timeout_s`; no call is late."""
    (tmp_path / "slow.py").write_text(SLOW)
    sync = {"name": "processes", "samplers": 1, "timeout_s": 4.0}
    more = {"sync": sync, "reward_timeout_s": 3, "reward_funcs": [f"{tmp_path}/slow.py:slow"], "max_steps": 2}
    Trainer(config=config | more | {"prompts_per_step": 12, "max_completion_length": 2, "max_lag": 1}).train()
    rows = metrics_of(Path(config["output_dir"]))
    assert sum(value for row in rows for name, value in row.items() if name.endswith("/restarts")) == 0


@pytest.mark.slow
def test_a_sampler_goes_on_while_the_learner_works(config: dict[str, Any], children: list[SamplerHandle]) -> None:
    run = Path(config["output_dir"])
    Trainer(config=config).train()
    assert_clean(run)
    assert len(lags(run)) == 8 * 16
    assert 0 < max(lags(run)) <= 2
    found = {name: value for row in metrics_of(run) for name, value in row.items()}
    assert {
        "idle/learner",
        "idle/sampler",
        "throughput/tokens_per_s",
        "ess_ratio/with_gradient",
        "lag/mean",
    } <= found.keys()
    assert len(children) == 1
    assert process_of(children[0]).poll() is not None, "nothing is left behind"
    assert not (run / ".weights").exists()


@pytest.mark.slow
def test_max_lag_0_trains_on_policy(config: dict[str, Any]) -> None:
    Trainer(config=config | {"max_lag": 0, "max_steps": 3}).train()
    assert set(lags(Path(config["output_dir"]))) == {0}
    assert_clean(Path(config["output_dir"]))


@pytest.mark.slow
def test_two_samplers_share_the_work(config: dict[str, Any], children: list[SamplerHandle]) -> None:
    Trainer(config=config | {"sync": {"name": "processes", "samplers": 2}, "max_steps": 4}).train()
    assert_clean(Path(config["output_dir"]))
    assert len(children) == 2
    for slot in range(2):
        assert sum(row.get(f"sampler/{slot}/groups", 0) for row in metrics_of(Path(config["output_dir"]))) > 0
    rows = metrics_of(Path(config["output_dir"]))
    costs = costs_of(rows)
    parts = [name for name in costs if name.startswith("sampler/seconds/") and not name.endswith("total")]
    assert 0 < sum(costs[name] for name in parts) <= costs["sampler/seconds/total"]
    assert costs["sampler/seconds/prefill"] > 0
    assert "seconds/generate/prefill" not in costs, "the learner's process does not know"
    assert costs["num_computed_tokens"] > costs["num_tokens"] / 2


VCPO = {
    "advantage": "opob",
    "policy_loss": "plain",
    "loss_type": "sequence_sum",
    "correction": {"name": "truncate", "level": "sequence", "high": 8},
    "step_scale": "ess",
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lora": {"r": 4}}, {"dtype": "bfloat16"}, VCPO], ids=["lora", "bfloat16", "vcpo"])
def test_what_else_a_run_may_ask_for(options: dict[str, Any], config: dict[str, Any]) -> None:
    Trainer(config=config | options | {"max_steps": 4}).train()
    assert_clean(Path(config["output_dir"]))
    assert len(lags(Path(config["output_dir"]))) == 4 * 16
    ratios = [row["ess_ratio/with_gradient"] for row in metrics_of(Path(config["output_dir"])) if "loss" in row]
    assert len(ratios) == 4
    assert min(ratios) > 0.5, "the samplers have the learner's weights"


@pytest.mark.slow
def test_games_of_many_turns(config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("textworld")
    from winnow.run.inputs import build_task
    from winnow.study.warm_start import WarmStartConfig, warm_start

    env: dict[str, Any] = {
        "name": "textworld",
        "challenge": "custom",
        "options": {"nb_rooms": 2, "nb_objects": 2, "quest_length": 1},
    }
    env |= {"train_size": 8, "demo_size": 4, "test_size": 4, "style": "words", "max_turns": 3}
    options = WarmStartConfig(
        max_steps=20, batch_size=8, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2
    )
    warm_start(build_task(env), tmp_path / "model", config=options)
    run = Path(config["output_dir"])
    own = {"model": str(tmp_path / "model"), "env": env, "eval_steps": None, "max_steps": 4}
    del config["reward_funcs"]
    Trainer(config=config | own | {"max_prompt_length": 160, "max_completion_length": 200}).train()
    assert_clean(run)
    found = lags(run, "'trained', 'filtered'")  # few of its groups win a game
    assert len(found) == 4 * 16
    assert 0 < max(found) <= 2


@pytest.mark.slow
def test_a_killed_sampler_is_replaced_and_its_groups_are_launched_again(
    config: dict[str, Any], children: list[SamplerHandle]
) -> None:
    run = Path(config["output_dir"])

    def kill_the_first() -> None:
        while len(metrics_so_far(run)) < 3:
            time.sleep(0.01)
        os.kill(process_of(children[0]).pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_the_first, daemon=True)
    thread.start()
    Trainer(config=config | {"max_steps": 30, "eval_steps": None}).train()
    thread.join(10)
    assert_clean(run)
    assert len(lags(run)) == 30 * 16
    assert max(lags(run)) <= 2
    assert sum(m.get("sampler/restarts", 0) for m in metrics_of(run)) == 1
    assert len(children) == 2


@pytest.mark.slow
def test_a_sampler_that_is_stopped_is_taken_for_stuck(config: dict[str, Any], children: list[SamplerHandle]) -> None:
    run = Path(config["output_dir"])

    def stop_the_first() -> None:
        while len(metrics_so_far(run)) < 3:
            time.sleep(0.01)
        os.kill(process_of(children[0]).pid, signal.SIGSTOP)

    thread = threading.Thread(target=stop_the_first, daemon=True)
    thread.start()
    changes = {"sync": {"name": "processes", "timeout_s": 10.0}, "reward_timeout_s": 5.0}
    Trainer(config=config | {"max_steps": 30, "eval_steps": None} | changes).train()
    thread.join(10)
    assert_clean(run)
    assert sum(m.get("sampler/restarts", 0) for m in metrics_of(run)) >= 1


@pytest.mark.slow
def test_samplers_that_keep_dying_end_the_run_with_their_last_words(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINNOW_FAILPOINT", "sampler.step:raise")
    values = config | {"sync": {"name": "processes", "max_restarts": 1}, "eval_steps": None}
    words = r"sampler 0 exited \(exit status 1; its last words:(.|\n)*injected at sampler.step(.|\n)*max_restarts=1"
    with pytest.raises(RunStoppedError, match=words):
        Trainer(config=values).train()


@pytest.mark.slow
def test_a_sampler_does_not_start_on_other_data_than_the_learner(
    config: dict[str, Any], children: list[SamplerHandle], tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Path(config["output_dir"])

    def change_the_data() -> None:
        while not metrics_so_far(run):
            time.sleep(0.01)
        data.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
        os.kill(process_of(children[0]).pid, signal.SIGKILL)

    threading.Thread(target=change_the_data, daemon=True).start()
    changes = {"env": {"name": "dataset", "path": str(data)}, "sync": {"name": "processes", "max_restarts": 1}}
    with pytest.raises(RunStoppedError, match="task: has changed since the learner started"):
        Trainer(config=config | changes | {"max_steps": 100_000, "eval_steps": None}).train()


@pytest.mark.slow
def test_rules_of_gates_are_asked_where_it_samples_and_learn_here(config: dict[str, Any]) -> None:
    run, gate = Path(config["output_dir"]), {"name": "arrol", "at": 3, "cold_start": 2}
    audit = {"epsilon": 0.2}
    steps = {"max_steps": 20}  # few or none of 8 steps meet a rule that is heard of after step 2
    Trainer(config=config | {"gates": [gate], "audit": audit, "eval_steps": None} | steps).train()
    assert_clean(run)
    with sqlite3.connect(run / "ledger.sqlite") as db:
        pruned = db.execute("SELECT COUNT(*) FROM rollouts WHERE fate = 'pruned'").fetchone()[0]
    assert pruned
    rows = metrics_of(run)
    assert sum(row.get("gate/arrol/asked", 0) for row in rows) > 0
    assert rows[-1]["audit/arrol/removed"] > 0
    assert [row["gate/arrol/cold"] for row in rows[:3]] == [1.0, 1.0, 0.0]
    assert max(lags(run)) <= 2


@pytest.mark.slow
def test_a_rule_that_cannot_be_asked_ends_the_run_with_the_reason(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"after 10 environment steps.*task countdown has at most 1 turn"):
        Trainer(config=config | {"gates": ["divergence"], "eval_steps": None}).train()


@pytest.mark.slow
def test_a_rule_that_fails_at_a_sampler_ends_the_run_by_its_name(config: dict[str, Any]) -> None:
    gate = {"name": "tests.gates:Broken", "at": 2}
    with pytest.raises(RunStoppedError, match=r"gate Broken: ZeroDivisionError: division by zero"):
        Trainer(config=config | {"gates": [gate], "eval_steps": None}).train()


@pytest.mark.slow
def test_nothing_hangs_when_rejected_groups_are_not_replaced(config: dict[str, Any]) -> None:
    """Their places fill batches by themselves, while groups that teach wait for no one."""
    values = config | {"filter": {"name": "zero_variance", "refill": False}, "max_steps": 20, "prompts_per_step": 2}
    Trainer(config=values | {"max_skipped_steps": 100, "eval_steps": None}).train()
    assert_clean(Path(config["output_dir"]))
    assert max(lags(Path(config["output_dir"]))) <= 2


@pytest.mark.slow
def test_sampler_options_may_change_on_a_resume(config: dict[str, Any]) -> None:
    run = Path(config["output_dir"])
    Trainer(config=config | {"max_steps": 2}).train()
    sync = {"name": "processes", "max_restarts": 9}
    assert Trainer.resume(run, {"max_steps": 3, "sync": sync}).train()["step"] == 3
    with pytest.raises(ConfigError, match="sync: "):
        Trainer.resume(run, {"max_steps": 4, "sync": "in_process"})


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_what_was_in_flight(config: dict[str, Any]) -> None:
    run = Path(config["output_dir"])
    for stop_at in (2, 5):
        trainer = Trainer.resume(run) if (run / "config.json").exists() else Trainer(config=config)

        def stop(line: int = stop_at, trainer: Trainer = trainer) -> None:
            while len(metrics_so_far(run)) <= line:
                time.sleep(0.005)
            trainer.stop()

        threading.Thread(target=stop, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    Trainer.resume(run).train()
    assert_clean(run)
    assert len(lags(run)) == 8 * 16
    assert max(lags(run)) <= 2
    with sqlite3.connect(run / "ledger.sqlite") as db:
        in_flight = db.execute("SELECT COUNT(*) FROM visit_fates WHERE fate IS NULL").fetchone()[0]
    assert in_flight == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_batch": "fixed", "filter": "zero_variance", "max_lag": 2}, "rollout_batch: has no effect"),
        ({"sync": {"name": "processes", "samplers": 0}}, "samplers"),
        ({"sync": {"name": "processes", "timeout_s": 0}}, "timeout_s"),
        ({"sync": {"name": "processes", "timeout_s": 20}}, "timeout_s=20 must be above reward_timeout_s=30"),
    ],
)
def test_what_cannot_work_is_refused(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(config=config | change)
    assert not Path(config["output_dir"]).exists()


def test_objects_cannot_be_given_to_another_process(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="so reward_funcs cannot be an object"):
        Trainer(config=config | {"reward_funcs": None}, reward_funcs=parity.parity_reward)
