"""What a sampler process runs: engine, environments and rewards of a run, driven by messages (see `child.py`).

New weights take effect between two decode steps; rollouts under way go on with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from ..base.failpoint import failpoint
from ..config import ConfigError, validate
from ..env.rewards.rewarder import Rewarder
from ..rollout.runner import RolloutOptions, RolloutRunner
from ..sampler.codec import group_state, visit_from
from ..sampler.weights import fingerprints
from .build import build_policy, build_task, quiet_transformers, sampling_params

HEARTBEAT_S = 1.0


class Server:
    """Owns everything that samples. ConfigError when it would not be what the learner has."""

    def __init__(self, start: dict[str, Any], reply_fd: int) -> None:
        c = validate(start["config"])
        quiet_transformers()
        torch.set_num_threads(start["threads"])
        self.task = build_task(c.env)
        # Whatever adapters the learner has are merged in what it publishes.
        policy, self.engine = build_policy(c.model_copy(update={"lora": None, "beta": 0.0}), None, None, None)
        self.rewarder = Rewarder(c.reward_funcs or self.task.reward_funcs, c.reward_weights, c.reward_timeout_s)
        self.rewarder.trainer_state = SimpleNamespace(global_step=start["version"], max_steps=c.max_steps)
        options = RolloutOptions(
            sampling_params(c), c.max_prompt_length, c.seed, greedy_baseline=start["greedy_baseline"]
        )
        self.runner = RolloutRunner(self.engine, self.task, policy.tokenizer, self.rewarder, options)
        self._reply_fd = reply_fd
        self._born = self._told = time.monotonic()
        self._idle_s = 0.0
        self._tokens = 0
        for name, mine in fingerprints(self.task, policy.tokenizer).items():
            if start["fingerprints"][name] != mine:
                raise ConfigError(f"the {name} has changed since the learner started; restore it, and resume the run")

    def serve(self, inbox: queue.SimpleQueue[dict[str, Any]], start: dict[str, Any]) -> None:
        """Until it is told to stop. The weights to begin with are those of `start`, unless there are newer ones."""
        found = [start]
        while True:
            for message in self._take(inbox, found):
                if "stop" in message:
                    self._reply({"stopped": [group_state(group) for group in self.runner.abandon()]})
                    return
                if "launch" in message:
                    self.runner.launch(visit_from(message["launch"], self.task.train), message["size"])
            groups, found = [], []
            if self.runner.pending:
                failpoint("sampler.step")
                groups = self.runner.poll()
                self._tokens += sum(int(r.action_mask.sum()) for group in groups for r in group.rollouts)
                for group in groups:
                    self._reply({"group": group_state(group)})
            if groups or time.monotonic() - self._told >= HEARTBEAT_S:
                self._alive()

    def _take(self, inbox: queue.SimpleQueue[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those found and all there are, waiting when there is nothing to do; of several weights the newest count."""
        if not found and not self.runner.pending:
            started = time.monotonic()
            with contextlib.suppress(queue.Empty):
                found.append(inbox.get(timeout=HEARTBEAT_S))
            self._idle_s += time.monotonic() - started
        while not inbox.empty():
            found.append(inbox.get())
        if weights := [message for message in found if "weights" in message]:
            self._load(weights[-1])
        return found

    def _load(self, message: dict[str, Any]) -> None:
        failpoint("sampler.load")
        self.engine.load_weights(load_file(message["weights"]), message["version"])
        self.rewarder.trainer_state.global_step = message["version"]
        self._reply({"loaded": message["version"], "metrics": self.rewarder.pop_metrics()})
        self._alive()

    def _alive(self) -> None:
        self._told = time.monotonic()
        counts = {"seconds": self._told - self._born, "idle_s": self._idle_s, "tokens": self._tokens}
        self._reply({"alive": counts})

    def _reply(self, content: dict[str, Any]) -> None:
        data = memoryview(json.dumps(content).encode() + b"\n")
        while data:
            data = data[os.write(self._reply_fd, data) :]


def main() -> None:
    """Serve the learner over standard input and output."""
    reply_fd = os.dup(1)
    os.dup2(2, 1)  # what environments and rewards print is no message
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    requests_fd = os.dup(0)
    with Path(os.devnull).open() as devnull:
        os.dup2(devnull.fileno(), 0)
    threading.Thread(target=_read, args=(requests_fd, inbox), daemon=True).start()
    start = inbox.get()["start"]
    server = Server(start, reply_fd)
    server.serve(inbox, start)
    server.rewarder.close()


def _read(fd: int, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    with open(fd, "rb") as stream:
        for line in stream:
            inbox.put(json.loads(line))
    os._exit(1)  # the learner is gone
