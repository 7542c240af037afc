"""Winnow's selector and account inside verl: which prompts verl rolls out next, and what became of them.

A step, in the order of verl's calls:

    draw, launch    verl's data loader asks for prompts: the selector chooses, the ledger books visits and skips
    returned        verl's replay buffer has trajectories: groups; those that verl drops have a fate already
    finished        the batch is complete: the selector learns from all groups
    complete        verl has trained on it, and asks for something else: the ledger books fates, tokens and the step

Knows no verl. A checkpoint is taken between steps, and continues the ledger in the run directory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..base.seconds import RunClock, now
from ..base.state import Count, at
from ..config import RunConfig
from ..config.paths import as_saved
from ..env.prompting import decode
from ..methods.gate.audit import load_with_audit, state_with_audit
from ..record.failures import FailureWatch
from ..record.ledger import Ledger
from ..record.records import Records, RunDirectoryError
from ..record.step_metrics import Tally, TokenTotals
from ..record.stop_conditions import RunStoppedError, nothing_left
from ..record.user_code import changes, code_of
from ..run.build_methods import build_methods
from ..run.checkpoint import SavedAccount, refuse_used_directory, understood
from ..run.resolved import Options
from ..types import Fate, Group, Visit
from .hosted import open_account, require_ledger, require_unchanged
from .verl_config import KWARGS, success_of
from .verl_data import FILES, VerlRows
from .verl_rollouts import Launched, Trajectory, as_filtered, failed_rollout, groups_of

CHECKPOINT = Path("data.pt")
"""Name of the file in which verl keeps this state."""
NEW_RUN = "start a new run: trainer.resume_mode=disable and another trainer.default_local_dir"


class CurriculumState(SavedAccount):
    step: Count
    num_tokens: Count
    task: str
    selector: dict[str, Any]
    undecided: str
    seconds_total: float


class Curriculum:
    """Chooses prompts and keeps the account of one run inside verl.

    `code`: names of the user's functions (`file.py:name`), whose changes a resume reports. Raises ConfigError for
    methods that do not fit.
    """

    def __init__(self, c: RunConfig, task: VerlRows, *, tokenizer: Any = None, code: Sequence[str] = ()) -> None:
        task.require_batch(c.prompts_per_step)
        self.config, self._task, self._tokenizer = c, task, tokenizer
        self.run_dir = Path(c.output_dir).absolute()
        try:
            self._methods = build_methods(c, Options.from_config(c), task.train, success_of(c))
        except ConfigError as error:
            raise ConfigError(f"{KWARGS}: {error}") from None
        self._code = code_of([*c.model_dump().values(), *code])
        self.step = 0
        """Steps completed, which is also the policy version."""
        self._totals = TokenTotals(num_tokens=0, num_decoded_tokens=0)
        self._clock = RunClock()
        self._tally = Tally(self._methods.judge)
        self._in_flight: dict[int, Launched] = {}
        self._returned: list[Group] = []
        """Groups of the current step."""
        self._batch: list[Group] | None = None
        """Groups of the step that verl trains on, and of those that it dropped."""
        self._untrained, self._last = "", False
        self._drawn_at = now()
        self._resumed: CurriculumState | None = None
        self._changed = ""
        self._ledger: Ledger | None = None
        self._records: Records
        self._failures: FailureWatch

    # ---- a step --------------------------------------------------------------------------------------------------

    def draw(self, n: int, step: int) -> list[Visit]:
        """Return the next `n` visits to roll out for `step`; book them, and the skipped ones between them.

        Raises RunStoppedError if the selector skips everything, RunDirectoryError if this is not the state of `step`.
        """
        self.complete()
        ledger = self._ledger or self._begin(step)
        if step != self.step:
            raise RunDirectoryError(
                f"{self.run_dir}: verl is at step {step}, but Winnow's account is at step {self.step}; {NEW_RUN}"
            )
        if not self._in_flight and not self._returned:
            self._drawn_at, self._tally = now(), Tally(self._methods.judge)
        visits = self._methods.selector.select(n, self._methods.audits.skips)
        ledger.visit(visits, step=step, version=step)
        kept = [visit for visit in visits if visit.verdict.keep]
        if len(kept) < n:  # verl would wait for the others forever
            raise nothing_left(step, visits[visits.index(kept[-1]) + 1 if kept else 0 :])
        return kept

    def launch(self, visit: Visit, size: int) -> None:
        """Record that verl rolls out a visit with `size` siblings."""
        self._in_flight[visit.number] = Launched(visit, size)

    def returned(self, trajectories: Iterable[Trajectory], fate: Fate | None = None, reason: str = "") -> list[Group]:
        """Return the groups of these trajectories. `fate`: what verl does with them; None: it trains on them."""
        longest = self.config.max_completion_length
        groups = groups_of(trajectories, self._in_flight, version=self.step, longest=longest)
        for group in groups:
            del self._in_flight[group.visit.number]
            for rollout in group.rollouts:
                if fate is not None and rollout.fate is None:
                    rollout.fate, rollout.reason = fate, reason
        self._returned += groups
        return groups

    def finished(self, failed: int, *, untrained: str = "", last: bool = False) -> dict[str, float]:
        """Learn from all groups of the step, once verl has its batch; return metrics for verl's log.

        `failed`: groups without any trajectory. `untrained`: why verl will not train on the batch. `last`: it is the
        run's last step. Raises RunStoppedError when no rollout of the batch has a reward.
        """
        if len(self._in_flight) != failed:
            raise RunStoppedError(
                f"step {self.step}: {len(self._in_flight)} prompts have no rollouts, but verl reports {failed} failed "
                f"groups; the account would be wrong. Resume from verl's last checkpoint, or {NEW_RUN}"
            )
        for given in self._in_flight.values():
            self._returned.append(Group(given.visit, [failed_rollout(i) for i in range(given.size)]))
        batch = sorted(self._returned, key=lambda group: group.visit.number)
        self._in_flight, self._returned = {}, []
        self._observe(batch)
        self._batch, self._untrained, self._last = batch, untrained, last
        step, waited = self.step, now() - self._drawn_at
        self._clock.add({"generate": waited, "generate/waiting": waited})
        if not any(rollout.fate is None for group in batch for rollout in group.rollouts):
            self.complete()
            reason = next((r.reason for group in batch for r in group.rollouts if r.fate == Fate.FAILED), "")
            raise RunStoppedError(f"step {step}: no rollout of the batch has a reward; the first: {reason}")
        metrics = self._tally.metrics() | self._method_metrics()
        return {f"winnow/{name}": value for name, value in metrics.items()}

    def _observe(self, batch: Sequence[Group]) -> None:
        m = self._methods
        rollouts = [rollout for group in batch for rollout in group.rollouts]
        m.judge.success.observe(rollouts)
        decides = m.judge.success.function
        rewarded = [rollout for rollout in rollouts if rollout.reward is not None]
        if decides is not None and rewarded and not any(decides in rollout.rewards for rollout in rewarded):
            names = ", ".join(sorted({name for rollout in rewarded for name in rollout.rewards})) or "only a number"
            raise ConfigError(
                f"{KWARGS}: success: function: compute_score returns no '{decides}' ({names}); name one of its keys, "
                "or give at_least alone"
            )
        for group in batch:
            seen = group
            if any(rollout.fate == Fate.FILTERED for rollout in group.rollouts):  # its rewards may still differ
                seen = as_filtered(group)
                group.kind = m.judge.kind(seen)
            self._tally.finished(group)
            m.selector.observe_group(seen)
            m.audits.observe_group(seen, m.judge)

    def complete(self) -> None:
        """Book the batch that verl has trained on; does nothing without one."""
        if self._batch is None:
            return
        assert self._ledger is not None
        batch, self._batch = self._batch, None
        fate, reason = (Fate.FILTERED, self._untrained) if self._untrained else (Fate.TRAINED, "")
        for group in batch:
            for rollout in group.rollouts:
                if rollout.fate is None:
                    rollout.fate, rollout.reason = fate, reason
            self._ledger.finish(group, step=self.step)
            self._tally.fated(group)
        metrics = self._end_step(batch)
        self._records.metrics(metrics)
        self._records.samples(self.step, self._shown(batch), "train")
        for message in self._failures.observe(batch):
            self._warn(message)
        if self._last:
            self._ledger.set_meta("finished", "true")

    def _end_step(self, batch: Sequence[Group]) -> dict[str, float]:
        """Close the account of the step; return its metrics."""
        assert self._ledger is not None
        self._totals = self._totals.with_step(self._tally)
        trained = sum(any(r.fate == Fate.TRAINED for r in group.rollouts) for group in batch)
        metrics = self._tally.metrics() | {"step": self.step + 1, **self._totals.metrics()}
        metrics |= {"groups/effective": float(trained), "updated": float(trained > 0)} | self._method_metrics()
        self._methods.selector.end_step()
        self._methods.audits.end_step()
        seconds = self._clock.take()
        metrics |= self._clock.metrics(seconds)
        self._ledger.step(self.step, seconds=seconds, metrics=metrics, version=self.step)
        self.step += 1
        return metrics

    def _method_metrics(self) -> dict[str, float]:
        return self._methods.audits.metrics() | self._methods.selector.metrics()

    def _shown(self, batch: list[Group]) -> list[Group]:
        """Return the batch with the texts that `samples.jsonl` shows."""
        for group in batch[: self.config.log_completions] if self._tokenizer is not None else ():
            for rollout in group.rollouts:
                rollout.text = decode(self._tokenizer, [rollout.token_ids])[0]
        return batch

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for verl's checkpoint, as JSON values. Raises RuntimeError in the middle of a step."""
        self.complete()
        if self._ledger is None or self._in_flight or self._returned:
            raise RuntimeError("Winnow's state can be saved between steps only, when no group is in flight")
        return {
            "step": self.step,
            "num_tokens": self._totals.num_tokens,
            "task": self._task.fingerprint(),
            "selector": state_with_audit(self._methods.selector, self._methods.audits.skips),
            "undecided": self._methods.judge.success.undecided,
            "seconds_total": self._clock.total(),
            "config": as_saved(self.config),
            "offsets": self._records.offsets(),
            "ledger": self._ledger.mark(),
            "code": self._code,
        }

    def load_state_dict(self, state: Any) -> None:
        """Take a state, restored at the first `draw`. Raises RunDirectoryError for one of other data or methods,
        CheckpointError for what is no state."""
        with understood(CHECKPOINT):
            saved = CurriculumState.of(state)
        require_ledger(self.run_dir, f"{CHECKPOINT} of verl's checkpoint", NEW_RUN)
        settings = saved.config
        if saved.undecided:  # what was right was unknown, so it may be set now
            settings = settings | {"success": as_saved(self.config)["success"]}
        require_unchanged(CHECKPOINT, settings, self.config, saved.task == self._task.fingerprint(), FILES)
        self._changed = changes(saved.code, self._code, saved.step, strict=self.config.resume == "strict")
        self._resumed = saved

    def _begin(self, step: int) -> Ledger:
        saved = self._resumed
        if saved is None:
            refuse_used_directory(self.run_dir, "trainer.resume_mode=auto if verl has saved a checkpoint")
        if step != (there := 0 if saved is None else saved.step):
            raise RunDirectoryError(
                f"{CHECKPOINT}: verl resumes at step {step}, but its checkpoint has Winnow's state of step {there} "
                f"(0: none, it was saved without Winnow); {NEW_RUN}"
            )
        mark = None if saved is None else saved.model_dump(mode="json")["ledger"]
        ledger = open_account(self.run_dir, self.config, self._methods, mark, step)
        offsets = None if saved is None else saved.offsets
        self._records = Records(self.run_dir, as_saved(self.config), offsets, tokenizer=self._tokenizer)
        self._failures = FailureWatch(ledger.failures(), self._methods.judge.success)
        if saved is not None:
            self._restore(saved)
        self._ledger = ledger
        if self._changed:
            self._warn(self._changed)
        return ledger

    def _warn(self, message: str) -> None:
        self._records.warning(self.step, message)
        warnings.warn(message, stacklevel=3)

    def _restore(self, saved: CurriculumState) -> None:
        with understood(CHECKPOINT), at("selector"):
            load_with_audit(self._methods.selector, self._methods.audits.skips, saved.selector)
        self.step, self._totals = saved.step, TokenTotals(num_tokens=saved.num_tokens, num_decoded_tokens=0)
        success = self._methods.judge.success
        if not success.declared:
            success.undecided = success.undecided or saved.undecided
        self._clock.started_at(now(), before=saved.seconds_total)

    def close(self) -> None:
        """Close files; verl itself never calls it."""
        if self._ledger is not None:
            self._records.close()
            self._ledger.close()
            self._ledger = None
