"""Builds and checks every part of a run; nothing is written yet. Methods: `build_methods.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import ConfigError, RunConfig, name_of
from ..engine.base import Engine
from ..env.base import Task
from ..env.rewards.rewarder import Rewarder, RewardSpec
from ..env.rewards.workers import RewardWorkers
from ..learner import Learner, Policy
from ..learner.agreement import Agreement
from ..methods.gate.audit import rules_of
from ..rollout.evaluate import Evaluation, evaluate
from ..rollout.runner import RolloutRunner
from ..sampler import Sampler, SamplerContext
from ..sampler.base import PoolOptions
from ..sampler.weights import fingerprints
from ..types import Group, Job, Rollout
from .build_methods import Methods, build_methods, build_success
from .build_policy import build_policy
from .placement import require_places
from .preflight import check_agreement, check_prompts, require_reuse, require_whole_groups, warn_of_sizes
from .profile_settings import warn_of_profile
from .resolved import Resolved, learner_context, rollout_options
from .trainer_inputs import TrainerInputs


@dataclass
class Parts:
    """Every part of a run."""

    resolved: Resolved
    task: Task
    engine: Engine | None
    """None if samplers have their own."""
    tokenizer: Any
    rewarder: Rewarder
    learner: Learner
    methods: Methods
    sampler: Sampler
    origin: str
    """Digest of the weights that adapters or a KL penalty refer to."""
    agreement: Agreement | None = None
    """Result of the last comparison of sampler and learner."""
    probed: list[Rollout] = field(default_factory=list)
    """Rollouts of comparisons that are not booked yet."""

    @property
    def config(self) -> RunConfig:
        """The configuration, with a value for every `auto`."""
        return self.resolved.config

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digests that must be unchanged at a resume."""
        own = {"base model": self.origin, "reward functions": self.rewarder.fingerprint()}
        return fingerprints(self.task, self.tokenizer) | own

    def require_same(self, saved: Mapping[str, str]) -> None:
        """Raise ConfigError unless task, tokenizer, base model and reward functions are those of `saved`, if any."""
        for name, now in self.fingerprints.items() if saved else ():
            if saved.get(name) != now:
                raise ConfigError(
                    f"{self.config.output_dir}: the {name} is not the one this run was saved with; restore it, or "
                    "start a new run"
                )

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


def build(
    r: Resolved, task: Task, inputs: TrainerInputs, checkpoint: Path | None, *, resumed: bool, entry: str
) -> Parts:
    """Build and check every part of a run, with weights from `checkpoint` if given. Raises ConfigError.

    `entry`: the module that serves a sampler in another process.
    """
    c, own_engines = r.config, r.options.own_engines
    r.set_threads()
    require_places(r)
    policy, engine = build_policy(r, inputs.processing_class, checkpoint, with_engine=not own_engines)
    rewarder = build_rewarder(c, task, inputs.reward_list)
    check_prompts(c, task, rewarder, policy.tokenizer, engine)
    learner = build_learner(policy, r)
    success = build_success(c, task, rewarder.aliases, c.reward_weights)
    if not resumed:
        warn_of_profile(c, task, rewarder, success)
    m = build_methods(c, r.options, task.train, success)
    require_whole_groups(c, m, rewarder.comparing)
    if not resumed:
        warn_of_sizes(c, task)
        require_reuse(c, r.options.sync, bool(m.rollout_batch.carry))
    greedy = m.advantage.greedy_baseline
    runner = None
    if engine is not None:
        by_purpose = rollout_options(c, greedy_baseline=greedy)
        runner = RolloutRunner(engine, task, policy.tokenizer, rewarder, by_purpose, rules_of(m.gates, m.audits))
    behind = c.max_lag - m.rollout_batch.carry  # carried groups are a step older when trained
    gpu = (learner.device.index or 0) if learner.device.type == "cuda" else None
    sampler = build_sampler(
        r,
        SamplerContext(
            task=task,
            tokenizer=policy.tokenizer,
            greedy_baseline=greedy,
            behind=behind,
            runner=runner,
            seed=c.seed,
            settings=c.model_dump(mode="json"),
            run_dir=Path(c.output_dir),
            device=c.device,
            reward_env=c.reward_env,
            engine=r.engine,
            cores=r.options.cores,
            gpu=gpu,
            entry=entry,
        ),
    )
    parts = Parts(r, task, engine, policy.tokenizer, rewarder, learner, m, sampler, policy.origin)
    if engine is not None:
        engine.load_weights(learner.weights(), 0)
        parts.compare()
    return parts


def require_held_out(task: Task) -> None:
    """Raise ConfigError if there are no held-out prompts."""
    if not task.test:
        raise ConfigError("eval_dataset: no held-out prompts to evaluate on; give some (env: test)")


def build_sampler(r: Resolved, context: SamplerContext) -> Sampler:
    """Build the sampler. Raises ConfigError when options do nothing, or contradict others."""
    c, options = r.config, r.options.sync
    if r.options.asynchronous and c.changed(("rollout_batch",)):
        raise ConfigError(
            f"rollout_batch: has no effect with sync: {name_of(c.sync)}, which starts groups as soon as they can "
            "still be trained within max_lag; remove it"
        )
    if not r.options.asynchronous and not context.behind and c.changed(("sync",)):
        raise ConfigError("sync: options of in_process have no effect without a lag (max_lag); remove them")
    if isinstance(options, PoolOptions) and options.timeout_s <= c.reward_timeout_s:
        raise ConfigError(
            f"sync: timeout_s={options.timeout_s:g} must be above reward_timeout_s={c.reward_timeout_s:g}, or a "
            "sampler that waits for a reward counts as stuck; raise it"
        )
    return options.build(context)


def build_rewarder(c: RunConfig, task: Task, given: Sequence[RewardSpec] | None = None) -> Rewarder:
    """Build the rewarder from the objects `given`, else `reward_funcs`, else the task's own functions."""
    workers = RewardWorkers(2, c.reward_memory_mb, tuple(c.reward_env), c.reward_sandbox)
    functions = given or c.reward_funcs or task.reward_funcs
    return Rewarder(functions, c.reward_weights, c.reward_timeout_s, workers=workers, device=c.device)


def build_learner(policy: Policy, r: Resolved) -> Learner:
    """Build the learner. Raises ConfigError when the policy cannot be trained as configured."""
    try:
        learner: Learner = r.options.learner.build(policy, learner_context(r.config, r.options))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return learner
