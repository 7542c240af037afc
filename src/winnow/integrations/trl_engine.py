"""Sampling inside TRL: by TRL's own generation, or by Winnow's engine, with gates and environments; TRL scores."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from ..base.errors import ConfigError
from ..base.seconds import Seconds
from ..base.weights import FiniteWeights, StateWeights, WeightSource, state_once
from ..config import RunConfig
from ..config.options import MethodSpec, name_of
from ..engine import VllmOptions
from ..engine.base import Engine, close_engine, release_engine
from ..engine.facts import end_where_rollouts_do
from ..engine.initial_model import require_embeddings
from ..engine.loading import ModelReference, prepare_cuda
from ..engine.lora import TRAINED, UNUSED
from ..engine.template import with_template_values
from ..env.base import Task
from ..env.rewards.pending import numbered
from ..env.rewards.rewarder import Rewarder
from ..learner.agreement import require_agreement
from ..learner.base import Learner
from ..learner.local.merged import MergedWeights
from ..learner.rows import Row
from ..methods.gate import NamedRule
from ..rollout.evaluate import run_jobs
from ..rollout.runner import RolloutRunner
from ..run.preflight import longest_prompt
from ..run.resolve import engine_for_run
from ..run.resolved import Options, rollout_options
from ..sampler.base import JobQueue
from ..types import Fate, Group, Job, Prompt, Rollout
from .trl_batch import Tensors, check_tensors, row_of

COMPARED = 8
"""Rollouts that compare engine and model."""


class TrlModel:
    """TRL's model with the interface of a Winnow learner: weights for engines, log-probabilities of sampled tokens."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def model(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    @property
    def precision(self) -> str:
        """Compute type, e.g. `float32`."""
        args = self._trainer.args
        if args.bf16:
            return "bfloat16"
        if args.fp16:
            return "float16"
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    def weights(self) -> WeightSource:
        """Return weights as engines load them, adapters merged."""
        if hasattr(self.model, "get_base_model"):
            return MergedWeights(self.model.get_base_model())
        return StateWeights(state_once(self.model))

    def merged(self) -> Any:
        """Return the Hugging Face model without adapters: itself, or a copy with adapters merged."""
        if hasattr(self.model, "get_base_model"):
            return copy.deepcopy(self.model).merge_and_unload()
        return self.model

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Take away the forward that TRL and accelerate set on the model: in a copy it would still run the original."""
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        forward = vars(model).pop("forward", None)
        try:
            yield
        finally:
            if forward is not None:
                model.forward = forward

    @torch.no_grad()
    def logp(self, rows: Sequence[Row], *, raw: bool = False) -> list[torch.Tensor]:
        """Return log-probabilities [A] of the A action tokens of each row; `raw`: before temperature."""
        trainer, model, found = self._trainer, self._trainer.model, []
        training = model.training
        model.eval()
        try:
            for row in rows:
                r = row.rollout
                ids = torch.tensor([[*r.prompt_ids, *r.token_ids.tolist()]], device=trainer.accelerator.device)
                logp = trainer._get_per_token_logps_and_entropies(
                    model, ids, torch.ones_like(ids), len(r.token_ids), compute_entropy=False
                )[0][0]
                found.append(logp[torch.from_numpy(r.action_mask).to(logp.device)])
        finally:
            model.train(training)
        return found


class _ScoredByTrl:
    """Rewarder that leaves the rewards of finished groups to TRL."""

    names = ("TRL",)

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def start(self, group: Group, environments: Sequence[Any]) -> None:
        self._groups.append(group)

    def unfinished(self) -> list[Future[Any]]:
        return []

    def done(self, wait: bool = False, timeout_s: float | None = None) -> list[Group]:
        groups, self._groups = self._groups, []
        return groups


def check_engine(trainer: Any) -> None:
    """Raise ConfigError, with the remedy, on features of TRL's generation that Winnow's engine does not have."""
    args, model = trainer.args, TrlModel(trainer).model
    adapter = unmerged(model)
    quantized = any(getattr(model, f"is_{kind}", False) for kind in ("quantized", "loaded_in_4bit", "loaded_in_8bit"))
    refused = {
        "use_vllm": (args.use_vllm, "TRL's vLLM cannot run gates during a sequence; set engine='vllm' instead"),
        "tools": (bool(trainer.tools), "give the task as env=..."),
        "environment_factory": (trainer.environment_factories is not None, "give the task as env=..."),
        "rollout_func": (trainer.rollout_func is not None, "the engine is the rollout function; remove one of them"),
        "repetition_penalty": (args.repetition_penalty != 1.0, "TRL's log-probabilities ignore it; leave it out"),
        "peft_config": (bool(adapter), f"the engine would not get the weights of {adapter}; use one plain LoraConfig"),
        "quantization_config": (quantized, "the engine needs whole weights; load the model without it"),
        "generation_kwargs": (bool(args.generation_kwargs), "the engine takes temperature, top_p, top_k and min_p"),
    }
    for name, (given, remedy) in refused.items():
        if given:
            raise ConfigError(f"{name}: does not work with gates, env or engine, where Winnow samples; {remedy}")


def unmerged(model: Any) -> str:
    """Return what of the model's adapters is not merged as they compute; empty: nothing."""
    adapters = getattr(model, "peft_config", {})
    for name, adapter in adapters.items():
        whole = name in ("default", "ref") and hasattr(model, "get_base_model")  # TRL's copy, for the KL term, is "ref"
        if not whole or adapter.peft_type != "LORA":
            return f"the adapter '{name}' ({type(adapter).__name__})"
        for key, value in adapter.to_dict().items():
            if value and key not in {*TRAINED, *UNUSED, "bias", "revision"}:
                return f"{key}={value!r}"
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()] if adapters else []
    if any(hasattr(end, "get_delta_weight") for end in ends) and ends[0].weight is ends[1].weight:
        return "an adapter on embeddings or a head that are tied"
    return ""


