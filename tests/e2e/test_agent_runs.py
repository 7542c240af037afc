"""Whole runs of agents that ask the policy over HTTP: account, resume, samplers in other processes, gates."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer

from ..builders.agents import SHARING, agent_config
from ..builders.runs import assert_clean, fingerprint, metrics_of
from ..builders.tokenizers import chat_model  # noqa: F401


@pytest.fixture
def config(chat_model: Path, tmp_path: Path) -> dict[str, Any]:
    return agent_config(chat_model, tmp_path)


def test_it_trains_and_a_resume_goes_on_exactly(config: dict[str, Any], tmp_path: Path) -> None:
    Trainer(config=config).train()
    run = Path(config["output_dir"])
    assert_clean(run)
    rows = metrics_of(run)
    assert any(row.get("reward") not in (None, 0.0, 1.0) for row in rows)
    assert any(1 < row.get("segments/mean", 1) < 2 for row in rows)
    other = tmp_path / "other"
    Trainer(config=config | {"output_dir": str(other), "max_steps": 2}).train()
    Trainer.resume(other, {"max_steps": 4}).train()
    computed = "num_computed_tokens"  # depends on when the agent's program asks
    assert fingerprint(other, computed) == fingerprint(run, computed)


@pytest.mark.slow
def test_in_other_processes_with_a_gate_and_audits(config: dict[str, Any]) -> None:
    more = {
        "sync": "processes",
        "max_lag": 2,
        "correction": "truncate",
        "gates": [{"name": "divergence", "k": 1, "threshold": 0.6}],
        "audit": {"epsilon": 0.3},
    }
    Trainer(config=config | more | {"selector": "greso", "filter": "zero_variance"}).train()
    assert_clean(Path(config["output_dir"]))


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["in_process", "processes"])
def test_agents_that_share_two_places(chat_model: Path, tmp_path: Path, sync: str) -> None:
    config = agent_config(chat_model, tmp_path, SHARING)
    more = {"sync": sync, "max_lag": int(sync == "processes"), "max_steps": 2}
    Trainer(config=config | more | {"env": config["env"] | {"timeout_s": 60}}).train()
    run = Path(config["output_dir"])
    assert_clean(run)
    assert all(row["rollouts/failed_share"] == 0 for row in metrics_of(run) if "rollouts/failed_share" in row)


def test_the_example_of_the_page_with_openais_client(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "with_agent" in c)
    before, train, _ = code.rpartition("Trainer(model=")
    assert train
    rows = [json.dumps({"prompt": "unused", "question": f"{n} + {n}?", "answer": "4"}) for n in range(8)]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(before, namespace)
    namespace["task"].max_turn_length = 8
    more = {"max_completion_length": 256, "max_steps": 1, "eval_steps": None, "filter": "keep_all"}
    del config["env"]
    Trainer(config=config | more, env=namespace["task"]).train()
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as db:
        found = db.execute("SELECT fate, COUNT(*) FROM rollouts GROUP BY fate").fetchall()
    assert {fate for fate, _ in found} <= {"trained", "filtered"}, found
    assert sum(number for _, number in found) == 12
