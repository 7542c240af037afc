"""Build scripted rollouts with tool calls."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from winnow.engine import SamplingParams
from winnow.engine.base import Finished
from winnow.env.rewards.rewarder import Rewarder
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.types import Job, Visit

from .tools import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


class Scripted:
    """An engine whose model says what a script tells it, turn by turn, up to a stop string or its end of turn."""

    provides = frozenset()
    clock = 0

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.requests = tokenizer, script, []
        self.seen = []

    @property
    def pending(self):
        return len(self.requests)

    def submit(self, requests):
        self.requests += requests

    def cancel(self, ids):
        list(ids)
        return []

    def step(self):
        finished, self.requests = self.requests, []
        return [self._said(r) for r in finished]

    def _said(self, request):
        self.seen.append(self.tokenizer.decode(request.prompt_ids))
        text = self.script[request.id[2]].pop(0)
        reason = "stop" if text.endswith(request.params.stop) else "eos"
        text += "<e>" if reason == "eos" else ""
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int64)
        if len(ids) > request.params.max_tokens:
            ids, reason = ids[: request.params.max_tokens], "length"
        zeros = np.zeros(len(ids), np.float32)
        return Finished(request.id, ids, zeros, np.zeros(len(ids), np.int32), reason, 0.0)


def roll(tokenizer, task, script, funcs=(), max_tokens=400, **more):
    engine = Scripted(tokenizer, copy.deepcopy(script))
    rewarder = Rewarder(list(funcs))
    options = RolloutOptions(SamplingParams(max_tokens), 4_000, 0, **more)
    runner = RolloutRunner(engine, task, tokenizer, rewarder, {"train": options})
    runner.launch(Job(Visit(0, 0, task.train[0]), len(script)))
    groups = []
    while runner.pending:
        groups += runner.poll()
    rewarder.close()
    return groups[0].rollouts, engine.seen
