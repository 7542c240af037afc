"""The examples of docs/design.md, as a stranger would use them: copied into files, named in a configuration, run."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.base.errors import ConfigError

from .. import parity
from ..builders.runs import _train_until, assert_clean, fingerprint, metrics_of, resume, train

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = {name: code for code, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", TEXT, re.DOTALL)}
ROWS = dict(re.findall(r"^\| `(?:\w+)` \|.*\| `(\w+\.py):\w+` \| (\d+) \|$", TEXT, re.MULTILINE))

SCORES = '''
def scores(completions, **columns):
    """0 to 2, and no more than 1 for an even target."""
    return [float(len(c) % 2 + target % 2) for c, target in zip(completions, columns["target"])]
'''


@pytest.fixture
def config(tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two steps, in a folder with the examples in it."""
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tiny_config | {"max_steps": 2, "eval_steps": None, "log_completions": 0}


def rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(run / "ledger.sqlite") as db:
        return db.execute(query).fetchall()


def trained_twice(config: dict[str, Any], tmp_path: Path) -> Path:
    """A run at one go and one that was resumed after a step are the same to the bit; the first."""
    train(config | {"output_dir": str(tmp_path / "whole")})
    _train_until(config | {"output_dir": str(tmp_path / "part")}, 1)
    resume(tmp_path / "part")
    assert fingerprint(tmp_path / "part") == fingerprint(tmp_path / "whole")
    assert_clean(tmp_path / "part")
    assert_clean(tmp_path / "whole")
    return tmp_path / "whole"


def test_the_page_says_how_many_lines_each_takes() -> None:
    lines = {name: str(sum(bool(line.strip()) for line in code.splitlines())) for name, code in EXAMPLES.items()}
    assert len(lines) == 8
    assert lines == ROWS


