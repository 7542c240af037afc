"""Sampler process of a run: engine, environments and rewards, driven by messages (see `sampler/pool.py`).

New weights take effect between two decode steps; running rollouts continue with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ..base.errors import ConfigError, ExpectedError
from ..base.failpoint import failpoint
from ..base.forkserver import call_itself, lines_with_parent
from ..base.machine import gpu_gib, resident_mib
from ..config import validate
from ..engine.base import close_engine
from ..engine.initial_model import InitialModel
from ..engine.loading import load_tokenizer, quiet_transformers
from ..engine.template import with_template
from ..methods.gate import RuleError, rule_from
from ..rollout.runner import RolloutRunner
from ..sampler.base import HEARTBEAT_S, busy
from ..sampler.codec import group_state, job_from, prompts_of
from ..sampler.weights import fingerprints, read_weights
from .build import build_rewarder
from .build_methods import rule_types
from .inputs import build_task
from .resolve import engine_for_run
from .resolved import Options, rollout_options

PROCESS_NAME = "winnow-sampler"
Reply = Callable[[dict[str, Any]], None]
ReadWeights = Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]]


def alone_on(device: str) -> str:
    """Hide all GPUs but `device` from this process, which has not used any yet; return the device's new name."""
    kind, _, number = device.partition(":")
    if kind == "cuda" and number:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(number)] if int(number) < len(visible) else number
    return kind


class Server:
    """Engine, environments and rewards of a sampler; `reply` sends to the learner, `read` loads published weights.

    Raises ConfigError when its parts differ from the learner's, ValueError when a rule cannot be used here.
    """

    def __init__(self, start: Mapping[str, Any], reply: Reply, read: ReadWeights) -> None:
        c = validate(start["config"])
        methods = Options.from_config(c)
        engine = engine_for_run(c, methods, slot=start["slot"])  # before its device gets the name that it has here
        if start["device"] is not None:
            c = c.model_copy(update={"device": alone_on(start["device"])})
        quiet_transformers()
        torch.set_num_threads(start["threads"])
        self.task = build_task(c.env)
        self._prompts = prompts_of(self.task)
        tokenizer = with_template(load_tokenizer(c.model), c.chat_template, c.chat_template_kwargs)
        model = InitialModel.from_config(c)
        base = None if model.adapter is None else model.load()[0]
        self.engine = engine.build(model.reference(c.device, base, c.adapters_alone), tokenizer)
        self.rewarder = build_rewarder(c, self.task)
        self.rewarder.trainer_state = SimpleNamespace(global_step=start["version"], max_steps=c.max_steps)
        options = rollout_options(c, greedy_baseline=start["greedy_baseline"])
        self.runner = RolloutRunner(self.engine, self.task, tokenizer, self.rewarder, options)
        self.rule_types = rule_types(methods)
        self._reply, self._read = reply, read
        self._reported, self._idle_s, self._tokens = time.monotonic(), 0.0, 0
        self.runner.waits = self._alive_if_due  # slow rewards are no stuck sampler
        for name, mine in fingerprints(self.task, tokenizer).items():
            if start["fingerprints"][name] != mine:
                raise ConfigError(f"{name}: has changed since the learner started; restore it, and resume the run")

    def serve(self, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
        """Serve until a `stop` message. The first weights are the newest once the engine is built."""
        self._reply({"built": True})
        messages: list[dict[str, Any]] = []
        while not messages or not messages[-1].keys() & {"weights", "stop"}:
            self._alive()
            with contextlib.suppress(queue.Empty):
                messages.append(inbox.get(timeout=HEARTBEAT_S))
        while True:
            for message in self._take(inbox, messages):
                if "stop" in message:
                    self._reply({"stopped": [group_state(group) for group in self.runner.abandon()]})
                    return
                if "launch" in message:
                    self.runner.launch(job_from(message["launch"], self._prompts))
            groups, messages = [], []
            if self.runner.pending:
                failpoint("sampler.step")
                groups = self.runner.poll()
                self._tokens += sum(int(r.action_mask.sum()) for group in groups for r in group.rollouts)
                for group in groups:
                    self._reply({"group": group_state(group)})
            if groups:
                self._alive()
            else:
                self._alive_if_due()

    def _take(self, inbox: queue.SimpleQueue[dict[str, Any]], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return `messages` and all pending ones; wait when idle. Loads only the newest weights."""
        if not messages and not self.runner.pending:
            started = time.monotonic()
            with contextlib.suppress(queue.Empty):
                messages.append(inbox.get(timeout=HEARTBEAT_S))
            self._idle_s += time.monotonic() - started
        while not inbox.empty():
            messages.append(inbox.get())
        weights = [message for message in messages if "weights" in message]
        if weights:
            self._load(weights[-1])
        for message in weights:  # else Ray keeps the weights as long as the message
            del message["weights"]
        return messages

    def _load(self, message: dict[str, Any]) -> None:
        failpoint("sampler.load")
        with busy(self._reply), self.runner.seconds.phase("publish"):
            load_file = getattr(self.engine, "load_file", None)
            if load_file is not None:
                load_file(message["weights"], message["version"])
            else:
                self.engine.load_weights(self._read(message), message["version"])
        self.runner.set_rules([rule_from(state, self.rule_types[state["name"]]) for state in message["rules"]])
        self.rewarder.trainer_state.global_step = message["version"]
        dtype = str(getattr(self.engine, "dtype", "unknown"))
        self._reply({"loaded": message["version"], "dtype": dtype, "logged": self.rewarder.pop_logged()})
        self._alive()

    def _alive_if_due(self) -> None:
        if time.monotonic() - self._reported >= HEARTBEAT_S:
            self._alive()

    def _alive(self) -> None:
        """Report what was spent since the last report."""
        now = time.monotonic()
        spent = {"seconds": now - self._reported, "idle_s": self._idle_s, "tokens": self._tokens}
        self._reported, self._idle_s, self._tokens = now, 0.0, 0
        memory = {"memory_mib": resident_mib()} | gpu_gib()
        self._reply({"alive": spent, "spent": self.runner.spent(), "memory": memory})


def main() -> None:
    """Serve the learner over standard input and output."""
    call_itself(PROCESS_NAME)
    inbox, write = lines_with_parent(lambda: os._exit(1))
    try:
        serve(inbox, lambda content: write(json.dumps(content)))
    except ExpectedError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # the interpreter would take seconds to end


def serve(inbox: queue.SimpleQueue[dict[str, Any]], reply: Reply, read: ReadWeights = read_weights) -> None:
    """Run a sampler over any transport; one that cannot run replies `refused` and ends. `read` loads the weights that a
    message locates."""
    start = inbox.get()["start"]
    try:
        with busy(reply):
            server = Server(start, reply, read)
        server.runner.set_rules([rule_from(state, server.rule_types[state["name"]]) for state in start["rules"]])
    except ValueError as error:
        reply({"refused": str(error)})
        return
    try:
        server.serve(inbox)
    except RuleError as error:  # another sampler would fail the same way
        reply({"refused": str(error)})
    finally:
        try:
            server.runner.abandon(engine_works=False)  # nothing is left after a normal end
        finally:
            server.rewarder.close()
            close_engine(server.engine)
