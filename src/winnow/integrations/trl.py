"""Winnow's selectors, filters, advantages, ledger and report page inside TRL's `GRPOTrainer`.

    from winnow.integrations.trl import WinnowGRPOTrainer as GRPOTrainer

    GRPOTrainer(..., selector="greso", filter="zero_variance", advantage="rloo").train()

TRL generates, scores and updates as usual. The loop of `winnow train` chooses the prompts to generate, the groups that
enter the batch, and their advantages. A step of Winnow is a generation batch of TRL. Pinned to TRL 1.16, because it
overrides private methods.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ..base.errors import ConfigError
from ..base.machine import install
from ..config.errors import suggestion
from ..config.options import MethodSpec
from ..env.base import Task, has_no_environment
from ..env.private import private
from ..env.rewards.pooled import failing_alone, failures_of
from ..env.rewards.scores import completion_of
from ..run.checkpoint import TRL_STATE
from ..run.inputs import build_task
from ..tasks.agents import AgentTask
from ..types import Fate, Group, Prompt, Rollout
from .trl_batch import logps_by_segment, mask_rows
from .trl_config import run_config
from .trl_data import TrlRows
from .trl_engine import as_rollout_func
from .trl_loop import LoopInTrl

try:
    from datasets import Dataset
    from trl import GRPOTrainer
except ImportError:
    raise ImportError(f"winnow.integrations.trl needs TRL; {install('trl')}") from None

METHODS = frozenset(
    ("selector", "rollout_batch", "group_size", "filter", "gates", "advantage", "step_scale", "audit", "engine")
) | {"max_failed_share", "max_skipped_steps", "success", "resume"}
"""Winnow's own arguments, with values as in its configuration."""


def env_reward(completions: Sequence[Any], env_reward: Sequence[float | None], **columns: Any) -> list[float | None]:
    """Reward function that returns the last reward of each rollout's environment; None if it gave none."""
    return list(env_reward)


def _require_env_reward(task: Task, reward_funcs: Any, eval_dataset: Any) -> None:
    given = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    if getattr(task, "rewards_itself", False) and env_reward not in given:
        raise ConfigError(f"reward_funcs: the environments of {task.name} give a reward that is lost; add env_reward")
    if env_reward in given and eval_dataset is not None:
        raise ConfigError("eval_dataset: TRL evaluates without environments, which give env_reward; leave it out")
    own: Sequence[Any] = () if isinstance(task, AgentTask) else task.reward_funcs  # an agent may give a reward, too
    alone = len(given) == 1 and getattr(task, "needs_reward_funcs", False)
    if env_reward in given and (own or has_no_environment(task) or alone):
        raise ConfigError(
            f"reward_funcs: env_reward, but environments of {task.name} give no reward; "
            + ("leave reward_funcs out for the task's own" if own else "use functions of your own, or add one")
        )


