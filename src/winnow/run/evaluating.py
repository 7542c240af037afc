"""Evaluations of a run and profiles for its selector, when due."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ConfigError, RunConfig
from ..env.base import Task
from ..record.ledger import Ledger
from ..record.records import Records
from ..rollout.evaluate import Evaluation, RollOut, evaluate
from ..rollout.profile import Profiler
from .build import Methods


def require_held_out(task: Task) -> None:
    """Raise ConfigError if there are no held-out prompts."""
    if not task.test:
        raise ConfigError("eval_dataset: no held-out prompts to evaluate on; give some (env: test)")


@dataclass(frozen=True)
class Evaluations:
    """Samples outside training, booked as evaluation."""

    config: RunConfig
    task: Task
    roll_out: RollOut
    methods: Methods
    ledger: Ledger
    records: Records

    def evaluate(self, step: int) -> Evaluation | None:
        """Return held-out metrics every `eval_steps` and at the end, else None."""
        c = self.config
        if not c.eval_steps or (step % c.eval_steps and step != c.max_steps):
            return None
        return self.now(step)

    def now(self, step: int) -> Evaluation:
        """Return held-out metrics. Raises ConfigError without held-out prompts."""
        c = self.config
        require_held_out(self.task)
        prompts = self.task.test[: c.eval_prompts]
        success = self.methods.judge.success
        found = evaluate(self.roll_out, prompts, n=c.eval_generations, success=success, greedy=c.eval_greedy)
        self.ledger.evaluation(step, rollouts=found.rollouts, tokens=found.tokens, seconds=found.seconds)
        self.records.samples(step, found.groups, "test")
        return found

    def profile(self, step: int) -> None:
        """Give the selector fresh pass rates of all training prompts, if it asks for them."""
        n = self.methods.selector.wants_profile(step)
        if not n or step == self.config.max_steps:
            return
        profiler = Profiler(self.roll_out)
        rates = profiler.run(self.task.train, n=n, success=self.methods.judge.success, epoch=step)
        self.methods.selector.profiled(rates)
        self.ledger.evaluation(step, rollouts=profiler.rollouts, tokens=profiler.tokens, seconds=profiler.seconds)