def with_precision(spec: MethodSpec, precision: str) -> MethodSpec:
    """Return the engine's options, with the training dtype unless they name one."""
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    return {"dtype": precision} | options if precision in ("float32", "bfloat16", "float16") else options


class EngineInTrl:
    """Runs jobs to their end with TRL's model. Raises ConfigError when a gate cannot be used there."""

    def __init__(self, trainer: Any, c: RunConfig, options: Options, task: Task, rules: Sequence[NamedRule]) -> None:
        check_engine(trainer)
        self.model = TrlModel(trainer)
        self._config, self._task, self._device = c, task, trainer.accelerator.device
        if self._device.type == "cuda":
            prepare_cuda()
        self._tokenizer = with_template_values(trainer._tokenizer, trainer.chat_template_kwargs)
        require_embeddings(self.model.model, self._tokenizer, c.model)
        # else TRL counts others as cut off
        trainer.eos_token_ids = end_where_rollouts_do(self.model.model, self._tokenizer)
        self._options = engine_for_run(c, options)
        if isinstance(self._options, VllmOptions) and self._options.max_length is None:
            self._options = replace(self._options, max_length=longest_sequence(trainer, c, task, self._tokenizer))
        exact = not (c.top_k or c.min_p or c.top_p < 1.0)  # TRL's log-probabilities apply temperature only
        self._compare = exact
        self._engine: Engine | None = None
        self._runner: RolloutRunner
        self._open(rules)
        rounded = {getattr(self._engine, "dtype", "unknown"), self.model.precision} - {"float32", "float64"}
        self.corrects = bool(exact and rounded and trainer.vllm_importance_sampling_correction)
        """Whether TRL corrects for the engine as for its own vLLM: rounding changes probabilities."""
        mode = trainer.vllm_importance_sampling_mode
        if self.corrects and trainer.loss_type == "vespo" and not mode.startswith("token"):
            self.close()
            raise ConfigError(f"loss_type: vespo needs vllm_importance_sampling_mode 'token_truncate', not '{mode}'")

    def _open(self, rules: Sequence[NamedRule]) -> None:
        """Build the engine. One that reads files needs no copy of the model."""
        c, model = self._config, self.model.model
        source = "" if name_of(c.engine) == "local" else str(getattr(model.config, "name_or_path", "") or "")
        with self.model.as_loaded():
            reference = ModelReference(source, self._device, None if source else self.model.merged())
            self._engine = engine = cast(Engine, self._options.build(reference, self._tokenizer))
        self._runner = RolloutRunner(
            engine, self._task, self._tokenizer, cast(Rewarder, _ScoredByTrl()), rollout_options(c), rules
        )

    def publish(self, rules: Sequence[NamedRule], version: int) -> None:
        """Load TRL's weights and the gates' rules. Raises FloatingPointError when a weight is not finite."""
        if self._engine is None:
            self._open(rules)
        else:
            self._runner.set_rules(rules)
        assert self._engine is not None
        self._engine.load_weights(FiniteWeights(self.model.weights()), version)

    def release(self) -> None:
        """Free memory that the update can use, until the next `publish`."""
        release_engine(self._engine)

    def close(self) -> None:
        """Close the engine, which an interrupt leaves unusable; the next `publish` builds another."""
        close_engine(self._engine)
        self._engine = None
        vars(self).pop("_runner", None)  # it holds the engine

    def run(self, jobs: Sequence[Job]) -> list[Group]:
        """Return the jobs' groups in order, without rewards; the first are compared with TRL's model.

        Raises ConfigError with the likely cause when engine and model disagree about what was sampled, and for what
        TRL's loss cannot take.
        """
        groups = run_jobs(self._runner, jobs)
        for group in groups:
            require_trainable(group)
        sampled = [r for group in groups for r in group.rollouts if r.action_mask.any()]
        if self._compare and sampled:
            dtype = str(getattr(self._engine, "dtype", "unknown"))
            require_agreement(sampled[:COMPARED], cast(Learner, self.model), dtype)
            self._compare = False
        return groups

    def spent(self) -> dict[str, float]:
        """Return seconds by what they were spent on since the last call."""
        return self._runner.spent()