def _row_of(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as a row of TRL: its columns of any type, and the prompt itself."""
    return {**prompt.columns, "prompt": prompt.text if prompt.messages is None else list(prompt.messages)}


def _completion(prompt: Prompt, rollout: Rollout) -> Any:
    """Return a rollout of several turns or segments without the environment's words among the model's; else None."""
    several = len(rollout.turns) > 1 or rollout.later_segments
    return completion_of(prompt, rollout) if several else None


class WinnowGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with Winnow's methods; all other arguments are TRL's.

    - `selector`, `rollout_batch`, `group_size`, `filter`, `gates`, `advantage`, `step_scale`, `audit`: as in Winnow's
      configuration, names or `{name: ..., options}`. Without `advantage` TRL's own advantages are kept.
    - `success`: what counts as right. `max_failed_share`, `max_skipped_steps`: when the run ends; without them it
      continues as TRL does. `resume="strict"`: refuse a resume with rewards, tools or callbacks that have changed.
    - `engine`: Winnow's `local` or `vllm` generates instead of TRL, as gates and environments require.
    - `env`: a Winnow task instead of `train_dataset`, with its environments and reward functions; where environments
      give the reward, add `env_reward`.

    Ledger and report data are in `output_dir/winnow`: `winnow report OUT/winnow`, `winnow verify OUT/winnow`.
    `train_dataset` is read to its end. Winnow's selector replaces the order by which TRL counts epochs, so set
    `max_steps`. Raises ConfigError for what cannot work inside TRL, with the reason.
    """

    def __init__(
        self,
        *args: Any,
        env: MethodSpec | Task | None = None,
        **kwargs: Any,
    ) -> None:
        unknown = set(kwargs) - METHODS - set(inspect.signature(GRPOTrainer.__init__).parameters)
        if unknown:
            name = min(unknown)
            raise ConfigError(f"WinnowGRPOTrainer: no argument '{name}'.{suggestion(name, sorted(METHODS))}")
        methods = {name: kwargs.pop(name, None) for name in METHODS}
        kwargs = inspect.signature(GRPOTrainer.__init__).bind_partial(self, *args, **kwargs).arguments
        del kwargs["self"]
        given = None if env is None else build_task(env)
        if given is not None:
            if kwargs.get("train_dataset") is not None:
                raise ConfigError("train_dataset: env brings its own prompts; give one of the two")
            kwargs["train_dataset"] = Dataset.from_list([{"prompt": _row_of(p)["prompt"]} for p in given.train])
            if kwargs.get("reward_funcs") is None and given.reward_funcs:
                if isinstance(given, AgentTask):  # its reward would be lost
                    raise ConfigError("reward_funcs: give env_reward if the agent gives the reward, else functions")
                kwargs["reward_funcs"] = list(given.reward_funcs)
            _require_env_reward(given, kwargs.get("reward_funcs"), kwargs.get("eval_dataset"))
        kwargs["reward_funcs"] = failing_alone(kwargs.get("reward_funcs"))
        super().__init__(**kwargs)
        if methods["gates"] or given is not None:
            methods["engine"] = methods["engine"] or "local"
        rows = cast(Iterable[Any], self.train_dataset)
        task = given or cast(Task, TrlRows(rows, environments=self.environment_factories is not None))
        methods["env"] = task.name
        c = run_config(self, methods, len(task.train))
        own_advantages = methods["advantage"] is not None
        self._winnow = LoopInTrl(self, c, task, self._rolled_out, own_advantages=own_advantages)
        self.add_callback(self._winnow.scaling)
        self._task = task
        self._scored: tuple[Any, ...] = ()
        self._sampled: list[Rollout] | None = None
        """Rollouts of Winnow's engine, while TRL scores them."""
        self._completions: list[Any] = []
        """What reward functions read of these; None: what TRL makes of all tokens."""
        self._training_on: dict[str, Any] | None = None
        """Tensors of the micro-batch whose loss is computed."""
        self._rows: Sequence[Rollout | None] = ()
        """Rollouts of the rows whose log-probabilities TRL computes; none where TRL sampled them."""

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        self._winnow.require_a_batch()
        if not resume_from_checkpoint:
            self._winnow.require_new()
        self._step, self._buffered_inputs = 0, None  # of an earlier call
        try:
            result = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            self._winnow.finish()
        finally:
            self._winnow.close()
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not cast(Any, self.model).training:
            return cast(dict[str, Any], super()._generate_and_score_completions(inputs))
        return self._winnow.batch()

    def _row(self, prompt: Prompt) -> dict[str, Any]:
        """Return the row of TRL that a prompt was made of."""
        if not isinstance(self._task, TrlRows):
            return _row_of(prompt)
        return self._task.row(prompt.ordinal)

    def _rolled_out(
        self, prompts: list[Prompt], size: int, sampled: list[Group] | None
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Return TRL's tensors of these prompts, `size` rollouts each, and rewards [B, F], completions and their ids.

        `sampled`: groups of Winnow's engine; None: TRL generates.
        """
        rows = [
            {name: private(value) for name, value in row.items()}
            for row in map(self._row, prompts)
            for _ in range(size)
        ]
        usual = self.num_generations, self.rollout_func, self.mask_truncated_completions
        self.num_generations = size
        if sampled is not None:
            self._sampled = [rollout for group in sampled for rollout in group.rollouts]
            self._completions = [_completion(group.prompt, rollout) for group in sampled for rollout in group.rollouts]
            self.rollout_func = as_rollout_func(self._sampled, self._tokenizer.pad_token_id)
            self.mask_truncated_completions = False  # TRL judges by the last token, and a limit on turns has no token
        try:
            with self._of_rollouts(self._sampled or ()), self._corrected(self._winnow.corrects):
                output = super()._generate_and_score_completions(rows)
            if self._sampled is not None:
                truncated = np.array([rollout.truncated for rollout in self._sampled])
                self._metrics["train"]["completions/clipped_ratio"][-1] = float(truncated.mean())
                if usual[-1]:
                    mask_rows(output, truncated)
        finally:
            self.num_generations, self.rollout_func, self.mask_truncated_completions = usual
            self._sampled = None
        return output, self._scored

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """Return rewards [B, F]: scores of rollouts without a fate, NaN for the rest, which TRL treats as absent."""
        given = inputs, prompts, completions, completion_ids_list
        if self._sampled is None:
            rewards: torch.Tensor = super()._calculate_rewards(*given)
            failed = failures_of(self.reward_funcs)
            if 1 < len(failed) == len(prompts) and not self.state.global_step:
                raise RuntimeError(failed[0])  # not because of one completion, and nothing is lost
            for row, reason in failed.items():
                rewards[row] = torch.nan
                warnings.warn(f"{reason}; this completion has no reward", stacklevel=2)
        else:
            left = [i for i, rollout in enumerate(self._sampled) if rollout.fate is None]
            pairs = zip(self._completions, completions, strict=True)
            completions = [theirs if own is None else own for own, theirs in pairs]
            given = inputs, prompts, completions, completion_ids_list
            rewards = torch.full((len(prompts), len(self.reward_funcs)), torch.nan, device=self.accelerator.device)
            if left:
                rewards[left] = super()._calculate_rewards(*([values[i] for i in left] for values in given))
                for row, reason in failures_of(self.reward_funcs).items():
                    rewards[left[row]] = torch.nan
                    rollout = self._sampled[left[row]]
                    rollout.fate, rollout.reason = Fate.FAILED, reason
            for column, values in self._pending_extra_logs.items():  # a table of all completions
                by_row = dict(zip(left, values, strict=False))
                self._pending_extra_logs[column] = [by_row.get(i) for i in range(len(prompts))]
        self._scored = rewards, completions, completion_ids_list
        return rewards

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._training_on = inputs if model.training else None
        if model.training:
            self._winnow.trained(inputs)
        try:
            rollouts: Sequence[Rollout | None] = self._winnow.rollouts(inputs) if model.training else ()
            with self._of_rollouts(rollouts), self._corrected(self._winnow.corrects and model.training):
                return cast(torch.Tensor, super()._compute_loss(model, inputs))
        finally:
            self._training_on = None

    @contextmanager
    def _of_rollouts(self, rollouts: Sequence[Rollout | None]) -> Iterator[None]:
        """Name the rollouts of the rows whose log-probabilities TRL computes inside."""
        before, self._rows = self._rows, rollouts
        try:
            yield
        finally:
            self._rows = before

    @contextmanager
    def _corrected(self, applies: bool) -> Iterator[None]:
        """Let TRL correct for Winnow's engine with the keys, and under the metrics, of its correction for vLLM."""
        usual = self.use_vllm
        if applies:
            self.use_vllm, self._last_loaded_step = True, self.state.global_step  # it has no vLLM to load weights into
        try:
            yield
        finally:
            self.use_vllm = usual

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        usual = super()._get_per_token_logps_and_entropies
        if any(rollout is not None and rollout.later_segments for rollout in self._rows):
            found = logps_by_segment(
                lambda *rows: usual(model, *rows, *args, **kwargs),
                input_ids,
                attention_mask,
                logits_to_keep,
                self._rows,
            )
        else:
            found = usual(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if self._training_on is not None:
            self._winnow.scaling.saw(found[0], self._training_on)
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)  # adds TRL's own metrics
        self._winnow.logged(logs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._winnow.save(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")
        super()._save_checkpoint(model, trial)  # uploads it, and deletes older ones

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._winnow.load_state_dict(Path(checkpoint) / TRL_STATE)
