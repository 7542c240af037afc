"""Winnow's selectors, filters, advantages, ledger and report page inside TRL's `GRPOTrainer`.

    from winnow.integrations.trl import WinnowGRPOTrainer as GRPOTrainer

    GRPOTrainer(..., selector="greso", filter="zero_variance", advantage="rloo").train()

TRL generates, scores and updates as ever; what it is given to generate, what of it enters the batch and with which
advantages is decided by Winnow's loop, which is the one of `winnow train`. A step of Winnow is a generation batch of
TRL. Pinned to TRL 1.16, whose hooks are private.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from ..base.install import install
from ..config import MethodSpec
from .trl_loop import LoopInTrl, run_config

try:
    from trl import GRPOTrainer
except ImportError:
    raise ImportError(f"winnow.integrations.trl needs TRL; {install('trl')}") from None

STATE = "winnow.json"
"""What a checkpoint of TRL's holds for a resume."""


class WinnowGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with Winnow's methods; all other arguments are TRL's.

    `selector`, `rollout_batch`, `filter`, `advantage`, `audit`: as in Winnow's configuration, names or `{name: ...,
    options}`. Without `advantage` TRL's own advantages are kept. The ledger and the page's data are in
    `output_dir/winnow`: `winnow report OUT/winnow`, `winnow verify OUT/winnow`. `train_dataset` is read to its end; TRL
    counts its epochs by its own order, which Winnow's selector replaces, so `max_steps` says better how long to train.
    Raises ConfigError for what cannot work in here, with the reason.
    """

    def __init__(
        self,
        *args: Any,
        selector: MethodSpec = "uniform",
        rollout_batch: MethodSpec = "exact",
        filter: MethodSpec | list[MethodSpec] = "keep_all",  # as the key is called
        advantage: MethodSpec | None = None,
        audit: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        methods = {"selector": selector, "rollout_batch": rollout_batch, "filter": filter, "audit": audit}
        c = run_config(self, methods | {"advantage": advantage})
        self._winnow = LoopInTrl(self, c, self._rolled_out, own_advantages=advantage is not None)
        self._scored: tuple[Any, ...] = ()

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
            self._winnow.finish()
        finally:
            self._winnow.close()
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not cast(Any, self.model).training:
            return cast(dict[str, Any], super()._generate_and_score_completions(inputs))
        return self._winnow.batch()

    def _rolled_out(self, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """TRL's own tensors of these rows, and rewards [B, F], completions and their ids."""
        output = super()._generate_and_score_completions(rows)
        return output, self._scored

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scored = rewards, completions, completion_ids_list
        return rewards

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self._winnow.logged(logs)
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        directory = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        (directory / STATE).write_text(json.dumps(self._winnow.state_dict()), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._winnow.load_state_dict(Path(checkpoint) / STATE)