def longest_sequence(trainer: Any, c: RunConfig, task: Task, tokenizer: Any) -> int | None:
    """Return the tokens of the longest prompt and completion, TRL's own limit if it is set, or None if an environment
    decides how long prompts are."""
    limit: int | None = getattr(trainer.args, "vllm_max_model_length", None)
    if limit is not None:
        return limit
    prompt = longest_prompt(task, tokenizer)
    return None if prompt is None else prompt + c.max_completion_length


def require_trainable(group: Group) -> None:
    """Raise ConfigError for rollouts that TRL's loss cannot take."""
    if any(rollout.agent_rewards for rollout in group.rollouts):
        raise ConfigError(
            f"env: the agents of a rollout of prompt '{group.prompt.id}' have rewards of their own, and TRL has one "
            "advantage a rollout; return one reward, or train with winnow.Trainer"
        )


def as_rollout_func(rollouts: Sequence[Rollout], pad_token: int) -> Any:
    """Return TRL's rollout function for these rollouts; failed ones without a token get a pad token."""

    def rollout_func(prompts: Sequence[Any], trainer: Any) -> Mapping[str, Any]:
        return {
            "prompt_ids": [list(r.prompt_ids) or [pad_token] for r in rollouts],
            "completion_ids": [r.token_ids.tolist() or [pad_token] for r in rollouts],
            "logprobs": [r.sampler_logp.tolist() or [0.0] for r in rollouts],
            "env_mask": [r.action_mask.astype(int).tolist() or [0] for r in rollouts],
            "env_reward": [r.reward for r in rollouts],
        }

    return rollout_func


NO_REWARD = "no reward function gave a number"
RollOut = Callable[[list[Prompt], int, list[Group] | None], tuple[dict[str, Any], tuple[Any, ...]]]
"""Prompts, rollouts per prompt, and groups of Winnow's engine, if it samples
-> TRL's tensors of them, and (rewards [B, F], completions, completion ids)."""


