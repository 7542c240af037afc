"""TRL's generation and rewards as a sampler of Winnow's loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..methods.gate import NamedRule
from ..sampler.base import JobQueue
from ..types import Fate, Group, Job, Prompt, Rollout
from .trl_batch import Tensors, check_tensors, row_of
from .trl_engine import EngineInTrl

NO_REWARD = "every reward function returned None"
RollOut = Callable[[list[Prompt], int, list[Group] | None], tuple[dict[str, Any], tuple[Any, ...]]]
"""Prompts, rollouts per prompt, and groups of Winnow's engine, if it samples
-> TRL's tensors of them, and (rewards [B, F], completions, completion ids)."""


class TrlSampler(JobQueue):
    """Rolls out groups with TRL's generation, or with Winnow's engine inside TRL, and TRL's rewards."""

    def __init__(self, trainer: Any, roll_out: RollOut, engine: EngineInTrl | None) -> None:
        super().__init__()
        self._trainer, self._roll_out, self._engine = trainer, roll_out, engine
        self._rows: dict[tuple[int, int], Tensors] = {}
        self.outputs: list[Tensors] = []
        """TRL's tensors of each call since `forget`, unchanged."""
        self.version = 0

    def run(self, jobs: Sequence[Job]) -> list[Group]:
        return [group for part in _of_one_size(jobs) for group in self._finished(part)]

    def _finished(self, jobs: list[Job]) -> list[Group]:
        size = jobs[0].size
        groups = None if self._engine is None else self._engine.run(jobs)
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

    def _reward(self, rollout: Rollout, rewards_F: torch.Tensor) -> None:
        """Set TRL's rewards [F] by function on a rollout without a fate; NaN: the function returned None."""
        t = self._trainer
        rollout.reward = None
        if rollout.fate is not None:
            return
        values = zip(t.reward_func_names, rewards_F.tolist(), strict=True)
        rollout.rewards = {name: value if math.isfinite(value) else None for name, value in values}
        if torch.isnan(rewards_F).all():
            rollout.fate, rollout.reason = Fate.FAILED, NO_REWARD
            return
        reward = float((rewards_F * t.reward_weights.to(rewards_F.device)).nansum())
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
            )

    def publish(self, rules: Sequence[NamedRule], version: int) -> None:
        """Load weights and gate rules; TRL's own generation shares the model's weights."""
        self.version = version
        if self._engine is not None:
            self._engine.publish(rules, version)

    def make_room(self) -> None:
        if self._engine is not None:
            self._engine.release()


def _of_one_size(jobs: Sequence[Job]) -> list[list[Job]]:
    """Split jobs by size: TRL generates as many rollouts for each prompt of a call."""
    return [[job for job in jobs if job.size == size] for size in sorted({job.size for job in jobs})]
