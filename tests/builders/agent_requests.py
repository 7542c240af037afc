"""Send requests as agents do, to a policy that answers when a test lets it."""

from __future__ import annotations

import http.client
import json
import threading
from urllib.parse import urlsplit

from winnow.engine import SamplingParams
from winnow.env.rewards.rewarder import Rewarder
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.tasks.agents import with_agent
from winnow.types import Job, Visit

from .tool_rollouts import Scripted
from .tools import OneTurn


class Connection(http.client.HTTPConnection):
    """A connection that a `with` block closes."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def start_request(base_url, messages, **more):
    """Send a request, and give the connection on which its answer comes."""
    to = urlsplit(base_url)
    connection = Connection(to.hostname, to.port, timeout=20)
    connection.request("POST", f"{to.path}/chat/completions", json.dumps({"messages": messages, **more}))
    return connection


class Slow(Scripted):
    """A scripted engine that is `working` until it may `go_on`."""

    def __init__(self, tokenizer, script, funcs=()):
        super().__init__(tokenizer, script)
        self.working, self.go_on, self.funcs = threading.Event(), threading.Event(), list(funcs)

    def step(self):
        if self.requests:
            self.working.set()
            assert self.go_on.wait(20)
        return super().step()

    def group(self, agent, **settings):
        """The group of one rollout of an agent, which gets the engine as `slow`."""
        task = with_agent(OneTurn(), lambda base_url, prompt: agent(base_url, prompt, self), **settings)
        rewarder = Rewarder(self.funcs)
        runner = RolloutRunner(self, task, self.tokenizer, rewarder, {"train": self.options()})
        runner.launch(Job(Visit(0, 0, task.train[0]), len(self.script)))
        groups = []
        while runner.pending:
            groups += runner.poll()
        rewarder.close()
        return groups[0]

    def options(self):
        return RolloutOptions(SamplingParams(400), 4_000, 0)

    def roll(self, agent, **settings):
        return self.group(agent, **settings).rollouts