class TrlSampler(JobQueue):
    """Rolls out groups with TRL's generation, or with Winnow's engine inside TRL, and TRL's rewards."""

    def __init__(self, trainer: Any, roll_out: RollOut, engine: EngineInTrl | None) -> None:
        super().__init__()
        self._trainer, self._roll_out, self._engine = trainer, roll_out, engine
        self._names = numbered(trainer.reward_func_names)
        self._rows: dict[tuple[int, int], Tensors] = {}
        self.outputs: list[Tensors] = []
        """TRL's tensors of each call since `forget`, unchanged."""
        self.version = 0
        self._seconds = Seconds()

    def spent(self) -> dict[str, float]:
        of_engine = {} if self._engine is None else self._engine.spent()
        return of_engine | self._seconds.take()

    def run(self, jobs: Sequence[Job]) -> list[Group]:
        done = {}
        for size in sorted({job.size for job in jobs}):  # TRL generates as many rollouts for each prompt of a call
            for group in self._finished([job for job in jobs if job.size == size]):
                done[group.visit.number] = group
        return [done[job.visit.number] for job in jobs]

    def _finished(self, jobs: list[Job]) -> list[Group]:
        size = jobs[0].size
        groups = None if self._engine is None else self._engine.run(jobs)
        with self._seconds.phase("waiting" if groups is None else "rewards"):
            output, scored = self._roll_out([job.visit.prompt for job in jobs], size, groups)
        check_tensors(output)
        self.outputs.append(output)
        tensors = [row_of(output, i, len(ids)) for i, ids in enumerate(scored[2])]
        if groups is None:
            rollouts = self._rollouts(tensors, *scored[1:])
            groups = [Group(job.visit, [next(rollouts) for _ in range(size)]) for job in jobs]
            for job, group in zip(jobs, groups, strict=True):
                for sibling, rollout in enumerate(group.rollouts, job.first):
                    rollout.sibling = sibling
        everybody = [(group, rollout) for group in groups for rollout in group.rollouts]
        for (group, rollout), row, rewards_F in zip(everybody, tensors, scored[0], strict=True):
            self._rows[group.visit.number, rollout.sibling] = row
            self._reward(rollout, rewards_F)
        return groups

    def row(self, group: Group, rollout: Rollout) -> Tensors:
        """Return TRL's tensors of one rollout, without padding."""
        return self._rows[group.visit.number, rollout.sibling]

    def forget(self) -> None:
        self._rows.clear()
        self.outputs = []

    def show(self, advantages: Mapping[tuple[int, int], float]) -> None:
        """Put the advantages trained on, by visit and sibling, into TRL's table of completions; NaN: not trained."""
        table = self._trainer._logs["advantages"]  # of the latest rows
        for place, key in zip(range(-1, -len(table) - 1, -1), reversed(self._rows), strict=False):
            table[place] = advantages.get(key, math.nan)

    def _reward(self, rollout: Rollout, rewards_F: torch.Tensor) -> None:
        """Set TRL's rewards [F] by function on a rollout without a fate; NaN: the function returned None or NaN."""
        rollout.reward = None
        if rollout.fate is not None:
            return
        own = {"env": rollout.rewards["env"]} if "env" in rollout.rewards else {}  # which `success` may name
        values = zip(self._names, rewards_F.tolist(), strict=True)
        rollout.rewards = own | {name: value if math.isfinite(value) else None for name, value in values}
        if torch.isnan(rewards_F).all():
            rollout.fate, rollout.reason = Fate.FAILED, NO_REWARD
            return
        reward = float((rewards_F * self._trainer.reward_weights.to(rewards_F.device)).nansum())
        if math.isfinite(reward):
            rollout.reward = reward
        else:
            rollout.fate, rollout.reason = Fate.FAILED, f"the reward is not finite ({reward})"

    def _rollouts(self, rows: Sequence[Tensors], completions: Sequence[Any], ids: Sequence[Any]) -> Iterator[Rollout]:
        """Yield the rollouts that TRL generated, from its tensors [T] of each."""
        ends = {*self._trainer.eos_token_ids, self._trainer._tokenizer.pad_token_id}
        for tensors, completion, token_ids in zip(rows, completions, ids, strict=True):
            mask = tensors.get("tool_mask", torch.ones(len(token_ids))).bool().cpu().numpy()
            logp = tensors.get("sampling_per_token_logps", tensors.get("old_per_token_logps"))
            yield Rollout(
                sibling=0,
                prompt_ids=tuple(tensors["prompt_ids"].tolist()),
                token_ids=np.array(token_ids, dtype=np.int64),
                action_mask=mask,
                sampler_logp=np.zeros(len(mask), np.float32) if logp is None else logp.float().cpu().numpy() * mask,
                versions=np.where(mask, self.version, -1).astype(np.int32),
                stop_reason="eos" if token_ids and token_ids[-1] in ends else "length",
                text=completion if isinstance(completion, str) else str(completion[-1].get("content") or ""),
                num_computed_tokens=None,
            )

    def publish(self, rules: Sequence[NamedRule], version: int) -> None:
        """Load weights and gate rules; TRL's own generation shares the model's weights."""
        self.version = version
        if self._engine is not None:
            self._engine.publish(rules, version)

    def make_room(self) -> None:
        if self._engine is not None:
            self._engine.release()

    def close(self) -> None:
        self._jobs = []
        if self._engine is not None:
            self._engine.close()
