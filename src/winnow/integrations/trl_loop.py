"""Winnow's loop over TRL's generation: which rows TRL is given to roll out, and which enter its batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import pad

from ..base.files import write_json
from ..base.weights import StateWeights
from ..config import ConfigError, RunConfig, validate
from ..env.base import Task
from ..env.dataset import DatasetConfig, DatasetTask
from ..loop import Batch, Hooks, Limits, Loop, Parts, RunStoppedError
from ..methods.advantage import InUpdate
from ..record.ledger import Ledger
from ..record.records import CONFIG, LEDGER, Records, RunDirectoryError
from ..run.build import Methods, build_methods
from ..run.preflight import refuse_used_directory
from ..sampler.buffer import Buffer
from ..sampler.codec import prompts_of
from ..sampler.pace import InTurn
from ..types import Fate, Group, Job, Rollout

RollOut = Callable[[list[dict[str, Any]]], tuple[dict[str, Any], tuple[Any, ...]]]
"""Rows of the data set, one a rollout -> TRL's tensors of them, and (rewards [B, F], completions, completion ids)."""
PADDED_LEFT, PADDED_RIGHT = ("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask", "tool_mask")
BY_TOKEN = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
LOSSES = ("dapo", "grpo", "dr_grpo")
"""TRL's losses whose mean over fewer rows is known."""
SCALES = {"group": "grpo", "none": "dr_grpo", True: "grpo", False: "dr_grpo"}
"""TRL's `scale_rewards` -> the advantage that tells which groups teach; TRL's own are kept."""


def run_config(trainer: Any, methods: Mapping[str, Any]) -> RunConfig:
    """Winnow's configuration of a run inside TRL. Raises ConfigError for what cannot work there, with the reason."""
    args = trainer.args
    if trainer.accelerator.num_processes > 1:
        raise ConfigError(
            f"{trainer.accelerator.num_processes} processes: inside TRL Winnow chooses prompts in one; use one GPU, or "
            "`winnow train` with learner: fsdp"
        )
    advantage = methods["advantage"] or SCALES.get(args.scale_rewards)
    if advantage is None:
        raise ConfigError(
            f"scale_rewards: {args.scale_rewards} has no name here; give WinnowGRPOTrainer(advantage=...), e.g. "
            "'reinforce_pp', which normalises over the batch"
        )
    every = args.steps_per_generation * trainer.num_iterations
    if args.save_strategy == "steps" and args.save_steps % every:
        raise ConfigError(
            f"save_steps: {args.save_steps} would save amid a generation batch, which a resume begins anew; save every "
            f"{every} steps (steps_per_generation * num_iterations), or a multiple"
        )
    if trainer.args.multi_objective_aggregation != "sum_then_normalize":
        raise ConfigError("multi_objective_aggregation: Winnow's advantages are of the weighted sum of the rewards")
    return validate(
        {k: v for k, v in methods.items() if v is not None}
        | {
            "advantage": advantage,
            "model": str(getattr(trainer.model.config, "name_or_path", "") or "given object"),
            "env": "dataset",
            "output_dir": f"{args.output_dir}/winnow",
            "seed": args.seed,
            "max_steps": max(1, args.max_steps),
            "prompts_per_step": args.generation_batch_size // trainer.num_generations,
            "num_generations": trainer.num_generations,
            "max_completion_length": trainer.max_completion_length,
            "temperature": args.temperature,
            "learning_rate": args.learning_rate,
        },
        "WinnowGRPOTrainer",
    )


def _methods(c: RunConfig, task: DatasetTask, loss_type: str) -> Methods:
    m = build_methods(c, task.train)
    if isinstance(m.advantage, InUpdate):
        raise ConfigError("advantage: its baseline is found in the update, which is TRL's here; use `winnow train`")
    if m.advantage.greedy_baseline:
        raise ConfigError("advantage: it needs a greedy rollout beside each group, and TRL samples all alike")
    if getattr(getattr(m.selector, "options", None), "refresh_steps", None):
        raise ConfigError(
            "selector: refresh_steps asks for profiles of all prompts, which are not made inside TRL; leave it out"
        )
    if not getattr(m.filter, "refill", True) and loss_type not in LOSSES:
        raise ConfigError(f"filter: refill: false leaves rows out, and loss_type: {loss_type} counts them all the same")
    return m


