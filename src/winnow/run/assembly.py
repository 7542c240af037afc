"""Builds and checks every part of a run; nothing is written yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import ConfigError, RunConfig
from ..engine.base import Engine
from ..engine.loading import quiet_transformers
from ..env.base import Task
from ..env.rewards.rewarder import Rewarder
from ..learner.agreement import Agreement
from ..learner.base import Learner
from ..methods.gate.audit import rules_of
from ..record.trackers import check_trackers
from ..rollout.evaluate import Evaluation, evaluate
from ..rollout.runner import RolloutRunner
from ..sampler import Sampler, SamplerContext, sampler_options
from ..sampler.weights import fingerprints
from ..types import Group, Job, Rollout
from . import serve
from .auto_settings import Machine, settle
from .build import build_learner, build_policy, build_rewarder, build_sampler, rollout_options
from .build_methods import Methods, build_methods, build_success, method_options
from .hub import check_hub
from .placement import require_places
from .preflight import (
    check_agreement,
    check_prompts,
    in_steps,
    require_reuse,
    require_whole_groups,
    warn_of_sizes,
)
from .profile_settings import warn_of_profile
from .start import Start
from .trainer_inputs import Given


@dataclass
class Assembly:
    """Every part of a run."""

    config: RunConfig
    """With every `auto` settled."""
    task: Task
    machine: Machine
    engine: Engine | None
    """None if samplers have their own."""
    tokenizer: Any
    rewarder: Rewarder
    learner: Learner
    methods: Methods
    sampler: Sampler
    origin: str
    """Digest of the weights that adapters or a KL penalty refer to."""
    begun: float
    """`time.monotonic()` before anything was loaded."""
    agreement: Agreement | None = None
    """Result of the last comparison of sampler and learner."""
    probed: list[Rollout] = field(default_factory=list)
    """Rollouts of comparisons that are not booked yet."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digests that must be unchanged at a resume."""
        own = {"base model": self.origin, "reward functions": self.rewarder.fingerprint()}
        return fingerprints(self.task, self.tokenizer) | own

    def compare(self) -> None:
        """Compare the sampler's log-probabilities with the learner's; set `agreement`.

        Raises ConfigError when they differ, NothingSampledError when all probes failed.
        """
        if self.engine is None or "logp" in self.engine.provides:
            self.agreement = check_agreement(self.task.train, self._probe, self.learner, lambda: self.sampler.dtype)

    def evaluate(self) -> Evaluation:
        """Sample the held-out prompts with the newest weights. Raises ConfigError if there are none."""
        require_held_out(self.task)
        c, success = self.config, self.methods.judge.success
        prompts = self.task.test[: c.eval_prompts]
        return evaluate(self.sampler.run, prompts, n=c.eval_generations, success=success, greedy=c.eval_greedy)

    def _probe(self, jobs: Sequence[Job]) -> list[Group]:
        groups = self.sampler.run(jobs)
        self.probed += [rollout for group in groups for rollout in group.rollouts]
        return groups

    def save(self, directory: Path) -> None:
        """Write what a resume needs."""
        for part in (self.learner, self.sampler, self.methods):
            part.save(directory)
        self.tokenizer.save_pretrained(directory / "model")

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory, with what was fitted for it."""
        self.learner.export(directory)
        self.tokenizer.save_pretrained(directory)
        self.methods.save(directory)

    def close(self) -> None:
        """End the processes of the parts."""
        for part in (self.sampler, self.learner, self.rewarder):
            part.close()


def assemble(c: RunConfig, given: Given, checkpoint: Path | None, *, resumed: bool) -> Assembly:
    """Build the parts of the run that `c` describes, with weights from `checkpoint` if given. Raises ConfigError."""
    begun = time.monotonic()
    method_options(c)  # their names and options, before anything is loaded
    check_trackers(c.report_to)
    check_hub(c)
    quiet_transformers()
    task = given.task(c)
    c = in_steps(c, len(task.train))
    if c.eval_steps and not task.test:
        raise ConfigError("eval_steps: the task has no held-out prompts; give it some, or remove eval_steps")
    start = Start.of(c, None if isinstance(given.model, str) else given.model)
    if not resumed:
        start.require_names(c)
    machine = settle(c, start, resumed=resumed)
    c = machine.config
    machine.set_threads()
    require_places(c)
    own_engines = "own_engine" in sampler_options(c.sync).provides
    policy, engine = build_policy(c, start, given.processing_class, checkpoint, with_engine=not own_engines)
    rewarder = build_rewarder(c, task, given.reward_list)
    check_prompts(c, task, rewarder, policy.tokenizer, engine)
    learner = build_learner(policy, c)
    success = build_success(c, task, rewarder.aliases, c.reward_weights)
    if not resumed:
        warn_of_profile(c, task, rewarder, success)
    m = build_methods(c, task.train, success)
    require_whole_groups(c, m, rewarder.comparing)
    if not resumed:
        warn_of_sizes(c, task)
        require_reuse(c, bool(m.rollout_batch.carry))
    greedy = m.advantage.greedy_baseline
    runner = None
    if engine is not None:
        options = rollout_options(c, greedy_baseline=greedy)
        runner = RolloutRunner(engine, task, policy.tokenizer, rewarder, options, rules_of(m.gates))
    behind = c.max_lag - m.rollout_batch.carry  # carried groups are a step older when trained
    gpu = (learner.device.index or 0) if learner.device.type == "cuda" else None
    sampler = build_sampler(SamplerContext(c, task, policy.tokenizer, greedy, behind, runner, gpu, serve.__name__))
    built = Assembly(c, task, machine, engine, policy.tokenizer, rewarder, learner, m, sampler, policy.origin, begun)
    if engine is not None:
        engine.load_weights(learner.weights(), 0)
        built.compare()
    return built


def require_held_out(task: Task) -> None:
    """Raise ConfigError if there are no held-out prompts."""
    if not task.test:
        raise ConfigError("eval_dataset: no held-out prompts to evaluate on; give some (env: test)")