def test_a_filter(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(SCORES)
    config |= {"filter": {"name": "at_least.py:AtLeast", "minimum": 1.5}, "reward_funcs": ["scores.py:scores"]}
    Trainer(config=config).train()
    run = tmp_path / "run"
    assert_clean(run)
    found = rows(run, "SELECT fate, reason FROM outcomes")
    assert {fate for fate, _ in found} == {"trained", "filtered"}
    assert {reason for fate, reason in found if fate == "filtered"} <= {"best reward 0", "best reward 1"}


def test_a_gate_on_what_is_written(config: dict[str, Any], tmp_path: Path) -> None:
    run = trained_twice(config | {"gates": [{"name": "without.py:Without", "text": "3", "n": 3}]}, tmp_path)
    found = dict(rows(run, "SELECT fate, COUNT(*) FROM rollouts GROUP BY 1"))
    assert found["pruned"] > 0 < found["trained"]
    assert rows(run, "SELECT DISTINCT reason FROM rollouts WHERE fate = 'pruned'") == [("no 3 in 3 tokens",)]


def test_a_filter_from_a_module(config: dict[str, Any], tmp_path: Path) -> None:
    train(config | {"filter": "at_least:AtLeast"})
    assert_clean(tmp_path / "run")


def test_a_filter_with_state(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(SCORES)
    chosen = {"filter": {"name": "rising.py:Rising", "decay": 0.2}, "reward_funcs": ["scores.py:scores"]}
    run = trained_twice(config | chosen, tmp_path)
    levels = [row["rising/level"] for row in metrics_of(run)]
    assert levels[0] == 0 < levels[1]
    reasons = [reason for (reason,) in rows(run, "SELECT reason FROM outcomes WHERE fate = 'filtered'")]
    assert all(re.fullmatch(r"mean reward [\d.]+ < [\d.]+", reason) for reason in reasons)


ALONE = """
from dataclasses import dataclass
from winnow.methods.gate import Gate
from winnow.types import KEEP, GroupKind, Token, Verdict

@dataclass(frozen=True)
class Odd:
    needs = frozenset()
    at = Token(1)

    def build(self, context):
        return OddGate()

    def problems(self, run):
        if run.config.num_generations < 3:
            yield "Odd needs groups of 3"

    def decide(self, views):
        return [KEEP if view.sibling % 2 else Verdict(False, "even") for view in views]

class OddGate(Gate):
    def rule(self):
        return Odd()

@dataclass(frozen=True)
class Bare:
    def build(self, context):
        return object()
"""


def test_a_gate_of_one_method_is_checked_run_and_resumed(config: dict[str, Any], tmp_path: Path) -> None:
    Path("alone.py").write_text(ALONE)
    run = trained_twice(config | {"gates": ["alone.py:Odd"], "num_generations": 4}, tmp_path)
    assert {n for (n,) in rows(run, "SELECT sibling FROM rollouts WHERE fate = 'pruned'")} == {0, 2}
    with pytest.raises(ConfigError, match="gates: Odd needs groups of 3"):
        Trainer(config=config | {"gates": ["alone.py:Odd"], "num_generations": 2})
    with pytest.raises(ConfigError, match=r"gates: .*Bare builds a .*, not a Gate; derive"):
        Trainer(config=config | {"gates": ["alone.py:Bare"]})


def test_a_gate(config: dict[str, Any], tmp_path: Path) -> None:
    config |= {"gates": [{"name": "hesitant.py:Hesitant", "n": 2, "share": 0.3}], "max_steps": 3}
    run = trained_twice(config, tmp_path)
    pruned = rows(run, "SELECT step, reason, tokens FROM rollouts WHERE fate = 'pruned'")
    assert pruned
    assert all(re.fullmatch(r"hesitant: -[\d.]+ nats a token", reason) for _, reason, _ in pruned)
    assert {tokens for *_, tokens in pruned} == {2}
    steps = metrics_of(run)
    assert [row["gate/Hesitant/asked"] > 0 for row in steps] == [True] * 3
    assert steps[0]["gate/Hesitant/floor"] == -1e9, "nothing is stopped before it has learned"
    assert -10 < steps[1]["gate/Hesitant/floor"] < 0
    (chart,) = json.loads((run / "charts.json").read_text())
    assert chart["lines"] == {"gate/Hesitant/floor": "nats a token"}


@pytest.mark.slow
def test_a_gate_beside_samplers_elsewhere(config: dict[str, Any], tmp_path: Path) -> None:
    config |= {"gates": [{"name": "hesitant.py:Hesitant", "n": 2, "share": 0.3}], "max_steps": 4, "max_lag": 1}
    Trainer(config=config | {"sync": "processes", "reward_funcs": [f"{parity.__file__}:parity_reward"]}).train()
    assert_clean(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT 1 FROM rollouts WHERE fate = 'pruned'")


def test_a_selector(config: dict[str, Any], tmp_path: Path) -> None:
    config |= {"selector": {"name": "rested.py:Rested", "solved": 0.2}, "max_steps": 3}
    run = trained_twice(config | {"env": {"name": "countdown", "train_size": 6, "test_size": 4}}, tmp_path)
    skipped = rows(run, "SELECT epoch, ordinal, reason FROM visits WHERE keep = 0")
    assert skipped
    solved = dict(
        rows(run, "SELECT ordinal, MIN(epoch) FROM visits JOIN outcomes USING (visit) WHERE mean_reward >= 0.2")
    )
    for epoch, ordinal, reason in skipped:
        assert reason == f"solved: rests until epoch {solved.get(ordinal, 0) + 3}"
        assert epoch < 3


@pytest.mark.slow
def test_an_engine(config: dict[str, Any], tmp_path: Path) -> None:
    config |= {"eval_steps": 2, "engine": "plain_engine.py:Plain"}
    run = trained_twice(config, tmp_path)
    assert "eval/pass@1" in metrics_of(run)[-1]
    tokens = rows(run, "SELECT tokens FROM rollouts ORDER BY visit, sibling")
    train(config | {"engine": "local", "output_dir": str(tmp_path / "local")})
    assert rows(tmp_path / "local", "SELECT tokens FROM rollouts ORDER BY visit, sibling") == tokens, "same noise"


POOR = """
from dataclasses import dataclass
from plain_engine import Plain

@dataclass(frozen=True)
class Poor(Plain):
    def build(self, model, tokenizer):
        engine = super().build(model, tokenizer)
        engine.provides = frozenset({"logp"})
        return engine
"""


def test_an_engine_that_gates_can_use_and_one_that_they_cannot(config: dict[str, Any], tmp_path: Path) -> None:
    gated = config | {"top_k": 5, "gates": ["hesitant.py:Hesitant"]}
    runs = {}
    for name in ("plain_engine.py:Plain", "local"):
        runs[name] = tmp_path / name[:5]
        train(gated | {"engine": name, "output_dir": str(runs[name])})
    fates = [rows(run, "SELECT fate, tokens FROM rollouts ORDER BY visit, sibling") for run in runs.values()]
    assert fates[0] == fates[1]
    Path("poor.py").write_text(POOR)
    with pytest.raises(ConfigError, match=r"'exact_cancel', 'report_at'.*engine PlainEngine does not provide"):
        train(gated | {"engine": "poor.py:Poor"})


@pytest.mark.slow
def test_a_learner(config: dict[str, Any], tmp_path: Path) -> None:
    config |= {"learner": {"name": "momentum.py:Momentum", "momentum": 0.5}, "learning_rate": 0.1, "max_steps": 3}
    run = trained_twice(config, tmp_path)
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert (last / "momentum.safetensors").exists()
    train(config | {"learner": "local", "output_dir": str(tmp_path / "local")})
    assert fingerprint(run)["weights"] != fingerprint(tmp_path / "local")["weights"]


def test_a_channel(config: dict[str, Any], tmp_path: Path) -> None:
    before = threading.active_count()
    config |= {"max_lag": 1, "max_steps": 3, "reward_funcs": [f"{parity.__file__}:parity_reward"]}
    Trainer(config=config | {"sync": {"name": "threads.py:Threads", "samplers": 2}}).train()
    run = tmp_path / "run"
    assert_clean(run)
    assert len(rows(run, "SELECT 1 FROM rollouts WHERE fate = 'trained'")) == 3 * 16
    assert {"idle/learner", "idle/sampler"} <= {name for row in metrics_of(run) for name in row}
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(_run)")]
    assert threading.active_count() <= before + 1
    assert not (run / ".weights").exists()
