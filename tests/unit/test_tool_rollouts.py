"""TRL's tools and environments in whole rollouts, with an engine that says what a script tells it."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from winnow.engine import SamplingParams
from winnow.engine.base import Finished
from winnow.env.rewards.rewarder import Rewarder
from winnow.env.tools import with_tools
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.types import Fate, Job, Visit

from .test_tool_prompts import OneTurn, add, make_tokenizer
from .test_tools import Counter, call, fail


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


class Scripted:
    """An engine whose model says what a script tells it, turn by turn."""

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
        text = self.script[request.id[2]].pop(0) + "<e>"
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int64)
        zeros = np.zeros(len(ids), np.float32)
        return Finished(request.id, ids, zeros, np.zeros(len(ids), np.int32), "eos", 0.0)


def roll(tokenizer, task, script, funcs=(), max_tokens=400):
    engine = Scripted(tokenizer, copy.deepcopy(script))
    rewarder = Rewarder(list(funcs))
    options = RolloutOptions(SamplingParams(max_tokens), 4_000, 0)
    runner = RolloutRunner(engine, task, tokenizer, rewarder, {"train": options})
    runner.launch(Job(Visit(0, 0, task.train[0]), len(script)))
    groups = []
    while runner.pending:
        groups += runner.poll()
    rewarder.close()
    return groups[0].rollouts, engine.seen


def test_rollouts_with_an_environment(tokenizer):
    task = with_tools(OneTurn({"start": 1}), environment_factory=Counter, timeout_s=5.0)
    script = [[call("increment", by=4), call("increment", by=1), "done"], ["no"], [call("increment", by="x"), "oh"]]
    rollouts, seen = roll(tokenizer, task, script)
    assert [r.reward for r in rollouts] == [6.0, 1.0, 1.0]
    assert [len(r.turns) for r in rollouts] == [3, 1, 2]
    assert seen[0].endswith("<s>user\nCount. Start at 1.<e>\n<s>assistant\n")
    assert seen[-1].endswith("<s>tool increment\nnow 6<e>\n<s>assistant\n")
    first = rollouts[0]
    assert tokenizer.decode(first.token_ids[~first.action_mask]) == "".join(
        f"\n<s>tool increment\nnow {n}<e>\n<s>assistant\n" for n in (5, 6)
    )
    assert "error" in rollouts[2].turns[0].observation


def test_reward_functions_judge_where_no_environment_does(tokenizer):
    def right(completions, **_):
        return [float("3" in c[-1]["content"]) for c in completions]

    task = with_tools(OneTurn(reward_funcs=[right]), [add, fail])
    script = [[call("add", a=1, b=2), "It is 3."], ["4"], [call("fail", how="away"), "3"]]
    rollouts, _ = roll(tokenizer, task, script, task.reward_funcs)
    assert [r.reward for r in rollouts] == [1.0, 0.0, None]
    assert rollouts[2].fate is Fate.FAILED
    assert "it away" in rollouts[2].reason


def test_reward_functions_see_environments_and_messages_as_in_trl(tokenizer):
    class Plain:
        reset, increment = Counter.reset, Counter.increment

    def judged(environments, completions, **_):
        assert [[m["role"] for m in c] for c in completions] == [["assistant", "tool", "assistant"], ["assistant"]]
        return [float(e.value) for e in environments]

    task = with_tools(OneTurn({"start": 1}), environment_factory=Plain)
    rollouts, _ = roll(tokenizer, task, [[call("increment", by=4), "done"], ["no"]], [judged])
    assert [r.reward for r in rollouts] == [5.0, 1.0]
