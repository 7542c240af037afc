"""An open run: its directory, ledger and loop, from the first step or a checkpoint to `model/`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from ..base.errors import ConfigError
from ..base.failpoint import failpoint
from ..base.files import readable, write_json
from ..base.state import at
from ..config.paths import as_saved
from ..env.rewards.rewarder import Rewarder, without_taken
from ..learner.fsdp.learner import FsdpLearner
from ..learner.off_policy import log_ratios
from ..learner.step import OptimizerStep
from ..loop import Hooks, Loop
from ..record.ledger import Ledger
from ..record.progress import Display
from ..record.records import CHARTS, CONFIG, LEDGER, PROMPT, START, Records, fingerprints_of, read_metrics
from ..record.stop_conditions import RunStoppedError, TaskSolvedError
from ..record.user_code import changes, code_of
from ..record.watchdogs import Watchdogs
from ..reuse import Reuse
from ..rollout.evaluate import Evaluation, require_judged
from ..rollout.profile import Profiler
from ..sampler import SamplersLostError
from ..sampler.base import SamplerRefusedError
from ..sampler.codec import prompts_of
from ..sampler.in_process import InProcessSampler
from ..tasks.prompt_example import prompt_example
from ..types import Group
from . import checkpoint
from .build import Parts
from .build_methods import build_collector, method_charts
from .callbacks import Callbacks
from .hub import push_if_due, write_card
from .preflight import NothingSampledError


class Session:
    """A run: `open` its directory, whose lock the caller holds, `start` it, then run steps until it is closed.

    `resume_from`: the checkpoint to resume. `begun_at`: `time.monotonic()` before anything was loaded.
    """

    def __init__(
        self, parts: Parts, callbacks: Callbacks, console: Console, resume_from: Path | None, begun_at: float
    ) -> None:
        self.parts = parts
        self.config = parts.config
        self.run_dir = parts.run_dir
        self._resume_from, self._begun_at = resume_from, begun_at
        self._callbacks, self._console = callbacks, console
        self.stop_requested = self._solved = False
        self._compare_at = 1
        self._evaluated_at: int | None = None
        self._unsaved = False  # whether `evaluate` has written since the last save
        self._metrics: dict[str, float] = {}
        self._open_parts = ExitStack()

    def open(self) -> None:
        """Open directory, ledger and records, rolled back to the checkpoint or the start.

        Raises ConfigError where task, model, rewards or code are not those of the run, CheckpointError when files are
        missing or damaged.
        """
        c, parts, saved = self.config, self.parts, self._resume_from
        self._state = state = checkpoint.load_run_state(saved) if saved else None
        parts.require_same(state["fingerprints"] if state else fingerprints_of(self.run_dir))
        self._code = code_of([*c.model_dump().values(), *parts.rewarder.specs, parts.task, *self._callbacks])
        known = state["code"] if state else fingerprints_of(self.run_dir, "code")
        self._changes = changes(known, self._code, state["loop"]["step"] if state else 0, strict=c.resume == "strict")
        self._settings = settings = as_saved(c)
        write_json(self.run_dir / CONFIG, settings, private=True)
        write_json(self.run_dir / CHARTS, method_charts(parts.resolved.options), private=True)
        parts.resolved.say(self._console)
        if (example := prompt_example(parts.task, parts.tokenizer)) is not None:  # for the page
            write_json(self.run_dir / PROMPT, asdict(example), private=True)
            if state is None:
                self._console.print(example.line(), highlight=False, markup=False, soft_wrap=True)
        with ExitStack() as stack:  # closed if this fails
            self.ledger = stack.enter_context(Ledger.open(self.run_dir / LEDGER))
            self._open_ledger(state)
            offsets, step = (state["offsets"], state["loop"]["step"]) if state else (None, None)
            turns, tokenizer = parts.task.max_turns, parts.tokenizer
            self._records = Records(self.run_dir, settings, offsets, step=step, max_turns=turns, tokenizer=tokenizer)
            stack.callback(self._records.close)
            rewarder, opening = parts.rewarder, example.opening if example else ""
            self._watchdogs = Watchdogs(c, rewarder.names, rewarder.in_threads, opening)
            self.loop = self._loop()
            self._clock = self.loop.collector.clock
            self._clock.started_at(self._begun_at, float(state["seconds_total"]) if state else 0.0)
            self._open_parts = stack.pop_all()

    def start(self) -> None:
        """Restore the checkpoint or publish the first weights, and evaluate before the first update.

        Raises ConfigError or RunStoppedError when samplers cannot run this, CheckpointError on a damaged state.
        """
        c, parts, state = self.config, self.parts, self._state
        with self._open_parts as stack:  # closed if this fails
            if isinstance(parts.learner, FsdpLearner):
                parts.learner.require_shared(self.run_dir / CONFIG)
            parts.rewarder.trainer_state = SimpleNamespace(global_step=0, max_steps=c.max_steps)
            if state is not None and self._resume_from is not None:
                self._restore(state, self._resume_from)
            else:
                self._start_sampler()
            self._display = stack.enter_context(Display(self._console, start=self.loop.step, max_steps=c.max_steps))
            if self._changes:
                self._warn(self.loop.step, self._changes)
            for ended in ("model", checkpoint.WRITING):  # of an earlier end of this run, which goes on now
                shutil.rmtree(self.run_dir / ended, ignore_errors=True)
            self._look_at_agreement(self.loop.step)
            if c.max_lag and not parts.resolved.options.continuous:  # there it lands what is in flight
                self._compare_at = self.loop.step + 1
            self._notify("on_train_begin")
            if state is None and (evaluation := self._evaluate(0)) is not None:
                require_judged(evaluation.groups)
                metrics = {"step": 0, "num_tokens": 0} | {f"eval/{k}": v for k, v in evaluation.metrics.items()}
                self._record(0, metrics, [])
                self.loop.warn_of_evaluation(evaluation)
            self._clock.rest("load")
            self._open_parts = stack.pop_all()

    def _open_ledger(self, state: Mapping[str, Any] | None) -> None:
        """Roll back what a crash left in the ledger, or start a new one."""
        ledger, start = self.ledger, self.run_dir / START
        if state is not None:
            ledger.rollback(state["ledger"], reason=f"resumed from step {state['loop']['step']}")
        elif saved := ledger.get_meta("saved"):
            raise checkpoint.CheckpointError(
                f"{self.run_dir}: its checkpoints are missing (the last was of step {saved}); restore them, or start a "
                "new run in another output_dir"
            )
        elif start.exists():
            with checkpoint.understood(start):
                mark = checkpoint.parsed(start)
            ledger.rollback(mark, reason="restarted before the first checkpoint")
        else:
            ledger.set_meta("max_lag", str(self.config.max_lag))
            ledger.set_meta("success", str(self.parts.methods.judge.success))
            ledger.set_meta("fingerprints", json.dumps(self.parts.fingerprints))
            ledger.set_meta("code", json.dumps(self._code))
            ledger.set_meta("finished", "false")
            write_json(start, ledger.mark(), private=True)
        self._book_probes()

    def _loop(self) -> Loop:
        c, m, parts, r = self.config, self.parts.methods, self.parts, self.parts.resolved
        reuse = None
        if c.reuse is not None:
            ratios = partial(log_ratios, learner=parts.learner)
            reuse = Reuse(c.reuse, c.prompts_per_step, c.seed, m.judge, ratios, parts.sampler.run)
        asynchronous, lands = r.options.asynchronous, r.options.continuous
        prompts = prompts_of(parts.task)
        collector = build_collector(c, m, parts.sampler, self.ledger, prompts, asynchronous=asynchronous, reuse=reuse)
        step = OptimizerStep(parts.learner, m.advantage, r.loss, m.step_scale, r.step_options, parts.teacher)
        hooks = Hooks(
            begin=lambda step: self._notify("on_step_begin"),
            published=self._compare_again,
            evaluate=self._evaluate,
            profile=self._profile,
            record=self._record,
            save=self._save_if_due,
            pauses=lambda step: lands and any(every and step % every == 0 for every in (c.save_steps, c.eval_steps)),
            should_stop=lambda: self.stop_requested or self._callbacks.control.should_training_stop,
            warn=self._warn,
        )
        return Loop(collector, parts.sampler, parts.learner, step, hooks, r.options.overlap)

    def _start_sampler(self) -> None:
        """Publish the first weights and rules. Samplers with their own engines are compared with the learner here."""
        try:
            self.loop.publish()
            if self.parts.engine is None:
                self._compare()
            if self._state is not None and self.loop.step == self._state["config"]["max_steps"]:
                self._profile(self.loop.step)  # which the end had no use for
        except SamplerRefusedError as error:
            raise ConfigError(str(error)) from None
        except SamplersLostError as error:
            raise RunStoppedError(f"step {self.loop.step}: {error}") from None

    def _restore(self, state: Mapping[str, Any], directory: Path) -> None:
        with checkpoint.understood(directory / checkpoint.STATE), at("loop"):
            self.loop.load_state_dict(state["loop"])
            for rollout in (r for group in self.loop.collector.kept_groups() for r in group.rollouts):
                if rollout.reward is not None:  # without one it is not trained, and may be too long
                    self.parts.learner.sizes.require_fit(rollout)
        for row in read_metrics(self.run_dir):
            self._watchdogs.recall(row)
            self._at(int(row["step"]))
            self._callbacks.state.log(row)
            self._callbacks.evaluated(row)
        self._at(self.loop.step)
        self.parts.learner.load(directory)
        self.parts.sampler.load(directory)
        self._start_sampler()
        with checkpoint.understood(directory / checkpoint.STATE), at("loop.in_flight"):
            self.loop.collector.relaunch(state["loop"]["in_flight"])

    def run(self) -> None:
        """Train to `max_steps`, or until a callback stops it or the task is solved.

        Raises RunStoppedError when going on is useless for another reason, KeyboardInterrupt after saving when it was
        interrupted.
        """
        try:
            self.loop.run()
        except TaskSolvedError as solved:
            self._console.print(str(solved), style="green", markup=False)
            self.solved()
        if self.stop_requested and not self._solved and self.loop.step < self.config.max_steps:
            raise KeyboardInterrupt(
                f"saved at step {self.loop.step}; go on with: winnow resume {self.config.output_dir} (a run that was "
                "given objects: Trainer.resume, with these)"
            )

    def solved(self) -> None:
        """Mark the task as solved, and evaluate now unless an evaluation was just due."""
        self._solved, step = True, self.loop.step
        if self.config.eval_steps and self._evaluated_at != step:
            self.evaluate()

    def step(self) -> dict[str, float]:
        """Run one optimizer step, save if due, and return its metrics. Raises RunStoppedError as `run` does."""
        self.loop.advance()
        return dict(self._metrics)

    def evaluate(self) -> dict[str, float]:
        """Return held-out metrics of the current policy, booked as evaluation. ConfigError without held-out data."""
        self._unsaved = True
        return self._evaluated(self._evaluate_now(self.loop.step), self._records.metrics)

    def evaluate_after_end(self, rewarder: Rewarder) -> dict[str, float]:
        """Return held-out metrics of the last policy after `close`, which closed the run's own rewarder and ledger."""
        sampler = self.parts.sampler
        if not isinstance(sampler, InProcessSampler) or hasattr(self.parts.engine, "close"):
            raise ConfigError(f"evaluate: what samples has ended with the run; run `winnow eval {self.run_dir}`")
        rewarder.trainer_state = self.parts.rewarder.trainer_state
        sampler.runner.rewarder = rewarder
        return self._evaluated(self.parts.evaluate(), self._records.track)

    def _evaluated(self, evaluation: Evaluation, record: Callable[[dict[str, float]], None]) -> dict[str, float]:
        metrics = {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        record(row := self._totals() | metrics)
        self._callbacks.report(self._callbacks.state.log(row), self._notify)
        return metrics

    def finish(self) -> dict[str, float]:
        """Save the model as a Hugging Face directory and close the ledger; return last evaluation and totals."""
        self._save_if_due(self.loop.step, True)
        rows = list(read_metrics(self.run_dir))
        writing = self.run_dir / checkpoint.WRITING
        self.parts.export(writing)
        self.loop.close()
        write_card(writing, self.config, self.ledger.totals(), rows)
        readable(writing)
        writing.rename(self.run_dir / "model")  # whole, or not there
        self.ledger.set_meta("finished", "true")
        self.ledger.set_meta("solved", str(self._solved).lower())
        push_if_due(self.run_dir, self.config)
        self._notify("on_train_end")
        return self._totals() | {k: v for row in rows for k, v in row.items() if k.startswith("eval/")}

    def leave(self) -> None:
        """Save, so that the run can be resumed."""
        self._save_if_due(self.loop.step, True)
        self._notify("on_train_end")

    def close(self, *, failed: bool) -> None:
        """Close ledger, records and display. `failed`: the training ended with an error, as trackers report."""
        self._records.failed = failed
        self._open_parts.close()

    def _compare_again(self, step: int) -> None:
        """Compare after the first update: only then does a head, cache or adapter that kept old weights show.

        If all probes fail, as while an environment is down, try again after the next update."""
        if step == self._compare_at:
            try:
                self._compare()
                self._look_at_agreement(step)
            except NothingSampledError:
                self._compare_at += 1

    def _compare(self) -> None:
        try:
            self.parts.compare()
        finally:
            self._book_probes()

    def _book_probes(self) -> None:
        probed, self.parts.probed = self.parts.probed, []
        if probed:
            self.ledger.probes(probed)

    def _look_at_agreement(self, step: int) -> None:
        agreement, self.parts.agreement = self.parts.agreement, None
        if agreement is not None and (message := self._watchdogs.probed(agreement.mean)):
            self._warn(step, message)

    def _warn(self, step: int, message: str) -> None:
        self._records.warning(step, message)
        self._display.warn(message)

    def _evaluate(self, step: int) -> Evaluation | None:
        """Return held-out metrics every `eval_steps`, at the end and if a callback asks, else None."""
        c = self.config
        due = c.eval_steps and (step % c.eval_steps == 0 or step == c.max_steps)
        return self._evaluate_now(step) if self._callbacks.take("should_evaluate") or due else None

    def _evaluate_now(self, step: int) -> Evaluation:
        self._at(step)
        with self._clock.phase("evaluate"):
            evaluated = self.parts.evaluate()
        self._evaluated_at = step
        self.ledger.evaluation(step, rollouts=evaluated.rollouts, tokens=evaluated.tokens, seconds=evaluated.seconds)
        self._records.samples(step, evaluated.groups, "test")
        return evaluated

    def _profile(self, step: int) -> None:
        """Give the selector fresh pass rates of all training prompts, if it asks for them and they can be known."""
        m, train = self.parts.methods, self.parts.task.train
        n, success = m.selector.wants_profile(step), m.judge.success
        if not n or step == self.config.max_steps or success.undecided:
            return
        profiler = Profiler(self.parts.sampler.run)
        rates = list(profiler.run(train, n=n, success=success, epoch=step))
        m.selector.profiled(rates)
        self.ledger.evaluation(step, rollouts=profiler.rollouts, tokens=profiler.tokens, seconds=profiler.seconds)
        if unjudged := [*profiler.unjudged.values()]:
            without = len(train) - len(rates)
            message = f"selector: {without} of {len(train)} prompts have no new pass rate, e.g. {unjudged[0]}"
            self._warn(step, message)

    def _record(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        logged = self.parts.sampler.logged() | self.parts.rewarder.pop_logged()
        metrics |= without_taken(logged, metrics)
        self._at(step)
        self._records.metrics(metrics)
        self._records.samples(step, groups, "train")
        self._records.signals(groups, self.parts.methods.judge)
        self._display.update(step, metrics, self.parts.sampler.nodes)
        for message in self._watchdogs.observe(metrics, groups):
            self._warn(step, message)
        failpoint("record")
        self._metrics = metrics
        self._callbacks.state.num_input_tokens_seen = int(metrics["num_tokens"])
        logs = self._callbacks.state.log(metrics)
        if step:
            self._notify("on_step_end", groups=groups)
        self._callbacks.report(logs, self._notify)
        if self._callbacks.take("should_evaluate") and self._evaluated_at != step:
            self.evaluate()

    def _at(self, step: int) -> None:
        """Report the current step to rewards and callbacks."""
        self.parts.rewarder.trainer_state.global_step = step
        self._callbacks.state.global_step = step
        self._callbacks.state.epoch = step * self.loop.collector.buffer.fewest / len(self.parts.task.train)

    def _notify(self, event: str, **kwargs: Any) -> None:
        model, optimizer = (getattr(self.parts.learner, name, None) for name in ("model", "optimizer"))
        self._callbacks.call(event, model=model, optimizer=optimizer, processing_class=self.parts.tokenizer, **kwargs)

    def _totals(self) -> dict[str, float]:
        tokens = self.loop.collector.totals.num_tokens
        return {"step": self.loop.step, "num_tokens": tokens, "seconds_total": self._clock.total()}

    def _save_if_due(self, step: int, force: bool) -> None:
        due = self._callbacks.take("should_save") or force or step % self.config.save_steps == 0
        if not due or (step in checkpoint.steps(self.run_dir) and not self._unsaved):
            return
        state = {
            "loop": self.loop.state_dict(),
            "config": self._settings,
            "fingerprints": self.parts.fingerprints,
            "offsets": self._records.offsets(),
            "seconds_total": self._clock.total(),
            "ledger": self.ledger.mark(),
            "code": self._code,
        }
        saved = checkpoint.save(self.run_dir, step, state, self.parts.save, keep_last=self.config.save_total_limit)
        self._unsaved = False
        self.ledger.set_meta("saved", str(step))
        push_if_due(self.run_dir, self.config, saved)
        self._notify("on_save")