class LoopInTrl:
    """Winnow's loop, with TRL as its sampler and learner. Its files are in `run_dir`."""

    def __init__(self, trainer: Any, c: RunConfig, roll_out: RollOut, *, own_advantages: bool) -> None:
        self.config = c
        self._own_advantages = own_advantages
        self.run_dir = Path(c.output_dir)
        self._trainer = trainer
        self._task = DatasetConfig(path="train_dataset").with_rows(trainer.train_dataset)
        self._sampler = _Sampler(trainer, roll_out)
        self._methods = _methods(c, self._task, trainer.loss_type)
        self._loop: Loop | None = None
        self._resumed: dict[str, Any] | None = None
        self._batch: Batch | None = None
        self._logs: dict[str, float] = {}

    def batch(self) -> dict[str, Any]:
        """TRL's tensors of the next generation batch. Raises RunStoppedError when none can be had any more.

        What was collected before the loop gave up is still trained on; the call after it raises.
        """
        self._complete()
        loop = self._loop or self._begin()
        if loop.stop is None:
            self._batch = loop.collect()
        if self._batch is None or (loop.stop is not None and not self._batch.groups):
            self._batch = None
            raise cast(RunStoppedError, loop.stop)
        return self._tensors(self._batch)

    def logged(self, logs: Mapping[str, float]) -> None:
        """What TRL says of its optimizer steps."""
        if "loss" in logs:  # else an evaluation or the end of training
            self._logs = {key: float(logs[key]) for key in ("loss", "grad_norm", "entropy", "kl") if key in logs}

    def finish(self) -> None:
        """At the end of training: the last batch was trained, and the account is closed."""
        self._complete()
        if self._loop is not None:
            self._loop.close()
            self._loop.parts.ledger.set_meta("finished", "true")

    def close(self) -> None:
        if self._loop is not None:
            self._records.close()
            self._loop.parts.ledger.close()
            self._loop, self._batch = None, None

    def state_dict(self) -> dict[str, Any]:
        """The state of the loop, its configuration and task, and how far records and ledger were written."""
        self._complete()
        assert self._loop is not None
        return {
            "loop": self._loop.state_dict(),
            "config": self.config.model_dump(mode="json"),
            "task": self._task.fingerprint(),
            "offsets": self._records.offsets(),
            "ledger": self._loop.parts.ledger.mark(),
        }

    def load_state_dict(self, path: Path) -> None:
        """Raises RunDirectoryError when the checkpoint is not of this data and these methods."""
        if not path.is_file():
            raise RunDirectoryError(f"{path}: missing; this checkpoint was not saved by WinnowGRPOTrainer")
        state = json.loads(path.read_text(encoding="utf-8"))
        now = self.config.model_dump(mode="json")
        changed = [k for k, v in state["config"].items() if now.get(k) != v and k not in ("max_steps", "output_dir")]
        if changed or state["task"] != self._task.fingerprint():
            what = ", ".join(changed) or "train_dataset"
            raise RunDirectoryError(f"{path}: saved with other {what}; go on with the same, or start a new run")
        self._resumed = state

    def _begin(self) -> Loop:
        c, m, state = self.config, self._methods, self._resumed
        if state is None:
            refuse_used_directory(self.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_json(self.run_dir / CONFIG, c.model_dump(mode="json"))
        ledger = Ledger.open(self.run_dir / LEDGER)
        ledger.judge = m.judge
        if state is not None:
            ledger.rollback(state["ledger"], reason=f"resumed from step {state['loop']['step']}")
        else:
            ledger.set_meta("max_lag", "0")
            ledger.set_meta("max_reward", str(c.success_reward))
            ledger.set_meta("finished", "false")
        self._records = Records(self.run_dir, c, (state or {}).get("offsets"))
        buffer = Buffer(c.prompts_per_step, 0)
        parts = Parts(
            prompts=prompts_of(cast(Task, self._task)),
            sampler=self._sampler,
            learner=cast(Any, SimpleNamespace(weights=lambda: StateWeights({}), metrics=dict)),
            selector=m.selector,
            group_size=m.group_size,
            filter=m.filter,
            optimizer_step=cast(Any, SimpleNamespace(scale=m.step_scale)),
            buffer=buffer,
            pace=InTurn(buffer, self._sampler, m.rollout_batch),
            refill_round=max(m.rollout_batch.size, c.prompts_per_step),
            ledger=ledger,
        )
        hooks = Hooks(
            published=lambda step: None,
            evaluate=lambda step: None,
            profile=lambda step: None,
            record=self._record,
            save=lambda step, force: None,
            should_stop=lambda: False,
        )
        self._loop = Loop(parts, hooks, Limits(10**9, c.max_failed_share, c.max_skipped_steps), m.judge)
        if state is not None:
            self._loop.load_state_dict(state["loop"])
        self._sampler.version = self._loop.step
        return self._loop

    def _record(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        self._records.metrics(metrics)
        self._records.samples(step, groups, "train")

    def _complete(self) -> None:
        """The batch before, which TRL has trained on by now."""
        if self._loop is not None and self._batch is not None:
            batch, self._batch = self._batch, None
            self._loop.complete(batch, self._logs | {"updated": float(bool(batch.groups))})
            self._sampler.forget()

    def _tensors(self, batch: Batch) -> dict[str, Any]:
        """The rows of the batch with their advantages; places that stay empty are taken by a row without a token."""
        wanted = self.config.prompts_per_step * self.config.num_generations
        rows = [self._sampler.row(group, rollout) for group in batch.groups for rollout in group.rollouts]
        left, advantages = len(rows), [float(row["advantages"]) for row in rows]
        if self._own_advantages:
            of_groups = self._methods.advantage.of_batch(batch.groups)
            advantages = [a for group in of_groups for a in np.nan_to_num(group).tolist()]  # without a reward: 0
        group = (batch.groups or batch.finished)[0]
        rows += [self._sampler.row(group, group.rollouts[0])] * (wanted - left)
        of_rows = self._trainer.loss_type != "dapo"  # these losses are means over rows, empty or not
        more = wanted / left if left and of_rows else 1.0
        merged = _merged(rows, self._trainer._tokenizer.pad_token_id)
        merged["completion_mask"][left:] = 0
        device = merged["completion_mask"].device
        merged["advantages"] = torch.tensor([more * a for a in advantages] + [0.0] * (wanted - left), device=device)
        mask = merged["completion_mask"] * merged.get("tool_mask", 1)
        return merged | {"num_items_in_batch": mask.sum()}


class _Sampler:
    """TRL's generation and rewards as a sampler of Winnow's loop, in turn with the learner."""

    nodes: Mapping[str, str] = {}
    dtype = "unknown"

    def __init__(self, trainer: Any, roll_out: RollOut) -> None:
        self._trainer, self._roll_out = trainer, roll_out
        self._jobs: list[Job] = []
        self._rows: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self.version = 0

    @property
    def pending(self) -> int:
        return len(self._jobs)

    def launch(self, job: Job) -> None:
        self._jobs.append(job)

    def poll(self) -> list[Group]:
        jobs, self._jobs = self._jobs, []
        data = self._trainer.train_dataset
        rows = [dict(data[job.visit.prompt.ordinal]) for job in jobs for _ in range(job.size)]
        output, scored = self._roll_out(rows)
        if unknown := set(output) - {*PADDED_LEFT, *PADDED_RIGHT, *BY_TOKEN, "advantages", "num_items_in_batch"}:
            raise ConfigError(f"train_dataset: Winnow inside TRL works on text, and found {', '.join(sorted(unknown))}")
        rollouts = iter(list(self._rollouts(output, *scored)))
        groups = []
        for job in jobs:
            members = [next(rollouts) for _ in range(job.size)]
            for sibling, (rollout, tensors) in enumerate(members):
                rollout.sibling = sibling
                self._rows[job.visit.number, sibling] = tensors
            groups.append(Group(job.visit, [rollout for rollout, _ in members]))
        return groups

    def row(self, group: Group, rollout: Rollout) -> dict[str, torch.Tensor]:
        """TRL's tensors of one rollout, without padding."""
        return self._rows[group.visit.number, rollout.sibling]

    def forget(self) -> None:
        self._rows.clear()

    def _rollouts(
        self, output: dict[str, Any], rewards_BF: torch.Tensor, completions: Sequence[Any], ids: Sequence[Any]
    ) -> Iterator[tuple[Rollout, dict[str, torch.Tensor]]]:
        t = self._trainer
        ends = {*t.eos_token_ids, t._tokenizer.pad_token_id}
        weights_F = t.reward_weights.to(rewards_BF.device)
        for i, (completion, token_ids) in enumerate(zip(completions, ids, strict=True)):
            tensors = _row(output, i, len(token_ids))
            of_functions = rewards_BF[i]
            absent = bool(torch.isnan(of_functions).all())
            named = zip(t.reward_func_names, of_functions.tolist(), strict=True)
            mask = tensors.get("tool_mask", torch.ones(len(token_ids))).bool().cpu().numpy()
            logp = tensors.get("sampling_per_token_logps", tensors.get("old_per_token_logps"))
            found = Rollout(
                sibling=0,
                prompt_ids=tuple(tensors["prompt_ids"].tolist()),
                token_ids=np.array(token_ids, dtype=np.int64),
                action_mask=mask,
                sampler_logp=np.zeros(len(mask), np.float32) if logp is None else logp.float().cpu().numpy() * mask,
                versions=np.where(mask, self.version, -1).astype(np.int32),
                stop_reason="eos" if token_ids and token_ids[-1] in ends else "length",
                text=completion if isinstance(completion, str) else str(completion[-1].get("content") or ""),
                reward=None if absent else float((of_functions * weights_F).nansum()),
                rewards={name: None if math.isnan(value) else value for name, value in named},
            )
            if absent:
                found.fate, found.reason = Fate.FAILED, "every reward function returned None"
            yield found, tensors

    def publish(self, weights: Any, rules: Any, version: int) -> None:
        """TRL samples with its model as it is."""
        self.version = version

    def make_room(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def run(self, jobs: Sequence[Job]) -> list[Group]:
        raise NotImplementedError("TRL evaluates by itself")

    def save(self, directory: Path) -> None:
        pass

    def load(self, directory: Path) -> None:
        pass

    def close(self) -> list[Group]:
        return []


def _row(output: Mapping[str, torch.Tensor], i: int, length: int) -> dict[str, torch.Tensor]:
    """Row `i` of TRL's tensors without padding: [prompt length] and [completion `length`]; a ratio may be [1]."""
    prompt = output["prompt_mask"][i].bool()
    row = {key: output[key][i][prompt] for key in PADDED_LEFT} | {"advantages": output["advantages"][i]}
    for key in (*PADDED_RIGHT, *BY_TOKEN):
        if key in output:
            whole = output[key][i]
            row[key] = whole if whole.shape == (1,) else whole[:length]
    return row


def _merged(rows: Sequence[Mapping[str, torch.Tensor]], pad_token: int) -> dict[str, torch.Tensor]:
    """Rows of several generations as one rectangle, padded as TRL pads."""
    merged = {}
    for key in rows[0].keys() - {"advantages"}:
        longest = max(len(row[key]) for row in rows)
        fill = {"prompt_ids": pad_token, "completion_ids": pad_token, "tool_mask": 1}.get(key, 0)
        left = key in PADDED_LEFT
        parts = []
        for row in rows:
            missing = longest - len(row[key])
            parts.append(pad(row[key], (missing, 0) if left else (0, missing), value=fill))
        merged[key] = torch.stack(parts)
    return merged
