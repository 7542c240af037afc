"""Winnow's configuration of a run inside verl, and checks for what cannot work there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..base.errors import ConfigError
from ..config import RunConfig, validate
from ..config.errors import suggestion
from ..config.options import UNLIMITED, method, name_of
from ..methods.advantage import ADVANTAGES
from ..methods.success import Success, default_success
from ..run.resolved import Options

KWARGS = "trainer.v1.sampler.sampler_kwargs"
"""Where verl's configuration has Winnow's settings."""
SETTINGS = ("selector", "audit", "success", "seed", "output_dir", "log_completions", "resume", "report_to")
RELATIVE = frozenset({"grpo_passk", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline"})
"""verl's advantages that are 0 in a group with equal rewards, next to those that Winnow has under the same name."""
NOT_TEACHING = {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False, "distillation.enabled": False}
"""Settings by which groups with equal rewards may teach, each with a value by which they do not."""


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key of verl's configuration; None where a section is missing."""
    for part in key.split("."):
        config = None if config is None else config.get(part)
    return config


def run_config(verl: Any, given: Mapping[str, Any]) -> RunConfig:
    """Return Winnow's configuration of a run inside verl.

    `verl`: verl's whole configuration. `given`: Winnow's settings in it. Raises ConfigError naming the key, its value
    and the remedy.
    """
    for reason in _refused(verl):
        raise ConfigError(reason)
    unknown = sorted(set(given) - set(SETTINGS))
    if unknown:
        raise ConfigError(f"{KWARGS}: no setting '{unknown[0]}'.{suggestion(unknown[0], SETTINGS)}")
    seed = value_at(verl, "data.seed")
    values = {
        "env": "dataset",
        "model": str(value_at(verl, "actor_rollout_ref.model.path")),
        "output_dir": f"{value_at(verl, 'trainer.default_local_dir')}/winnow",
        "prompts_per_step": value_at(verl, "data.train_batch_size"),
        "num_generations": value_at(verl, "actor_rollout_ref.rollout.n"),
        "max_completion_length": value_at(verl, "data.max_response_length"),
        "max_prompt_length": UNLIMITED,
        "temperature": value_at(verl, "actor_rollout_ref.rollout.temperature"),
        "learning_rate": value_at(verl, "actor_rollout_ref.actor.optim.lr"),
    }
    known = {key: value for key, value in values.items() if value is not None}
    c = validate(known | ({} if seed is None else {"seed": seed}) | dict(given), KWARGS)
    _check_selector(c, verl)
    return c


def success_of(c: RunConfig) -> Success:
    """Return what counts as right; a function is a key of the dict that `compute_score` returns."""
    if c.success is None:
        return default_success(["compute_score"], None)
    return Success(c.success.function, c.success.at_least)


def _refused(verl: Any) -> Iterator[str]:
    """Yield what in verl's configuration cannot work, with the remedy."""
    mode = value_at(verl, "trainer.v1.trainer_mode")
    if mode != "sync":
        yield f"trainer.v1.trainer_mode: {mode} leaves groups in flight between steps; Winnow works with sync"
    if not value_at(verl, "data.custom_cls.path"):
        yield (
            "data.custom_cls.path: not set, so verl would choose the prompts; set it to "
            "pkg://winnow.integrations.verl, and data.custom_cls.name to WinnowDataset"
        )
    workers = value_at(verl, "data.dataloader_num_workers")
    if workers != 0:
        yield (
            f"data.dataloader_num_workers: {workers} workers fetch prompts before the last rewards are known; set it "
            "to 0"
        )
    size = value_at(verl, "actor_rollout_ref.rollout.n")
    if not isinstance(size, int) or size < 2:
        yield f"actor_rollout_ref.rollout.n: {size} rollouts are no group to judge a prompt by; set it to 2 or more"
    updates = value_at(verl, "trainer.v1.sync.parameter_sync_step")
    if updates not in (None, 1):
        yield f"trainer.v1.sync.parameter_sync_step: {updates} takes a batch in parts; set it to 1"
    if value_at(verl, "skip.rollout_tq.enable"):
        yield "skip.rollout_tq.enable: replays stored rollouts, not the prompts that Winnow chose; set it to False"
    separate = value_at(verl, "reward.reward_model.enable_resource_pool")
    if value_at(verl, "reward.reward_model.enable") and not separate:
        yield (
            "reward.reward_model.enable: a colocated reward model scores after Winnow has booked the groups; set "
            "reward.reward_model.enable_resource_pool=True, or use a reward function"
        )


def _check_selector(c: RunConfig, verl: Any) -> None:
    """Raise ConfigError for a selector that verl, or what it learns from, cannot have."""
    try:
        selector = Options.from_config(c).methods["selector"][0]
    except ConfigError as error:
        raise ConfigError(f"{KWARGS}: {error}") from None
    if getattr(selector, "refresh_steps", None):
        raise ConfigError(
            f"{KWARGS}: selector: refresh_steps rolls out all prompts periodically, which verl cannot do; make a "
            "profile with `winnow pass-rates` and give profile"
        )
    if not getattr(selector, "wants_signal", False):
        return
    for key, remedy in NOT_TEACHING.items():
        value = value_at(verl, key)
        may_teach = bool(value) if remedy is False else not _is_group_relative(str(value))
        if may_teach:
            raise ConfigError(
                f"{key}: {value} may let groups with equal rewards teach, and selector: {name_of(c.selector)} skips "
                f"them; set {key}={remedy}, or {KWARGS}.selector=uniform"
            )


def _is_group_relative(estimator: str) -> bool:
    """Whether verl's advantage is 0 in a group with equal rewards."""
    name = estimator.removesuffix("_vectorized")
    return name in RELATIVE or (name in ADVANTAGES and bool(method(ADVANTAGES, name, "advantage").group_relative))
