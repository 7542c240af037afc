"""Winnow's configuration of a run inside TRL, and checks for what cannot work there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..base.errors import ConfigError
from ..config import RunConfig, validate
from ..config.options import UNLIMITED, MethodSpec, method, name_of
from ..env.base import Task
from ..env.rewards.pending import numbered
from ..env.workers.functions import compares_siblings
from ..methods.advantage import ADVANTAGES, InUpdate
from ..run.build_methods import Methods, build_methods, build_success
from ..run.checkpoint import TRL_FOLDER
from ..run.preflight import require_whole_groups
from ..run.resolved import AUTO, Options
from .trl_engine import TrlModel, with_precision

SCALES: dict[str, MethodSpec] = {
    "group": {"name": "grpo", "ddof": 1, "eps": 1e-4},
    "none": "dr_grpo",
    "batch": "dr_grpo",
}
"""TRL's `scale_rewards` -> the advantage that judges groups if TRL's own advantages are kept."""
ENDLESS = 10**9
"""More steps than any run takes."""
FEWEST_REJECTED = 320
"""Groups in a row without a signal that end a run: 10 rounds of 32, as by the defaults of `winnow train`."""


def run_config(trainer: Any, methods: Mapping[str, Any], prompts: int) -> RunConfig:
    """Return Winnow's configuration of a run inside TRL on this many prompts.

    Raises ConfigError for what cannot work there, with the reason.
    """
    args = trainer.args
    if trainer.accelerator.num_processes > 1:
        raise ConfigError(
            f"{trainer.accelerator.num_processes} processes: inside TRL Winnow chooses prompts in one; use one GPU, or "
            "`winnow train` with learner: fsdp"
        )
    for name in ("engine", "advantage"):
        if not isinstance(methods[name], str | Mapping | None):
            raise ConfigError(f"{name}: expected a name or {{name: ..., options}}, not {methods[name]!r}")
    advantage = methods["advantage"] or SCALES.get(args.scale_rewards, "grpo")  # TRL refuses others
    given = {k: v for k, v in methods.items() if v is not None}
    if "engine" in given:
        if name_of(given["engine"]) == AUTO:
            given["engine"] = "local"  # TRL's own vLLM is selected by use_vllm
        given["engine"] = with_precision(given["engine"], TrlModel(trainer).precision)
    if isinstance(method(ADVANTAGES, advantage, "advantage"), InUpdate):
        given["policy_loss"] = "plain"  # as TRL's loss in the first update on a batch
    if not args.shuffle_dataset:
        given.setdefault("selector", "ordered")
    c = validate(
        given
        | {
            "advantage": advantage,
            "model": str(getattr(trainer.model.config, "name_or_path", "") or "given object"),
            "output_dir": f"{args.output_dir}/{TRL_FOLDER}",
            "seed": args.seed,
            "max_steps": max(1, args.max_steps),
            "prompts_per_step": args.generation_batch_size // trainer.num_generations,
            "num_generations": trainer.num_generations,
            "max_completion_length": trainer.max_completion_length,
            "max_prompt_length": UNLIMITED,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": max(args.top_k or 0, 0),
            "min_p": args.min_p or 0.0,
            "mask_truncated_completions": trainer.mask_truncated_completions,
            "beta": args.beta,
            "entropy_coef": max(args.entropy_coef, 0.0),
            "learning_rate": args.learning_rate,
        },
        "WinnowGRPOTrainer",
    )
    if "max_skipped_steps" in given:
        return c
    steps = ENDLESS  # TRL itself continues, with or without signal
    if c.changed(("filter", "gates")) or "engine" in given:
        steps = max(c.max_skipped_steps, math.ceil(prompts / c.prompts_per_step))
    return c.model_copy(update={"max_skipped_steps": steps})


def methods_of(trainer: Any, c: RunConfig, task: Task, *, by_engine: bool, own_advantages: bool) -> Methods:
    """Build the methods of a run inside TRL. Raises ConfigError for those that cannot work there, with the reason.

    `own_advantages`: Winnow's instead of TRL's.
    """
    names = numbered(trainer.reward_func_names)
    options = Options.from_config(c)
    success = build_success(c, task, {name: name for name in names}, trainer.args.reward_weights)
    m = build_methods(c, options, task.train, success)
    marks = {name: _mark(function) for name, function in zip(names, trainer.reward_funcs, strict=True)}
    require_whole_groups(m, marks)
    for reason in (*_reasons(trainer, c, options, m, by_engine), *_of_own_advantages(trainer, c, m, own_advantages)):
        raise ConfigError(reason)
    return m


def _mark(function: Any) -> bool | None:
    return False if isinstance(function, torch.nn.Module) else compares_siblings(function)


def _reasons(trainer: Any, c: RunConfig, options: Options, m: Methods, by_engine: bool) -> Iterator[str]:
    """Yield why these methods cannot work inside TRL."""
    advantage, args = m.advantage, trainer.args
    several = trainer.num_iterations > 1 or args.steps_per_generation > args.gradient_accumulation_steps
    if isinstance(advantage, InUpdate):
        if advantage.weighing == "energy":
            yield "advantage: its baseline needs all tokens' probabilities, which TRL's forward pass does not return"
        if args.off_policy_mask_threshold is not None:
            yield "advantage: off_policy_mask_threshold uses a sign that its baseline decides; remove one of them"
        if trainer._entropy_bonus_enabled:
            yield "entropy_coef: the baseline of this advantage has no entropy term; leave out use_adaptive_entropy"
        if trainer.top_entropy_quantile < 1:
            yield "advantage: its baseline ignores top_entropy_quantile; remove one of them"
        if args.fp16:
            yield "fp16: norms of gradients have no loss scale, so float16 rounds them to 0; use bf16"
        if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            yield "gradient_checkpointing_kwargs: use_reentrant gives no gradient of a single rollout; set it to False"
        if several:
            yield (
                f"advantage: {name_of(c.advantage)} computes its baseline once per generation batch, with the policy "
                "at that time; set num_iterations=1 and steps_per_generation=gradient_accumulation_steps"
            )
    scales = name_of(c.step_scale) != "none"
    if scales and not (several or args.use_vllm or by_engine):
        yield (
            "step_scale: has no effect here, as TRL samples with the model that it updates once; remove it, or use "
            "vLLM, engine='local' or num_iterations above 1"
        )
    if scales and (c.top_p < 1 or c.top_k or c.min_p):
        yield "step_scale: TRL's log-probabilities apply temperature only; leave out top_p, top_k, min_p"
    if advantage.greedy_baseline:
        yield "advantage: needs a greedy rollout per group, but TRL samples all alike; choose another"
    if trainer.loss_type == "bnpo" and (c.gates or not (m.filter.admits_all or m.filter.refill)):
        yield (
            "loss_type: bnpo weighs micro-batches alike, but gates and refill: false make their row counts differ; use "
            "dapo"
        )
    if getattr(options.methods["selector"][0], "refresh_steps", None):
        yield (
            "selector: refresh_steps rolls out all prompts now and then, which TRL cannot do; make a profile with "
            "`winnow pass-rates` and give profile"
        )
    if m.group_size.largest != m.group_size.smallest and args.use_vllm and not by_engine:
        yield "group_size: TRL's vLLM is built for num_generations; use engine='vllm', or group_size: fixed"


def _of_own_advantages(trainer: Any, c: RunConfig, m: Methods, own_advantages: bool) -> Iterator[str]:
    """Yield why these methods do not fit TRL's advantages of several rewards, or of a whole batch."""
    if m.group_size.in_parts and not own_advantages:
        yield "group_size: TRL would compute advantages of each part of a group apart; set an advantage, e.g. 'grpo'"
    if own_advantages and trainer.scale_rewards != "group":
        yield f"scale_rewards: {trainer.scale_rewards} has no effect with an advantage of Winnow; remove one"
    if trainer.multi_objective_aggregation != "sum_then_normalize":
        if own_advantages:
            yield "multi_objective_aggregation: Winnow's advantages use the weighted sum of the rewards; remove one"
        judges = not m.filter.admits_all or c.gates or m.group_size.largest != m.group_size.smallest
        if judges or getattr(m.selector, "skips", True):
            yield (
                "multi_objective_aggregation: normalize_then_sum finds a signal in groups whose weighted sums are "
                "equal, but filters, selectors and gates skip them; use sum_then_normalize, or remove these"
            )
    elif trainer.scale_rewards == "batch" and m.filter.refill and not own_advantages:
        yield (
            "scale_rewards: batch would divide each round of a refill by the deviation of that round; set refill: "
            "false, or an advantage of Winnow, e.g. 'reinforce_pp' without filter"
        )
    elif trainer.scale_rewards == "batch" and m.group_size.largest != m.group_size.smallest and not own_advantages:
        yield (
            "scale_rewards: batch would divide groups of each size by the deviation of those alone; use group_size: "
            "fixed, or leave it out"
        )
