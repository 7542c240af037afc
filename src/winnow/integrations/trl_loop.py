"""Winnow's loop over TRL's generation: which rows TRL rolls out, and which enter its batch."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from transformers.trainer_utils import get_last_checkpoint

from ..base.errors import ConfigError
from ..base.files import private_directory, write_json
from ..base.seconds import now
from ..base.state import at
from ..collect import Batch, Collector, LoopState
from ..config import RunConfig
from ..config.paths import as_saved
from ..env.base import Task
from ..methods.advantage import InUpdate
from ..methods.gate.audit import rules_of
from ..record.records import Records, RunDirectoryError, lock, read_metrics
from ..record.stop_conditions import Limits, RunStoppedError
from ..record.user_code import changes, code_of
from ..run.build_methods import build_collector
from ..run.checkpoint import TRL_STATE, load_state_in_trl, refuse_used_directory, understood
from ..run.resolved import step_options
from ..sampler.codec import prompts_of
from ..types import Fate, Group, Rollout
from .hosted import discard_account, keep_from_uploads, open_account, require_ledger, require_unchanged
from .trl_batch import Tensors, batch_of
from .trl_config import ENDLESS, FEWEST_REJECTED, methods_of
from .trl_engine import NO_REWARD, EngineInTrl, RollOut, TrlSampler
from .trl_update import StepScaling, squared_norms, with_baselines

ROWS = "winnow_rows"
"""Key of a batch's row numbers, which trace TRL's shuffled micro-batches to rollouts."""


class LoopInTrl:
    """Winnow's loop, with TRL as its sampler and learner. Its files are in `run_dir`."""

    def __init__(self, trainer: Any, c: RunConfig, task: Task, roll_out: RollOut, *, own_advantages: bool) -> None:
        self.config = c
        self._own_advantages = own_advantages
        self.run_dir = Path(c.output_dir).absolute()
        self._trainer = trainer
        self._task = task
        by_engine = "engine" in c.model_fields_set
        self._methods = m = methods_of(trainer, c, task, by_engine=by_engine, own_advantages=own_advantages)
        self._as_made = m.filter.admits_all and not own_advantages and not by_engine
        """Whether TRL trains on its own tensors, those without a reward included."""
        engine = EngineInTrl(trainer, c, m.options, task, rules_of(m.gates, m.audits)) if by_engine else None
        self.corrects = engine is not None and engine.corrects
        self._sampler = TrlSampler(trainer, roll_out, engine)
        self.scaling = StepScaling(m.step_scale)
        self._step = 0
        self._collector: Collector | None = None
        self._resumed: dict[str, Any] | None = None
        self._resumed_from, self._changed = Path(), ""
        self._saved_in = Path()
        """The latest checkpoint."""
        self._initial = ""
        """The loop's first state, as JSON, for another start of this trainer."""
        self._held: IO[str] | None = None
        """Lock of `run_dir`."""
        self._batch: Batch | None = None
        self._in_batch: list[Rollout] = []
        """Rollouts of the batch's rows."""
        self._trained: set[int] = set()
        """Rows of the batch that TRL has trained on."""
        self._before: dict[str, Any] = {}
        """State before the batch, if a checkpoint may be saved in the middle of one."""
        self._logs: dict[str, float] = {}

    def batch(self) -> dict[str, Any]:
        """Return TRL's tensors of the next generation batch.

        Raises RunStoppedError, after saving, when the run has stopped and everything collected has been trained.
        """
        self._complete()
        collector = self._collector or self._begin()
        if self._trainer.args.gradient_accumulation_steps % self._every:
            self._before = self._state()
        batch = collector.collect(self._step) if collector.stop is None else Batch([], [])
        if collector.stop is not None and not batch.groups:
            raise self._saved(collector.stop)
        self._batch = batch
        self._sampler.make_room()
        tensors = self._tensors(batch)
        return tensors | {ROWS: torch.arange(len(tensors["advantages"]))}

    def _saved(self, stop: RunStoppedError) -> RunStoppedError:
        """Return the error once the steps that were trained are in a checkpoint."""
        t = self._trainer
        directory = Path(t._get_output_dir(trial=None)) / f"checkpoint-{t.state.global_step}"
        if self._saved_in != directory:
            if not t.state.global_step or self.scaling.accumulated:
                return stop  # the first batches of an update are booked, but not in the weights
            t._save_checkpoint(t.model, trial=None)
        return type(stop)(f"{stop}; the model is saved in {directory}")

    @property
    def _every(self) -> int:
        """Micro-batches that TRL trains on before it generates again."""
        return int(self._trainer.args.steps_per_generation * self._trainer.num_iterations)

    def trained(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Record the rows whose gradient TRL takes."""
        self.scaling.accumulated += 1
        self._trained.update(inputs[ROWS].tolist())

    def rollouts(self, inputs: Mapping[str, torch.Tensor]) -> list[Rollout | None]:
        """Return the rollouts of a micro-batch's rows; None for empty rows."""
        return [self._in_batch[row] if row < len(self._in_batch) else None for row in inputs[ROWS].tolist()]

    def logged(self, logs: Mapping[str, float]) -> None:
        """Record TRL's log of an optimizer step."""
        if "loss" in logs:  # else an evaluation or the end of training
            found = {key: logs.get(key) for key in ("loss", "grad_norm", "entropy", "kl")}
            # A step that a loss scale skipped has no finite norm.
            self._logs = {k: float(value) for k, value in found.items() if value is not None and math.isfinite(value)}

    def finish(self) -> None:
        """Book the last batch, which has been trained, and close the ledger."""
        self._complete()
        if self._collector is not None:
            self._collector.close(self._step, in_flight=[])
            self._ledger.set_meta("finished", "true")

    def require_a_batch(self) -> None:
        """Raise ConfigError if TRL, which drops incomplete batches, would end without a step."""
        there, wanted = len(self._task.train), self.config.prompts_per_step
        if there < wanted:
            raise ConfigError(
                f"train_dataset: {there} prompts, but a batch has {wanted} (generation_batch_size / num_generations): "
                "TRL would train no step; give more prompts, or lower per_device_train_batch_size or "
                "gradient_accumulation_steps"
            )

    def require_new(self) -> None:
        """Raise RunDirectoryError, with what to do, if a run was begun in the directory."""
        saved = get_last_checkpoint(str(self.run_dir.parent)) if self.run_dir.exists() else None
        refuse_used_directory(self.run_dir, "`train(resume_from_checkpoint=True)`" if saved else "")

    def close(self) -> None:
        held, self._held = self._held, None
        with held or nullcontext():  # released last
            self._sampler.close()
            collector, self._collector, self._batch = self._collector, None, None
            if collector is None:
                return
            self._trained, self._logs, self._saved_in = set(), {}, Path()
            self._sampler.forget()
            self._records.close()
            self._ledger.close()  # which may raise
            if self._resumed is None and not self._trainer.state.global_step and collector.stop is None:
                discard_account(self.run_dir)  # of a start that failed, and may be tried again

    def save(self, directory: Path) -> None:
        """Write Winnow's part of a checkpoint of TRL's, before TRL's own: what fails here leaves earlier ones."""
        state, new = self.state_dict(), not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            write_json(directory / TRL_STATE, state)
            self._methods.save(directory)
        except BaseException:
            if new:  # TRL would resume from it
                shutil.rmtree(directory, ignore_errors=True)
            raise
        self._saved_in = directory

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of TRL's holds for a resume, as JSON values: loop, ledger and files up to this step.

        In the middle of a batch it is what was before the batch, which a resume samples again.
        """
        if self._trainer._step % self._every and not self._trainer.control.should_training_stop:
            return self._before
        self._complete()
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {
            "loop": self._loop_state(),
            "config": as_saved(self.config),
            "task": self._task.fingerprint(),
            "offsets": self._records.offsets(),
            "ledger": self._ledger.mark(),
            "code": self._code,
            "rewards": self._rewards,
        }

    def _loop_state(self) -> dict[str, Any]:
        assert self._collector is not None
        own = {"step": self._step, "step_scale": self._methods.step_scale.state_dict()}
        return own | self._collector.state_dict()

    @property
    def _rewards(self) -> str:
        """Names of the reward functions with their weights."""
        t = self._trainer
        pairs = zip(t.reward_func_names, t.reward_weights.tolist(), strict=True)
        return ", ".join(f"{name} (weight {weight:g})" for name, weight in pairs)

    @cached_property
    def _code(self) -> dict[str, str]:
        """Digests of the user's code when training began."""
        t = self._trainer
        given = [*t.reward_funcs, t.rollout_func, self._task, *(t.tools or ()), t.environment_factories]
        return code_of([*self.config.model_dump().values(), *given, *t.callback_handler.callbacks])

    def load_state_dict(self, path: Path) -> None:
        """Raises RunDirectoryError for one of other data or methods, CheckpointError for what is no checkpoint."""
        instead = f"start a new run from its weights: model='{path.parent}' and another output_dir"
        if not path.is_file():
            raise RunDirectoryError(f"{path}: missing; this checkpoint was not saved by WinnowGRPOTrainer; {instead}")
        require_ledger(self.run_dir, path.parent, instead)
        state = load_state_in_trl(path)
        same_prompts = state["task"] == self._task.fingerprint()
        require_unchanged(path, state["config"], self.config, same_prompts, "train_dataset")
        strict = self.config.resume == "strict"
        rewards = state.get("rewards") or self._rewards
        others = "" if rewards == self._rewards else f"reward_funcs: saved with {rewards}, now {self._rewards}"
        if others and strict:
            raise ConfigError(f"{others}; resume=strict refuses this")
        code = changes(state["code"], self._code, state["loop"]["step"], strict=strict)
        self._changed = ". ".join(filter(None, (others, code)))
        self._resumed, self._resumed_from = state, path

    def _begin(self) -> Collector:
        private_directory(self.run_dir)
        self._held = lock(self.run_dir)
        if self._resumed is None:
            self.require_new()  # again: another run may have come first
        try:
            return self._open()
        except BaseException:
            if self._resumed is None and self._collector is None:
                discard_account(self.run_dir)  # `close` does it for one that is complete
            raise

    def _open(self) -> Collector:
        c, m, state, _ = self.config, self._methods, self._resumed, self._code
        mark, step = (None, 0) if state is None else (state["ledger"], state["loop"]["step"])
        self._ledger = ledger = open_account(self.run_dir, c, m, mark, step)
        keep_from_uploads(self.run_dir)
        if state is not None:
            with suppress(OSError):
                self._resumed_from.touch()  # the newest again, see `marks`
        offsets, turns = (state or {}).get("offsets"), self._task.max_turns
        self._records = Records(self.run_dir, as_saved(c), offsets, max_turns=turns, tokenizer=self._trainer._tokenizer)
        if self._changed:
            self._warn(self._changed)
        no_fault = frozenset() if "max_failed_share" in c.model_fields_set else frozenset({NO_REWARD})
        masks = c.mask_truncated_completions
        fewest = min(len(self._task.train), FEWEST_REJECTED)
        limits = Limits(ENDLESS, c.max_failed_share, c.max_skipped_steps, masks, no_fault, fewest_rejected=fewest)
        prompts = prompts_of(self._task)
        self._collector = build_collector(c, m, self._sampler, ledger, prompts, limits=limits)
        if state is not None:
            with understood(self._resumed_from), at("loop"):
                self._load(LoopState.of(state["loop"]))
            seconds = [row.get("seconds_total", 0.0) for row in read_metrics(self.run_dir)]
            self._collector.clock.started_at(now(), before=max(seconds, default=0.0))
        elif self._initial:
            self._load(LoopState.of(json.loads(self._initial)))
        else:
            self._initial = json.dumps(self._loop_state())
        self._publish()
        return self._collector

    def _load(self, saved: LoopState) -> None:
        assert self._collector is not None
        if saved.waiting:
            raise ValueError("groups wait in this state, but inside TRL no group waits for a later step")
        self._step = saved.step
        self._collector.load_state_dict(saved)
        with at("step_scale"):
            self._methods.step_scale.load_state_dict(saved.step_scale)

    def _publish(self) -> None:
        self._sampler.publish(rules_of(self._methods.gates, self._methods.audits), self._step)

    def _record(self, metrics: dict[str, float], groups: list[Group], logs: Mapping[str, float]) -> None:
        self._records.metrics(metrics)
        self._records.samples(self._step, groups, "train")
        self._records.signals(groups, self._methods.judge)
        logged = self._trainer._metrics["train"]  # with the next of TRL's logs they go to its trackers
        for name, value in metrics.items():
            if name.startswith("num_") or name == "seconds_total":  # totals, of which TRL would log a mean
                logged[f"winnow/{name}"] = [value]
            elif name not in (*logs, "step"):
                logged[f"winnow/{name}"].append(value)

    def _complete(self) -> None:
        """Book the previous batch, which TRL has trained by now."""
        if self._collector is None or self._batch is None:
            return
        collector, batch, self._batch = self._collector, self._batch, None
        for row, rollout in enumerate(self._in_batch):
            if row not in self._trained and rollout.fate is None:
                rollout.fate, rollout.reason = Fate.SURPLUS, "training ended before its optimizer step"
        updated = float(bool(batch.groups and self._trained))
        self._trained = set()
        logs, self._logs = self._logs, {}  # TRL does not log every step
        scaling = self.scaling.take()
        update = logs | (scaling if updated else {}) | {"updated": updated}
        with collector.clock.phase("record"):
            collector.trained(self._step, batch, update)
        self._step += 1
        with collector.clock.phase("publish"):
            self._publish()
        metrics = collector.end_step(self._step - 1, batch.groups, update)
        with collector.clock.phase("record"):
            self._record(metrics, batch.finished, logs)
        for message in collector.warnings(batch.finished):
            self._warn(message)
        self._sampler.forget()

    def _warn(self, message: str) -> None:
        self._records.warning(self._step, message)
        warnings.warn(message, stacklevel=3)

    def _tensors(self, batch: Batch) -> dict[str, Any]:
        """Return TRL's tensors of the trained rollouts; those without a reward (failed, pruned) are absent."""
        if self._as_made and len(self._sampler.outputs) == 1:
            self._in_batch = [rollout for group in batch.finished for rollout in group.rollouts]
            return self._sampler.outputs[0]
        trained = [(group, r) for group in batch.groups for r in group.rollouts if r.reward is not None]
        rows, self._in_batch = [self._sampler.row(*each) for each in trained], [r for _, r in trained]
        unbiased = step_options(self.config, self._methods.options).unbiased
        parts = self._trainer.args.steps_per_generation  # into which TRL divides the batch
        missing = -len(rows) % parts if rows else parts
        advantages_N = self._advantages(batch.groups, rows)
        keys = [(group.visit.number, rollout.sibling) for group, rollout in trained]
        self._sampler.show(dict(zip(keys, advantages_N.tolist(), strict=True)))
        return batch_of(
            rows,
            advantages_N,
            np.array([1 / r.survival_p if unbiased else 1.0 for r in self._in_batch]),
            loss_type=self._trainer.loss_type,
            empty=[self._sampler.row(batch.finished[0], batch.finished[0].rollouts[0])] * missing,
            pad_token=self._trainer._tokenizer.pad_token_id,
            multiple_of=self._trainer.pad_to_multiple_of or 1,
        )

    def _advantages(self, groups: Sequence[Group], rows: Sequence[Tensors]) -> np.ndarray:
        """Return advantages [N] of the rollouts with a reward; `rows`: theirs, group by group."""
        advantage = self._methods.advantage
        if not self._own_advantages:
            return np.array([float(row["advantages"]) for row in rows])
        if isinstance(advantage, InUpdate) and groups:
            return with_baselines(advantage, groups, squared_norms(self._trainer, rows, self._in_batch))
        found = zip(advantage.of_batch(groups), groups, strict=True)
        return np.concatenate([np.zeros(0), *(of_group[~np.isnan(group.rewards())] for of_group, group in found)])
