"""Settings that contradict each other or have no effect, as far as the configuration and its options show."""

from __future__ import annotations

from typing import Any

from ..base.errors import ConfigError
from ..config import CLIPPING, RunConfig
from ..config.options import name_of
from ..engine.lora import TRAINED, Adapter
from ..methods.advantage import InUpdate
from ..methods.correct import OverBatch
from ..methods.policy_loss import Clip
from ..sampler.base import PoolOptions
from .resolved import AUTO, Options, loss_config

PLAINLY = frozenset({"r", "lora_alpha", "lora_dropout", "target_modules"})
"""Adapter settings that an engine applies by itself."""


def require_sync(c: RunConfig, options: Options, device: str) -> None:
    """Raise ConfigError where options of `sync` or `reuse` do nothing, contradict others, or cannot work on this
    machine."""
    carried = options.rollout_batch.carry
    if options.asynchronous and c.changed(("rollout_batch",)):
        sync = name_of(c.sync) if options.own_engines else "lag: continuous"
        raise ConfigError(
            f"rollout_batch: has no effect with sync: {sync}, which starts groups as soon as they can "
            "still be trained within max_lag; remove it"
        )
    lags = c.max_lag > carried or options.overlap or options.own_engines  # what is carried waits for a step
    if not lags and c.changed(("sync",)):
        raise ConfigError("sync: options of in_process have no effect without a lag (max_lag); remove them")
    if isinstance(options.sync, PoolOptions) and options.sync.timeout_s <= c.reward_timeout_s:
        raise ConfigError(
            f"sync: timeout_s={options.sync.timeout_s:g} must be above reward_timeout_s={c.reward_timeout_s:g}, or a "
            "sampler that waits for a reward counts as stuck; raise it"
        )
    mode = "overlap" if options.overlap else "lag: continuous" if options.continuous else ""
    later = options.continuous or carried
    if options.overlap and c.max_lag < 1 + later:
        raise ConfigError(
            "sync: overlap: groups are trained one step after they were sampled, and a surplus that is carried, or "
            f"what goes on across an update, one later; allow it with max_lag: {1 + later}"
        )
    tried, of_both = "it has not been tried there", "PyTorch would set it for generation, too"
    for key, value, fits, why in (
        ("device", device, device == "cpu", tried),
        ("engine", name_of(c.engine), name_of(c.engine) in ("local", AUTO), tried),
        ("learner", name_of(c.learner), not options.learns_elsewhere, tried),
        ("matmul_precision", c.matmul_precision, c.matmul_precision == "highest" or not options.overlap, of_both),
    ):
        if mode and not fits:
            raise ConfigError(f"sync: {mode}: not with {key}: {value}, as {why}; change it, or use sync: processes")
    if c.reuse is not None and c.prompts_per_step == 1:
        raise ConfigError(
            "reuse: has no effect with prompts_per_step: 1, as one group of a batch is new; raise prompts_per_step, or "
            "remove reuse"
        )
    exact = getattr(options.sync, "lag", None) == "exact" and not carried
    if c.reuse is not None and exact and c.reuse.max_age <= c.max_lag:
        raise ConfigError(
            f"reuse: max_age: {c.reuse.max_age} must be above max_lag: {c.max_lag}, the age at which every group is "
            "trained first here"
        )


def require_adapters(c: RunConfig, options: Options, engine: Any, adapter: Adapter | None) -> None:
    """Raise ConfigError when adapters are published alone to an engine that cannot apply them.

    `engine`: its options. `adapter`: one that is trained further.
    """
    if c.adapters_alone is None:
        return
    if "adapters" not in getattr(engine, "provides", ()):
        taker, other = f"engine: {name_of(c.engine)}", ", or engine: vllm"
        if options.engine_of(0) is not None:
            taker, other = f"sync: {name_of(c.sync)}", ""
        raise ConfigError(
            f"lora: merge: false publishes adapters alone, and {taker} takes whole weights; set lora.merge: true{other}"
        )
    special = sorted(key for key in TRAINED - PLAINLY if adapter is not None and adapter.settings.get(key))
    if special:
        raise ConfigError(
            f"lora: merge: false publishes adapters alone, and this one has {special[0]} (adapter_config.json), which "
            "the engine would not apply; set lora.merge: true"
        )


def require_loss(c: RunConfig, options: Options) -> None:
    """Raise ConfigError where a setting of the loss does nothing, or tokens of older policies are not corrected for."""
    _require_teacher(c, options)
    loss = loss_config(c, options)
    (loss_name,), (correction_name,) = options.names["policy_loss"], options.names["correction"]
    limits = c.changed(CLIPPING) or ("" if loss.policy_loss == Clip() else f"policy_loss: {loss_name}")
    if loss.ratio_to_learner and c.num_iterations == 1 and limits:
        raise ConfigError(
            f"{limits} has no effect with correction: {correction_name} and num_iterations: 1, as only the "
            "change since the first iteration is in its ratio; remove it, or use correction: none, or more iterations"
        )
    stale = c.changed(("max_lag", "num_iterations")) or ("reuse:" if c.reuse is not None else "")
    if stale and not loss.policy_loss.has_ratio and not loss.correction.active:
        raise ConfigError(
            f"{stale} trains on tokens of older policies, and policy_loss: {loss_name} does not correct "
            "for it; set correction: truncate, or policy_loss: clip"
        )


def _require_teacher(c: RunConfig, options: Options) -> None:
    """Raise ConfigError where a setting contradicts advantages of single tokens, or whole distributions."""
    if c.teacher is None:
        return
    (advantage,), (correction,) = options.methods["advantage"], options.methods["correction"]
    names = options.names
    if isinstance(advantage, InUpdate):
        raise ConfigError(
            f"teacher: gives advantages of tokens, and advantage: {names['advantage'][0]} finds a baseline of whole "
            "rollouts in the update; choose another advantage, e.g. rloo"
        )
    if isinstance(correction, OverBatch) or getattr(correction, "only_negative", False):
        raise ConfigError(
            f"teacher: gives advantages of tokens, and correction: {names['correction'][0]} uses the sign of the "
            "rollout's; choose another, e.g. truncate"
        )
    loss = loss_config(c, options).policy_loss
    if isinstance(loss, Clip) and loss.importance_sampling_level == "sequence":
        raise ConfigError(
            "teacher: gives advantages of tokens, and importance_sampling_level: sequence averages them over a "
            "rollout; use policy_loss: gspo_token"
        )
    if cut := c.changed(("top_p", "top_k", "min_p", "repetition_penalty")):
        raise ConfigError(f"teacher: is compared with the policy's whole distribution, and {cut} changes it; remove it")
    if c.teacher.url is not None and (other := c.changed(("temperature",))):
        raise ConfigError(f"teacher: url: the server's log-probabilities are those at temperature 1, not {other}")
    if not c.teacher.adapter and (c.lora is None or c.lora.resume):
        raise ConfigError("teacher: adapter: false needs lora with a fresh adapter; give the teacher as model")
