"""Runs of a tiny trainer in child processes that can be killed; a fork server keeps the imports."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["winnow.run.trainer", "tests.conftest", "tests.faults.harness"])
DEADLINE_S = 240


def child(config: dict[str, Any], environment: dict[str, str]) -> None:
    """Train, or go on with what is there."""
    import torch

    from tests.parity import parity_reward
    from winnow import Trainer

    torch.set_num_threads(1)
    os.environ.update(environment)
    run = Path(config["output_dir"])
    reward = None if "reward_funcs" in config else parity_reward
    if (run / "config.json").exists():
        trainer = Trainer.resume(run, reward_funcs=reward)
    else:
        trainer = Trainer(config=config, reward_funcs=reward)
    trainer.train()


def run(config: dict[str, Any], *, kill_at_line: int | None = None, delay_s: float = 0, **environment: str) -> int:
    """Exit code of one child (negative: the signal that ended it). A child over the deadline fails the test.

    `kill_at_line`: SIGKILL `delay_s` after metrics.jsonl has that many lines.
    """
    process = _CONTEXT.Process(target=child, args=(config, environment))
    process.start()
    deadline = time.monotonic() + DEADLINE_S
    metrics = Path(config["output_dir"]) / "metrics.jsonl"
    while kill_at_line is not None and process.is_alive() and process.pid and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= kill_at_line:
            time.sleep(delay_s)
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    process.join(max(deadline - time.monotonic(), 1))
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"a run took over {DEADLINE_S} s")
    assert process.exitcode is not None
    return process.exitcode
