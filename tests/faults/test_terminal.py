"""A terminal that goes away in the middle of a run: what is under way is finished and saved, as for SIGTERM."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from winnow import Trainer
from winnow.run.checkpoint import steps
from winnow.run.trainer import StopSignals

from .. import parity
from ..builders.runs import assert_clean


@pytest.mark.slow
def test_the_run_is_saved_when_the_terminal_closes(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    run = Path(tiny_config["output_dir"])
    more = {"max_steps": 100_000, "save_steps": 50_000, "eval_steps": None, "learning_rate": 1e-9}  # never solved
    reward = {"reward_funcs": [f"{parity.__file__}:parity_reward"]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_config | more | reward))
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under `nohup`
        os.execv(sys.executable, [sys.executable, "-m", "winnow.cli.main", "train", str(tmp_path / "c.yaml")])
    deadline = time.monotonic() + 120
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 2:
        assert time.monotonic() < deadline
        if select.select([terminal], [], [], 0.2)[0]:
            os.read(terminal, 1 << 16)
    os.close(terminal)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline + 120:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.1)
    assert os.waitstatus_to_exitcode(ended[1]) not in (-signal.SIGHUP, -signal.SIGKILL)
    done = len(metrics.read_bytes().splitlines())
    assert steps(run)[-1] == done
    Trainer.resume(run, {"max_steps": done + 1}).train()
    assert_clean(run)


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As `nohup` asks for."""
    requested: list[bool] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(lambda: requested.append(True), lambda: None):
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not requested
