"""Trainer of a run: builds every part from a configuration, runs the loop, saves and resumes.

Trainer(model="path/or/hub-name", env="countdown", config={"max_steps": 200}).train()
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from ..base.failpoint import failpoint
from ..base.files import readable, write_json
from ..config import ConfigError, RunConfig, config_of
from ..engine.loading import quiet_transformers
from ..env.prompting import tokenizer_digest
from ..env.rewards.rewarder import Rewarder, RewardSpec
from ..learner import LearnerLostError
from ..learner.step import OptimizerStep
from ..loop import Hooks, Limits, Loop, Parts, RunStoppedError
from ..methods.gate.audit import rules_of
from ..record.ledger import Ledger
from ..record.progress import Display
from ..record.records import (
    CONFIG,
    LEDGER,
    METRICS,
    START,
    Records,
    RunDirectoryError,
    check_trackers,
    lock,
)
from ..rollout.runner import RolloutRunner
from ..sampler import SamplerContext, SamplersLostError
from ..sampler.base import SamplerRefusedError
from ..sampler.buffer import Buffer
from ..sampler.codec import prompts_of
from ..sampler.pace import Beside, InTurn
from ..types import Group
from . import checkpoint
from .build import (
    build_learner,
    build_loss,
    build_methods,
    build_policy,
    build_sampler,
    rollout_options,
    sampler_options,
    step_options,
)
from .evaluating import Evaluations
from .given import Given
from .interrupt import StopSignals
from .machine import settle
from .preflight import (
    NothingSampledError,
    check_agreement,
    check_evaluation,
    check_prompts,
    in_steps,
    refuse_changes,
    refuse_used_directory,
    resumed_config,
)


class Trainer:
    """One run.

    `model`: a Hugging Face directory or hub name, or a loaded causal LM (then give `processing_class`, its tokenizer).
    `env`: a task's name, `{"name": ..., options}`, or a `Task` object. `train_dataset`, `eval_dataset`: rows instead of
    it, each a `datasets.Dataset`, a pandas data frame or any iterable of mappings, read to its end; `env` may then be
    `{"name": "dataset", options}` without paths. They are not kept with the run: give them to `resume` too.
    `reward_funcs`: functions with TRL's signature, or their names `module:function`; without them the task's own.
    `config`: a RunConfig, a dict of its keys, or a YAML file; `model` and `env` given here win.
    Raises ConfigError on anything that cannot run, before anything is written.
    """

    def __init__(
        self,
        model: Any = None,
        env: Any = None,
        reward_funcs: Sequence[RewardSpec] | RewardSpec | None = None,
        config: RunConfig | Mapping[str, Any] | str | Path | None = None,
        processing_class: Any = None,
        *,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: Iterable[Any] | None = None,
        console: Console | None = None,
    ) -> None:
        given = Given(model, env, reward_funcs, processing_class, train_dataset, eval_dataset)
        self._set_up(given, config, console, resume=False)

    @classmethod
    def resume(
        cls,
        run_dir: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        console: Console | None = None,
        **given: Any,
    ) -> Trainer:
        """The trainer that goes on where `run_dir` was saved last; `overrides` may change only harmless keys.

        `given`: the arguments of `Trainer` that were objects, again.
        """
        trainer = cls.__new__(cls)
        trainer._set_up(Given(**given), resumed_config(Path(run_dir), overrides or {}), console, resume=True)
        return trainer

    def _set_up(
        self,
        given: Given,
        config: RunConfig | Mapping[str, Any] | str | Path | None,
        console: Console | None,
        resume: bool,
    ) -> None:
        given = given.sorted_out()
        rows = given.train_dataset is not None
        self.config = config_of(given.model, given.env, given.reward_funcs, config, rows=rows)
        self.console = console or Console(quiet=True)
        self.run_dir = Path(self.config.output_dir)
        self._stop_requested = False
        self._compare_at = 1
        self._started = time.monotonic()
        self._seconds_before = 0.0
        torch.manual_seed(self.config.seed)
        self._trained = False
        self._held = lock(self.run_dir) if resume else None
        try:
            self._checkpoint = self._find_checkpoint() if resume else None
            if not resume:
                refuse_used_directory(self.run_dir)
            self._build(given)
        except BaseException:
            if self._held is not None:
                self._held.close()
            raise

    def _build(self, given: Given) -> None:
        c = self.config
        check_trackers(c.report_to)
        given.require_names(c)
        quiet_transformers()
        self.task = given.task(c)
        self.config = c = in_steps(c, len(self.task.train))
        check_evaluation(c, self.task)
        model = given.loaded_model
        self.machine = settle(c, model, resumed=self._held is not None)
        self.config = c = self.machine.config
        self.machine.set_threads()
        elsewhere = "own_engine" in sampler_options(c).provides
        policy, self.engine = build_policy(
            c, model, given.processing_class, self._checkpoint, with_engine=not elsewhere
        )
        self.tokenizer = policy.tokenizer
        self._origin = policy.origin
        funcs = given.reward_list or c.reward_funcs or self.task.reward_funcs
        self.rewarder = Rewarder(funcs, c.reward_weights, c.reward_timeout_s)
        check_prompts(c, self.task, self.rewarder, self.tokenizer, self.engine)
        self.learner = build_learner(policy, c)
        self.methods = m = build_methods(c, self.task.train)
        greedy = m.advantage.greedy_baseline
        runner = None
        if self.engine is not None:
            options = rollout_options(c, greedy_baseline=greedy)
            runner = RolloutRunner(self.engine, self.task, self.tokenizer, self.rewarder, options, rules_of(m.gates))
        behind = c.max_lag - m.rollout_batch.carry  # what is carried over is a step older when it is trained
        self._sampler = build_sampler(c, SamplerContext(c, self.task, self.tokenizer, greedy, behind, runner))
        if self.engine is not None:
            self.engine.load_weights(self.learner.weights(), 0)
            self._compare()

    def train(self) -> dict[str, float]:
        """Run to the end, once; returns the last evaluation and totals.

        Raises RunStoppedError when going on is useless, KeyboardInterrupt after saving when it was interrupted.
        """
        if self._trained:
            raise RunDirectoryError(f"a Trainer trains once; go on with Trainer.resume('{self.run_dir}', ...)")
        self._trained = True
        if self._held is None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._held = lock(self.run_dir)
            refuse_used_directory(self.run_dir)  # again: another run may have come first
        try:
            return self._train()
        except LearnerLostError as error:  # with it went the weights: the last checkpoint is what there is
            raise RunStoppedError(f"{error}\ngo on with: winnow resume {self.run_dir}") from None
        finally:
            for part in (self._sampler, self.learner, self.rewarder, self._held):
                part.close()

    def _train(self) -> dict[str, float]:
        state = checkpoint.load_state(self._checkpoint) if self._checkpoint else None
        write_json(self.run_dir / CONFIG, self.config.model_dump(mode="json"))
        self.machine.say(self.console)
        self.rewarder.trainer_state = SimpleNamespace(global_step=0, max_steps=self.config.max_steps)
        with Ledger.open(self.run_dir / LEDGER) as ledger:
            self._open_ledger(ledger, state)
            shutil.rmtree(self.run_dir / "model", ignore_errors=True)  # of an earlier end of this run
            records = Records(self.run_dir, self.config, (state or {}).get("offsets"), max_turns=self.task.max_turns)
            try:
                evaluations = Evaluations(
                    self.config, self.task, self._sampler.run, self.methods.selector, ledger, records
                )
                loop = self._loop(evaluations, state)
                with Display(self.console, start=loop.step, max_steps=self.config.max_steps) as display:
                    self._display = display
                    if state is None:
                        self._baseline(records, evaluations)
                    with self._signals():
                        loop.run()
                if self._stop_requested and loop.step < self.config.max_steps:
                    raise KeyboardInterrupt(f"saved at step {loop.step}; go on with: winnow resume {self.run_dir}")
                return self._finish(ledger, loop)
            finally:
                records.close()

    def _find_checkpoint(self) -> Path | None:
        """The checkpoint to go on from; None to start again from the beginning."""
        found = checkpoint.latest(self.run_dir)
        if found:
            state = checkpoint.load_state(found)
            refuse_changes(self.run_dir, state["config"], self.config)
            if state["loop"]["step"] > self.config.max_steps:
                raise ConfigError(f"max_steps={self.config.max_steps}, but the run is at step {state['loop']['step']}")
        return found

    def _fingerprints(self) -> dict[str, str]:
        return {
            "task": self.task.fingerprint(),
            "tokenizer": tokenizer_digest(self.tokenizer),
            "base model": self._origin,
            "reward functions": ", ".join(self.rewarder.names),
        }

    def _open_ledger(self, ledger: Ledger, state: Mapping[str, Any] | None) -> None:
        """Void what a crash has rolled back, or start the account."""
        start = self.run_dir / START
        if state is not None:
            ledger.rollback(state["ledger"], reason=f"resumed from step {state['loop']['step']}")
        elif saved := ledger.get_meta("saved"):
            raise checkpoint.CheckpointError(
                f"{self.run_dir}: its checkpoints are gone (the last was of step {saved}), so the run cannot go on; "
                "restore them, or start a new run elsewhere"
            )
        elif start.exists():
            ledger.rollback(
                json.loads(start.read_text(encoding="utf-8")), reason="restarted before the first checkpoint"
            )
        else:
            ledger.set_meta("max_lag", str(self.config.max_lag))
            ledger.set_meta("max_reward", str(self.config.success_reward))
            ledger.set_meta("finished", "false")
            write_json(start, ledger.mark())

    def _loop(self, evaluations: Evaluations, state: Mapping[str, Any] | None) -> Loop:
        c, m, ledger, records = self.config, self.methods, evaluations.ledger, evaluations.records
        ledger.judge = m.judge
        options = step_options(c)
        beside = "beside" in sampler_options(c).provides
        buffer = Buffer(c.prompts_per_step, c.max_lag, carry=m.rollout_batch.carry or beside)
        parts = Parts(
            prompts=prompts_of(self.task),
            sampler=self._sampler,
            learner=self.learner,
            selector=m.selector,
            group_size=m.group_size,
            filter=m.filter,
            optimizer_step=OptimizerStep(self.learner, m.advantage, build_loss(c), m.step_scale, options),
            buffer=buffer,
            pace=Beside(buffer, self._sampler) if beside else InTurn(buffer, self._sampler, m.rollout_batch),
            refill_round=max(m.rollout_batch.size, c.prompts_per_step),
            ledger=ledger,
            gates=m.gates,
        )
        hooks = Hooks(
            published=self._compare_again,
            evaluate=evaluations.evaluate,
            profile=evaluations.profile,
            record=lambda step, metrics, groups: self._record(records, step, metrics, groups),
            save=lambda step, force: self._save_if_due(ledger, records, loop, step, force),
            should_stop=lambda: self._stop_requested,
        )
        limits = Limits(c.max_steps, c.max_failed_share, c.max_skipped_steps)
        loop = Loop(parts, hooks, limits, m.judge)
        if state is not None and self._checkpoint is not None:
            self._restore(loop, state)
        else:
            self._start_sampler(loop)
        return loop

    def _start_sampler(self, loop: Loop) -> None:
        """First weights and rules. Samplers elsewhere are compared with the learner; those here have been."""
        try:
            loop.publish()
            if self.engine is None:
                self._compare()
        except SamplerRefusedError as error:
            raise ConfigError(str(error)) from None
        except SamplersLostError as error:
            raise RunStoppedError(f"step {loop.step}: {error}") from None

    def _compare(self) -> None:
        if self.engine is None or "logp" in self.engine.provides:
            check_agreement(self.task.train, self._sampler.run, self.learner, lambda: self._sampler.dtype)

    def _compare_again(self, step: int) -> None:
        """After the first update: only now does a head, a cache or an adapter that kept old weights show.

        Probes that all fail, as while an environment is down, are tried again after the next one."""
        if step == self._compare_at:
            try:
                self._compare()
            except NothingSampledError:
                self._compare_at += 1

    def _restore(self, loop: Loop, state: Mapping[str, Any]) -> None:
        assert self._checkpoint is not None
        for name, now in self._fingerprints().items():
            if state["fingerprints"][name] != now:
                raise ConfigError(
                    f"{self.run_dir}: the {name} is not the one this run was saved with; restore it, or start a new run"
                )
        loop.load_state_dict(state["loop"])
        self.rewarder.trainer_state.global_step = loop.step
        self._seconds_before = float(state["seconds_total"])
        self.learner.load(self._checkpoint)
        self._sampler.load(self._checkpoint)
        self._start_sampler(loop)
        loop.relaunch(state["loop"])

    def _baseline(self, records: Records, evaluations: Evaluations) -> None:
        """Held-out figures before the first update, as step 0."""
        if (evaluation := evaluations.evaluate(0)) is not None:
            metrics = {"step": 0, "num_tokens": 0} | {f"eval/{k}": v for k, v in evaluation.metrics.items()}
            self._record(records, 0, metrics, [])

    def _record(self, records: Records, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        metrics |= self.rewarder.pop_metrics() | {"seconds_total": self._seconds()}
        self.rewarder.trainer_state.global_step = step
        records.metrics(metrics)
        records.samples(step, groups, "train")
        records.signals(groups, self.methods.judge)
        self._display.update(step, metrics, self._sampler.nodes)
        failpoint("record")

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _save_if_due(self, ledger: Ledger, records: Records, loop: Loop, step: int, force: bool) -> None:
        if not (force or step % self.config.save_steps == 0) or step in checkpoint.steps(self.run_dir):
            return
        state = {
            "loop": loop.state_dict(),
            "config": self.config.model_dump(mode="json"),
            "fingerprints": self._fingerprints(),
            "offsets": records.offsets(),
            "seconds_total": self._seconds(),
            "ledger": ledger.mark(),
        }
        checkpoint.save(self.run_dir, step, state, self._write_weights, keep_last=self.config.save_total_limit)
        ledger.set_meta("saved", str(step))

    def _write_weights(self, directory: Path) -> None:
        for part in (self.learner, self._sampler, self.methods):
            part.save(directory)
        self.tokenizer.save_pretrained(directory / "model")

    def _finish(self, ledger: Ledger, loop: Loop) -> dict[str, float]:
        """Save the model as an ordinary Hugging Face directory and close the account."""
        self.learner.export(self.run_dir / "model")
        self.tokenizer.save_pretrained(self.run_dir / "model")
        self.methods.save(self.run_dir / "model")
        readable(self.run_dir / "model")
        loop.close()
        ledger.set_meta("finished", "true")
        last: dict[str, float] = {"step": loop.step, "num_tokens": loop.num_tokens, "seconds_total": self._seconds()}
        for line in (self.run_dir / METRICS).read_text(encoding="utf-8").splitlines():
            last |= {k: v for k, v in json.loads(line).items() if k.startswith("eval/")}
        return last

    def _signals(self) -> StopSignals:
        def request() -> None:
            self._stop_requested = True

        def announce() -> None:
            self.console.print("finishing this step, then saving; once more to stop at once", style="yellow")

        return StopSignals(request, announce)
