"""Build short training runs, their fingerprints and the audit of their ledger."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer, TrainerCallback, TrainerState
from winnow.record.ledger import Ledger

from ..parity import parity_reward

CARRYING = {
    "selector": "greso",
    "filter": "zero_variance",
    "rollout_batch": "adaptive",
    "max_lag": 1,
    "policy_loss": "plain",
    "correction": "truncate",
    "env": {"name": "countdown", "train_size": 6, "test_size": 8},
}
"""GRESO with surplus groups that wait, over several epochs of six prompts."""
REPEATING = {"learning_rate": 1e-6, "temperature": 0.05, "num_generations": 2}
"""So that random weights sample again what they have sampled, but siblings not the same."""
WALL_CLOCK = ("seconds", "tokens_per_second", "step_time", "barrier_wait_s")


def train(config: dict[str, Any], **options: Any) -> dict[str, float]:
    return Trainer(config=config, reward_funcs=parity_reward, **options).train()


def resume(run: Path, overrides: dict[str, Any] | None = None) -> dict[str, float]:
    return Trainer.resume(run, overrides, reward_funcs=parity_reward).train()


def fingerprint(run: Path, *varying: str) -> dict[str, Any]:
    """Hashes of weights, optimizer and ledger, and the metrics without wall-clock and `varying` ones."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    hashes = {str(p.relative_to(last)): hashlib.sha256(p.read_bytes()).hexdigest() for p in last.rglob("*.safetensors")}
    lines = metrics_of(run)
    metrics = [{k: v for k, v in m.items() if not k.startswith((*WALL_CLOCK, *varying))} for m in lines]
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        return {"weights": hashes, "metrics": metrics, "ledger": ledger.digest()}


def metrics_of(run: Path) -> list[dict[str, float]]:
    """Rows of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def metrics_so_far(run: Path) -> list[dict[str, float]]:
    """Of a run that goes on: no rows before its first, nor one that is half written."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def assert_clean(run: Path) -> None:
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
    assert proof.ok, proof.problems


def lags(run: Path) -> list[int]:
    """Steps between the oldest token of each trained rollout and its update."""
    with sqlite3.connect(run / "ledger.sqlite") as db:
        query = "SELECT version - first_version FROM rollouts JOIN steps USING (step) WHERE fate = 'trained'"
        return [row[0] for row in db.execute(query)]


def at_step(k: int, do: Callable[[], object]) -> type[TrainerCallback]:
    """A callback that does something after a step."""

    class Does(TrainerCallback):
        def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
            if state.global_step == k:
                do()

    return Does


def _train_until(config: dict[str, Any], k: int) -> None:
    _interrupt(Trainer(config=config, reward_funcs=parity_reward), k)


def resume_after_each(config: dict[str, Any], steps: Iterable[int]) -> Path:
    """Train with an interrupt and a resume after each of these steps; the finished run.

    What one resume loses shows at the end, so that one chain tests them all.
    """
    run = Path(config["output_dir"])
    trainer = Trainer(config=config, reward_funcs=parity_reward)
    for k in steps:
        _interrupt(trainer, k)
        trainer = Trainer.resume(run, reward_funcs=parity_reward)
    trainer.train()
    return run


def _interrupt(trainer: Trainer, k: int) -> None:
    """Interrupt after step k, as Ctrl-C does: the trainer saves and says how to go on."""

    class CtrlC(TrainerCallback):
        def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
            if state.global_step == k:
                os.kill(os.getpid(), signal.SIGINT)

    trainer.add_callback(CtrlC)
    with pytest.raises(KeyboardInterrupt, match=f"saved at step {k}; go on with: winnow resume"):
        trainer.train()
    assert trainer.state.global_step == k
