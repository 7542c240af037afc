"""Builds and checks every part of a run; weights are loaded here and nowhere before. Methods: `build_methods.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..base.files import bytes_of, from_json, write_json
from ..base.weights import weights_digest
from ..config import RunConfig
from ..engine.base import Engine, close_engine
from ..engine.facts import end_where_rollouts_do
from ..engine.initial_model import require_embeddings
from ..engine.loading import CPU, load_tokenizer, load_whole, require_finite
from ..engine.pretrained import located
from ..engine.skeleton import as_zeros, in_files, unloaded
from ..engine.template import with_template
from ..env.base import Task
from ..env.rewards.rewarder import Rewarder, RewardSpec
from ..env.rewards.simple import SoftOverlong
from ..env.rewards.workers import RewardWorkers
from ..learner import Learner, Policy
from ..learner.adapters import adapted
from ..learner.agreement import Agreement
from ..learner.local.reference import frozen_copy
from ..learner.teacher import Teacher, build_teacher
from ..methods.gate.audit import rules_of
from ..rollout.evaluate import Evaluation, evaluate
from ..rollout.runner import RolloutRunner
from ..sampler import Sampler, SamplerContext
from ..sampler.weights import fingerprints
from ..types import Group, Job, Rollout
from .build_methods import Methods, build_methods, build_success, warn_of_profile
from .checkpoint import understood
from .inputs import TrainerInputs
from .preflight import (
    check_agreement,
    check_prompts,
    check_rewards,
    require_places,
    require_whole_groups,
    warn_of_sizes,
)
from .resolved import Resolved

FROZEN = "frozen.json"
"""Of a checkpoint: names of the parameters that a run of all weights does not train. Older ones lack it if it
trains all."""


@dataclass
class Parts:
    """Every part of a run."""

    resolved: Resolved
    run_dir: Path
    """Absolute: the working directory may change."""
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
    teacher: Teacher | None = None
    agreement: Agreement | None = None
    """Result of the last comparison of sampler and learner."""
    probed: list[Rollout] = field(default_factory=list)
    """Rollouts of comparisons that are not booked yet."""
    frozen: list[str] | None = None
    """Parameters that a run of all weights does not train; None: it trains adapters."""

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self.resolved.config

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digests that must be unchanged at a resume."""
        own = {"base model": self.origin, "reward functions": self.rewarder.fingerprint()}
        own |= {"teacher": self.teacher.digest} if self.teacher is not None else {}
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
            samplers, dtype = getattr(self.resolved.options.sync, "samplers", 1), lambda: self.sampler.dtype
            self.agreement = check_agreement(self.task.train, self._probe, self.learner, dtype, samplers)

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
        if self.frozen is not None:
            write_json(directory / FROZEN, self.frozen)

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory, with what was fitted for it."""
        self.learner.export(directory)
        self.tokenizer.save_pretrained(directory)
        self.methods.save(directory)

    def close(self) -> None:
        """End the processes of the parts, and engines that hold more than this process's memory."""
        for part in (self.sampler, self.learner, self.rewarder):
            part.close()
        close_engine(self.engine)


def build(
    r: Resolved, task: Task, inputs: TrainerInputs, checkpoint: Path | None, *, resumed: bool, entry: str
) -> Parts:
    """Build and check every part of a run, with weights from `checkpoint` if given. Raises ConfigError.

    `entry`: module that sampler processes run.
    """
    c, own_engines, run_dir = r.config, r.options.own_engines, Path(r.config.output_dir).absolute()
    r.set_threads()
    require_places(r)
    with ExitStack() as built:  # closed if a later part fails
        rewarder = build_rewarder(c, task, inputs.reward_funcs, scores=not own_engines)
        built.callback(rewarder.close)
        m = _checked_methods(r, task, rewarder, resumed)  # before weights are loaded, which may take minutes
        policy, engine = build_policy(r, inputs.processing_class, checkpoint, with_engine=not own_engines)
        built.callback(close_engine, engine)
        limits = getattr(engine, "max_length", None), getattr(r.engine, "max_length", None), r.model.positions
        most = min((limit for limit in limits if limit is not None), default=None)
        check_prompts(r.rollout_options["train"], task, policy.tokenizer, engine, most)
        learner = build_learner(policy, r)
        built.callback(learner.close)
        runner = None
        if engine is not None:
            runner = RolloutRunner(
                engine, task, policy.tokenizer, rewarder, r.rollout_options, rules_of(m.gates, m.audits)
            )
        gpu = (learner.device.index or 0) if learner.device.type == "cuda" else None
        context = SamplerContext(
            task=task,
            tokenizer=policy.tokenizer,
            greedy_baseline=m.advantage.greedy_baseline,
            behind=r.behind,
            runner=runner,
            seed=c.seed,
            settings=c.model_dump(mode="json"),
            run_dir=run_dir,
            device=c.device,
            reward_env=c.reward_env,
            engine=r.engine,
            cores=r.options.cores,
            model_bytes=4 * learner.sizes.total,
            gpu=gpu,
            entry=entry,
        )
        sampler = r.options.sync.build(context)
        built.callback(sampler.close)
        parts = Parts(r, run_dir, task, engine, policy.tokenizer, rewarder, learner, m, sampler, policy.origin)
        parts.frozen = _frozen(policy.model) if c.lora is None else None
        if c.teacher is not None:
            parts.teacher = build_teacher(c.teacher, learner, policy, task, r.learner_context, c.longest)
        if engine is not None:
            engine.load_weights(learner.weights(), 0)
            parts.compare()
        built.pop_all()
    return parts


