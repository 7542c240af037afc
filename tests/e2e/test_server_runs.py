"""Runs whose sampler is a vLLM server, here a stand-in; tests/scale/test_server.py has the real one."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError

from .. import parity
from ..builders.runs import assert_clean, at_step, lags, metrics_of
from ..builders.vllm_server import Answer, StandIn, server

__all__ = ["server"]  # a fixture
REWARD = f"{parity.__file__}:checksum_reward"
IMPATIENT = {"timeout_s": 8.0, "max_restarts": 1}


@pytest.fixture
def config(tiny_config: dict[str, Any], server: StandIn) -> dict[str, Any]:
    more = {"sync": {"name": "server", "url": server.url}, "max_lag": 1, "correction": "truncate"}
    return tiny_config | more | {"reward_funcs": [REWARD], "reward_timeout_s": 4.0}


@pytest.mark.slow
def test_a_run_and_its_resume(config: dict[str, Any], server: StandIn) -> None:
    run = Path(config["output_dir"])
    Trainer(config=config | {"max_steps": 3}).train()
    first = {body["cache_salt"].partition("-")[0] for body in server.bodies}
    Trainer.resume(run, {"max_steps": 5}).train()
    assert_clean(run)
    assert max(lags(run)) <= 1
    assert len(lags(run)) == 5 * 16
    rows = [row for row in metrics_of(run) if "updated" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert min(row["ess_ratio/with_gradient"] for row in rows if row["updated"]) > 0.5
    assert sum(row["sampler/restarts"] for row in rows) == 0
    assert "eval/pass@1" in (run / "metrics.jsonl").read_text()
    assert len(first) == 1, "one run, one name of its weights"
    assert not (run / ".weights").exists()
    assert not server.paused


VCPO = {"advantage": "opob", "policy_loss": "plain", "loss_type": "sequence_sum", "step_scale": "ess"}


@pytest.mark.cases(one_in=24)
@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize(
    "methods",
    [
        {"correction": "none"},
        {"correction": {"name": "mask", "level": "sequence", "high": 8}},
        {"correction": "m2po"},
        {"policy_loss": "cispo", "correction": "none"},
        {"policy_loss": "dppo", "correction": "none"},
        {"importance_sampling_level": "sequence", "correction": "none"},
        VCPO | {"correction": {"name": "truncate", "level": "sequence", "high": 8}},
        {"beta": 0.05, "temperature": 0.7, "top_p": 0.9, "top_k": 12},
        {"reuse": {"updates": 2}, "selector": "bayes", "filter": "zero_variance"},
        {"group_size": {"name": "sequential", "probe": 2}, "selector": "greso", "filter": "zero_variance"},
        {"lora": {"r": 2}, "advantage": "remax"},
        {"lora": {"r": 2}, "teacher": {"adapter": False}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_losses_corrections_and_sizes(config: dict[str, Any], methods: dict[str, Any], max_lag: int) -> None:
    """The comparison with the learner passes, the account is clean, the bound holds."""
    Trainer(config=config | methods | {"max_lag": max_lag, "eval_steps": None}).train()
    run = Path(config["output_dir"])
    assert_clean(run)
    assert max(lags(run)) <= max_lag
    rows = [row for row in metrics_of(run) if "updated" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert sum(row["updated"] for row in rows) >= 3, "the reward is a coin: now and then all groups of a step agree"


@pytest.mark.slow
def test_gates_after_environment_steps(config: dict[str, Any], tmp_path: Path) -> None:
    """In games of many turns: what a cut group still sampled is cancelled on the server, and booked."""
    pytest.importorskip("textworld")
    from winnow.run.inputs import build_task
    from winnow.study.warm_start import WarmStartConfig, warm_start

    options: dict[str, Any] = {"nb_rooms": 2, "nb_objects": 2, "quest_length": 1}
    env: dict[str, Any] = {"name": "textworld", "challenge": "custom", "options": options, "max_turns": 3}
    env |= {"train_size": 8, "demo_size": 4, "test_size": 4, "style": "words"}
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
    warm_start(build_task(env), tmp_path / "model", config=WarmStartConfig(max_steps=20, batch_size=8, **sizes))
    server = StandIn(tmp_path / "model")
    own = {"model": str(tmp_path / "model"), "env": env, "eval_steps": None, "max_skipped_steps": 10}
    own |= {"max_prompt_length": 160, "max_completion_length": 200, "sync": {"name": "server", "url": server.url}}
    own |= {"gates": [{"name": "divergence", "k": 1, "threshold": 0.9}], "audit": {"epsilon": 0.5}}
    del config["reward_funcs"]
    Trainer(config=config | own).train()
    server.close()
    run = Path(config["output_dir"])
    assert_clean(run)
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.totals()["cut"]["rollouts"] > 0


@pytest.mark.slow
def test_two_servers_share_the_work(config: dict[str, Any], server: StandIn, tiny_model: Path) -> None:
    other = StandIn(tiny_model)
    Trainer(config=config | {"sync": {"name": "server", "url": [server.url, other.url]}, "max_lag": 2}).train()
    other.close()
    assert_clean(Path(config["output_dir"]))
    for each in (server, other):
        assert len(each.bodies) > 8
        assert each.calls.count("/finish_weight_update") >= 2


def restart(server: StandIn) -> None:
    """Once it has the weights of step 2."""
    while server.paused or not server.label.endswith("-2"):
        time.sleep(0.01)
    server.restart()


@pytest.mark.slow
def test_a_server_that_restarts_between_two_steps_is_sent_the_weights_again(
    config: dict[str, Any], server: StandIn
) -> None:
    """None of what it sampled with its first weights is trained. With a lag newer ones might come first."""
    run = Path(config["output_dir"])
    trainer = Trainer(config=config | {"max_steps": 6, "eval_steps": None, "max_lag": 0})
    trainer.add_callback(at_step(2, lambda: restart(server)))
    with pytest.warns(UserWarning, match=rf"sampler 0 exited and is replaced: .*{server.url}.*it has restarted since"):
        trainer.train()
    assert_clean(run)
    assert sum(row.get("sampler/restarts", 0) for row in metrics_of(run)) == 1
    assert len(lags(run)) == 6 * 16
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.totals()["failed"]["rollouts"] == 0


def nan_logp(answer: Answer) -> Answer:
    for entry in answer["choices"][0]["logprobs"]["content"]:
        entry["logprob"] = float("nan")
    return answer


FAULTS: dict[str, tuple[Callable[[StandIn], object], str]] = {
    "gone": (lambda s: s.close(), r"no answer to /\S+ \(ConnectionRefusedError"),
    "status 500": (lambda s: s.statuses.update({"/inference/v1/generate": 500}), "status 500: set to fail"),
    "no updates": (lambda s: s.statuses.update({"/update_weights": 500}), "/update_weights: status 500"),
    "NaN": (lambda s: setattr(s, "spoil", nan_logp), "log-probability nan at token 0"),
    "hangs": (lambda s: s.hangs.set(), r"requests was answered for 8 s; see what the server does, or raise sync"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_server_that_keeps_failing_ends_the_run_which_goes_on_with_another(
    config: dict[str, Any], server: StandIn, tiny_model: Path, fault: str
) -> None:
    run, (break_, message) = Path(config["output_dir"]), FAULTS[fault]
    sync = {"name": "server", "url": server.url} | IMPATIENT
    trainer = Trainer(config=config | {"max_steps": 6, "eval_steps": None, "sync": sync})
    trainer.add_callback(at_step(2, lambda: break_(server)))
    with pytest.raises(RunStoppedError, match=message) as caught:
        trainer.train()
    assert server.url in str(caught.value)
    assert "Traceback" not in str(caught.value)
    with sqlite3.connect(run / "ledger.sqlite") as db:
        query = "SELECT COUNT(*) FROM rollouts WHERE fate = 'failed' AND reward IS NOT NULL"
        assert db.execute(query).fetchone()[0] == 0
    other = StandIn(tiny_model)
    Trainer.resume(run, {"sync": sync | {"url": other.url}}).train()
    other.close()
    assert_clean(run)
    assert [row["step"] for row in metrics_of(run) if "updated" in row] == [1, 2, 3, 4, 5, 6]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gate": ({"gates": [{"name": "arrol", "cold_start": 1}]}, r"gates: arrol needs .*'hidden'.*engine ServerEngine"),
    "drafts": ({"speculative": True}, "speculative: this engine decodes every token"),
    "adapters": ({"lora": {"r": 2, "merge": False}}, "merge: false publishes adapters alone"),
    "engine": ({"engine": "local"}, "engine: local has no effect with sync: server; remove it"),
    "temperature": ({"temperature": 0.005}, "temperature 0.005: vLLM samples at 0.01; raise it"),
    "rounds": ({"rollout_batch": "fixed", "filter": "zero_variance"}, "rollout_batch: has no effect with sync: server"),
    "lengths": ({"max_completion_length": 400}, "start it with a larger --max-model-len"),
    "nowhere": ({"sync": {"name": "server", "url": "http://127.0.0.1:9"}}, r"url http://127\.0\.0\.1:9: no answer"),
    "no url": ({"sync": "server"}, "sync.*url: missing"),
}


@pytest.mark.cases(one_in=6)
@pytest.mark.parametrize("case", list(REFUSED))
def test_what_a_server_cannot_do_is_refused_at_the_start(config: dict[str, Any], server: StandIn, case: str) -> None:
    changes, message = REFUSED[case]
    server.config["model_config"]["max_model_len"] = 128
    with pytest.raises(ConfigError, match=message):
        Trainer(config=config | changes).train()
    assert not list(Path(config["output_dir"]).glob("checkpoints/*"))