def _checked_methods(r: Resolved, task: Task, rewarder: Rewarder, resumed: bool) -> Methods:
    """Build the methods and check them against task and rewards. Raises ConfigError."""
    c = r.config
    check_rewards(task, task.train[0], rewarder)
    success = build_success(c, task, rewarder.aliases, c.reward_weights)
    if not resumed:
        warn_of_profile(c, task, rewarder, success)
    m = build_methods(c, r.options, task.train, success)
    require_whole_groups(m, rewarder.comparing)
    if not resumed:
        warn_of_sizes(c, task)
    return m


def require_held_out(task: Task) -> None:
    """Raise ConfigError if there are no held-out prompts."""
    if not task.test:
        raise ConfigError("eval_dataset: no held-out prompts to evaluate on; give some (env: test)")


def build_rewarder(
    c: RunConfig, task: Task, given: Sequence[RewardSpec] | None = None, *, scores: bool = True
) -> Rewarder:
    """Build the rewarder from the objects `given`, else `reward_funcs`, else the task's own functions, and, with
    `soft_overlong_cache`, DAPO's punishment next to them. `scores`: in this process. Raises ConfigError."""
    workers = RewardWorkers(2, c.reward_memory_mb, tuple(c.reward_env), c.reward_sandbox)
    functions, weights = list(given or c.reward_funcs or task.reward_funcs), c.reward_weights
    if c.soft_overlong_cache is not None:
        try:
            functions.append(SoftOverlong(c.max_completion_length, c.soft_overlong_cache))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        weights = None if weights is None else [*weights, 1.0]
    return Rewarder(functions, weights, c.reward_timeout_s, workers=workers, device=c.device if scores else None)


def build_learner(policy: Policy, r: Resolved) -> Learner:
    """Build the learner. Raises ConfigError when the policy cannot be trained as configured."""
    try:
        learner: Learner = r.options.learner.build(policy, r.learner_context)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return learner


# ---------------------------------------------------------------- policy and engine


def build_policy(
    r: Resolved, tokenizer: Any = None, checkpoint: Path | None = None, *, with_engine: bool = True
) -> tuple[Policy, Engine | None]:
    """Build the policy of a fresh run or of `checkpoint` on the CPU, and an engine with its weights as version 0.

    `tokenizer`: an object, or None to load it. The engine is built before adapters are added: it holds the plain
    architecture, and loads merged weights or adds adapters itself.
    """
    c, start = r.config, r.model
    if start.model is not None and tokenizer is None:
        raise ConfigError("processing_class: missing; give the tokenizer of the model object")
    tokenizer = with_template(tokenizer or load_tokenizer(c.model), c.chat_template, c.chat_template_kwargs)
    saved = checkpoint / "model" if checkpoint else None
    read = _read_by_ranks(r, saved, tokenizer) if r.options.learns_elsewhere else None
    if read is not None and not with_engine:
        return read, None
    base, adapter = (load_whole(saved, CPU), None) if saved and not c.lora else start.load()
    if saved and not c.lora:
        _freeze_again(base, saved, start.model)
    require_finite(base, str(saved or c.model))
    require_embeddings(base, tokenizer, start.source, start.adapter)
    end_where_rollouts_do(base, tokenizer)
    engine = r.engine.build(start.reference(c.device, base, c.adapters_alone), tokenizer) if with_engine else None
    if read is not None:
        return read, engine
    if c.lora is not None:
        return adapted(base, c.lora, adapter, saved, tokenizer, keep_reference=c.keeps_reference), engine
    if not c.keeps_reference:
        return Policy(base, tokenizer, None), engine
    reference = frozen_copy(base if saved is None else start.load()[0])
    return Policy(base, tokenizer, reference, weights_digest(reference.state_dict())), engine


def _frozen(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def _freeze_again(model: Any, saved: Path, given: Any) -> None:
    """Freeze the parameters that the run does not train, which saved weights do not show.

    `saved`: the model of a checkpoint; older ones may have no names. `given`: the object that a resume got, or None.
    Raises ConfigError if it has others frozen than the run.
    """
    file, own = saved.parent / FROZEN, None if given is None else _frozen(given)
    names = own or []
    with understood(file):
        if file.exists():
            names = from_json(bytes_of(file))
            if own is not None and (different := sorted({*names} ^ {*own})):
                where = "given model" if different[0] in own else "run"
                raise ConfigError(
                    f"model: {different[0]} is frozen in the {where} alone, and a resume trains what the run trained; "
                    "give the model with the same parameters frozen"
                )
        for name in names:
            model.get_parameter(name).requires_grad_(False)


def _read_by_ranks(r: Resolved, saved: Path | None, tokenizer: Any) -> Policy | None:
    """Return the policy without base weights if ranks can read these from files, else None. That takes a directory, no
    adapter to train further, and no method that runs the whole model."""
    c, start = r.config, r.model
    first = Path(located(c.model))
    folder = first if saved is None or c.lora is not None else saved
    if r.options.gradient_baselines or start.model is not None:
        return None
    if start.adapter is not None and (folder != saved or c.keeps_reference):
        return None
    model = unloaded(folder) if folder.is_dir() else None
    if model is None:
        return None
    if saved is not None and c.lora is None:
        _freeze_again(model, saved, None)
    require_embeddings(model, tokenizer, start.source, start.adapter)
    end_where_rollouts_do(model, tokenizer)
    policy = Policy(model, tokenizer, None, files=folder.absolute())
    if c.lora is None and not c.keeps_reference:
        return policy
    origin = unloaded(first) if first.is_dir() else None
    if origin is None:
        return None
    digest = weights_digest(in_files(origin, first))
    if c.lora is None:
        return replace(policy, reference_files=first.absolute(), origin=digest)
    with as_zeros(model):
        trained = adapted(model, c.lora, None, saved, tokenizer, keep_reference=c.keeps_reference).model
    return replace(policy, model=trained, origin=digest)
