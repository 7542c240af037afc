"""`winnow tune`: measure this machine, predict the seconds of other settings, run the best few, and choose.

1. Measure: short real runs of a few batch and group sizes, without learning. Costs are fitted to their steps, except
   for those of one setting, which tests the fit.
2. Simulate: one key after another takes the value with the fewest predicted seconds to equal signal.
3. Run the given configuration and the best few for equal seconds on a seed of their own, with held-out evaluations.
4. Run the winner at other learning rates.

Every finished run is saved, so that an interrupted call continues.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, TypeAdapter

from ..base.errors import ConfigError
from ..base.files import digest, from_json, private_directory, write_json
from ..base.machine import usable_threads
from ..config import RunConfig, validate
from ..engine.loading import resolve_device
from ..env.base import Task
from ..methods.pass_rates import PassRate
from ..methods.select import SELECTORS
from ..methods.size import ROLLOUT_BATCHES
from ..record.stop_conditions import RunStoppedError
from ..run.inputs import build_task
from ..run.preflight import in_steps
from .brief_runs import LEAST_STEPS, TUNING_SEED, BriefRun, Limits, run_briefly
from .costs import Costs, Shapes
from .simulate import policy_of
from .timeline import Machine, Prediction, predict

SIZES = ((1, 1), (0.25, 0.5), (0.5, 1), (1, 2), (2, 1))
"""Batch and group sizes of the measured settings, relative to the configuration's."""
HELD_OUT = (0.5, 2)
MEASURED_STEPS = 7
"""Steps of a measured setting; the first does not count."""
UNTIL = {"measure": 0.25, "simulate": 0.4, "run": 0.75, "learning rate": 1.0}
"""Share of the minutes after which each part ends."""
CONTENDERS = 3
GIVEN = "given"
"""Name of the run without changes."""
WORTHWHILE = 0.03
"""Share of seconds that a change must save to be made."""
RATES = (0.5, 2.0)
MOST_GROUPS, FEWEST_GROUPS = 8_000, 200
"""Groups trained in a simulation."""
SIMULATIONS = 30
"""Simulations that a search takes, about."""
FOLLOWS = "follows prompts_per_step by its square root"
FORMAT = 2
"""Of state.json; files of another one are refused."""
WHILE_MEASURING = (
    *("selector", "group_size", "gates", "audit", "reuse", "sync"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "lr_end", "lr_decay_steps", "warmup_steps"),
)
"""Keys at their default while costs are measured, at a learning rate of 0, which some schedules refuse."""


class Tuning:
    """A call of `winnow tune`. `say` receives progress lines; `clock` measures seconds of steps."""

    def __init__(
        self,
        c: RunConfig,
        folder: Path,
        minutes: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.task: Task = build_task(c.env)
        self.c = in_steps(c, len(self.task.train))
        self.folder, self.say, self.clock = folder, say, clock
        self.notes: list[str] = []
        self.reasons: dict[str, dict[str, str]] = {}
        """Why each key takes its value, by the text of all changes."""
        self._groups = min(MOST_GROUPS, self.c.max_steps * self.c.prompts_per_step)
        self._seconds, self._began = 60 * minutes, clock()
        private_directory(folder)
        self._file, self._key = folder / "state.json", digest([FORMAT, c.model_dump(mode="json")])
        saved: dict[str, Any] = {"key": self._key, "seconds": 0.0, "runs": {}, "search": None}
        if self._file.exists():
            saved = from_json(self._file.read_text(encoding="utf-8"))
        if saved["key"] != self._key:
            raise ConfigError(f"{folder}: holds the runs of another configuration; remove it, or choose another -o")
        self.runs = TypeAdapter(dict[str, BriefRun]).validate_python(saved["runs"])
        self._before, self._search = float(saved["seconds"]), saved["search"]

    def left(self, part: str) -> float:
        """Return the seconds until `part` has to end."""
        return UNTIL[part] * self._seconds - self._before - (self.clock() - self._began)

    def note(self, line: str) -> None:
        self.notes.append(line)
        self.say(line)

    def _save(self) -> None:
        seconds = self._before + self.clock() - self._began
        runs = {name: asdict(run) for name, run in self.runs.items()}
        write_json(self._file, {"key": self._key, "seconds": seconds, "runs": runs, "search": self._search})

    # ---- real runs -----------------------------------------------------------------------------------------------

    def run(
        self, name: str, changes: Mapping[str, Any], limits: Limits, prediction: Prediction | None = None
    ) -> BriefRun:
        """Return the run of this name; make and save it if it is new."""
        if name not in self.runs:
            self.runs[name] = run = BriefRun(dict(changes))
            try:
                run_briefly(self.c, run, str(self.folder / "run"), self.clock, limits)
            except BaseException:
                del self.runs[name]
                raise
            if prediction is not None and prediction.seconds and run.warm:
                run.predicted = float(np.mean(prediction.seconds[1 : len(run.steps)]))
            self._save()
            self.say(f"{name}: {run.stopped or run}")
        return self.runs[name]

    # ---- measure -------------------------------------------------------------------------------------------------

    def measure(self) -> Machine:
        """Run a few settings without learning, and fit costs to their steps. Raises ConfigError if none can run."""
        c, fitted = self.c, list[BriefRun]()
        plain = {key: RunConfig.model_fields[key].get_default() for key in WHILE_MEASURING} | {"learning_rate": 0.0}
        sizes = list(dict.fromkeys((*map(self._sizes, SIZES), self._sizes(HELD_OUT))))
        for number, (prompts, siblings) in enumerate(sizes):
            last = number == len(sizes) - 1 > 0
            name = "held out" if last else f"fit {number + 1}"
            if fitted and self.left("measure") <= 0 and name not in self.runs:
                self.note("minutes: too few to measure every batch and group size; predictions are less certain")
                break
            sized = {"prompts_per_step": prompts, "num_generations": siblings}
            changes = plain | sized | {"seed": c.seed + TUNING_SEED + number}
            prediction = self._predicted(changes, self._machine(fitted), MEASURED_STEPS) if last else None
            seconds = max(1.0, self.left("measure")) / (len(sizes) - number)
            run = self.run(name, changes, Limits(seconds, MEASURED_STEPS, measures=True), prediction)
            if not fitted and not run.warm:
                raise ConfigError(run.stopped or "max_steps: tuning needs runs of at least 2 steps; raise it")
            fitted += [run] if run.warm and not last else []
        return self._machine(fitted)

    def _sizes(self, times: tuple[float, float]) -> tuple[int, int]:
        prompts, siblings = self.c.prompts_per_step, self.c.num_generations
        return max(1, round(times[0] * prompts)), max(2, round(times[1] * siblings))

    def _machine(self, runs: Sequence[BriefRun]) -> Machine:
        seen = [each for run in runs for each in run.seen]
        answers: dict[str, list[bool]] = {}
        for each in seen:
            answers.setdefault(each.prompt, []).extend(each.right)
        rates = {p: PassRate(p, len(right), sum(right), float(np.mean(right))) for p, right in answers.items()}
        policy = policy_of(self.task.train, rates, self.c.seed)
        costs = Costs.fitted([step for run in runs for step in run.warm])
        update_s = sum(costs.of(run.ratios_work, "update") for run in runs)
        ratios = sum(run.ratios_s for run in runs) / max(1e-9, update_s)
        return Machine(costs, Shapes(seen), policy, runs[0].slots, ratios, resolve_device(self.c.device).type)

    # ---- simulate ------------------------------------------------------------------------------------------------

    def _predicted(self, changes: Mapping[str, Any], machine: Machine, steps: int | None = None) -> Prediction:
        """Predict a run of `steps`; by default of as many groups as the configuration trains on, up to a limit."""
        c = validate(self.c.model_dump() | dict(changes))
        if steps is None:
            steps = max(2, self._groups // c.prompts_per_step)
        c = c.model_copy(update={"max_steps": steps, "max_skipped_steps": 1 << 30})
        return predict(c, self.task.train, machine)

    def search(self, machine: Machine) -> list[tuple[dict[str, Any], Prediction]]:
        """Return changes with their predictions, best first, the given configuration (no changes) among them."""
        if self._search is None:
            tried = sorted(self._tried(machine), key=lambda each: each[1].per_signal)
            ranked = [(changes, asdict(prediction)) for changes, prediction in tried]
            self._search = {"ranked": ranked, "reasons": self.reasons, "notes": self.notes}
            self._save()
        self.reasons, self.notes = dict(self._search["reasons"]), list(self._search["notes"])
        return [(changes, Prediction(**prediction)) for changes, prediction in self._search["ranked"]]

    def _tried(self, machine: Machine) -> list[tuple[dict[str, Any], Prediction]]:
        started, left = self.clock(), self.left("simulate")
        given = self._predicted({}, machine)
        if (long := self.clock() - started) > left / SIMULATIONS:
            self._groups = max(FEWEST_GROUPS, int(self._groups * left / SIMULATIONS / long))
            self.note(f"minutes: simulations end after {self._groups} groups")
            given = self._predicted({}, machine)
        tried: list[tuple[dict[str, Any], Prediction]] = [({}, given)]
        best, of_best = tried[0]
        for name, options in self._dimensions():
            found = best, of_best
            for option in options:
                changes = self._with_rate(best | option)
                if self.left("simulate") <= 0:
                    self.note(f"minutes: too few to simulate everything; {name} and what follows were left out")
                    return tried
                if changes == best or not changes:
                    continue
                try:
                    prediction = self._predicted(changes, machine)
                except (ConfigError, RunStoppedError):  # these settings do not go together
                    continue
                tried.append((changes, prediction))
                saved = 1 - prediction.per_signal / of_best.per_signal
                reason = f"{abs(saved):.0%} {'fewer' if saved > 0 else 'more'} seconds to equal signal, by prediction"
                changed = [key for key, value in changes.items() if (key, value) not in best.items()]
                new = {key: reason if key in option else FOLLOWS for key in changed}
                self.reasons[_text(changes)] = self.reasons.get(_text(best), {}) | new
                if prediction.per_signal < (1 - WORTHWHILE) * found[1].per_signal:
                    found = tried[-1]
            best, of_best = found
            self.say(f"{name}: {of_best.per_signal / given.per_signal:.2f} of the given configuration's seconds")
        return tried

    def _dimensions(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yield what is tried, one dimension after another."""
        c = self.c
        yield "selector", [{"selector": name} for name, cls in SELECTORS.items() if getattr(cls, "wants_signal", False)]
        rounds = [{"rollout_batch": name, "max_lag": lag} for name in ROLLOUT_BATCHES for lag in (0, 1)]
        yield "rollout batch and lag", rounds
        yield "group size", [{"num_generations": self._sizes((1, x))[1]} for x in (0.5, 2)]
        yield "batch", [{"prompts_per_step": self._sizes((x, 1))[0]} for x in (0.5, 2)]
        yield "reuse", [{"reuse": None}, *({"reuse": {"updates": n}} for n in (2, 4))]
        if (cores := usable_threads()) > 1:
            default = RunConfig.model_fields["rollout_batch"].default
            processes = [{"name": "processes", "samplers": n} for n in sorted({1, cores - 1})]
            lag = {"rollout_batch": default, "max_lag": max(1, c.max_lag)}
            overlap = {"sync": {"name": "in_process", "overlap": True}}
            ahead = [
                overlap | {"rollout_batch": default, "max_lag": 1},
                overlap | {"rollout_batch": "adaptive", "max_lag": 2},
                {"sync": overlap["sync"] | {"lag": "continuous"}, "rollout_batch": default, "max_lag": 4},
            ]
            yield "samplers", [*ahead, *(lag | {"sync": sync} for sync in processes)]
        else:
            self.note(
                "samplers: this process may use one core (OMP_NUM_THREADS, its affinity or its container); none are "
                "tried in processes of their own"
            )

    def _with_rate(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return what differs from the given configuration; the learning rate follows the batch by its square root."""
        ratio = changes.get("prompts_per_step", self.c.prompts_per_step) / self.c.prompts_per_step
        rate = self.c.learning_rate if ratio == 1 else float(f"{self.c.learning_rate * ratio**0.5:.3g}")
        return {k: v for k, v in (changes | {"learning_rate": rate}).items() if _plain(getattr(self.c, k)) != v}

    # ---- run and choose ------------------------------------------------------------------------------------------

    def contend(self, ranked: Sequence[tuple[dict[str, Any], Prediction]]) -> BriefRun:
        """Run the given configuration and the best predicted ones for equal seconds; return the best run.

        The best has the fewest seconds for its signal among those with at least the given one's mean pass@1.
        """
        given = next(prediction for changes, prediction in ranked if not changes)
        few = [each for each in ranked if each[1].per_signal < given.per_signal][:CONTENDERS]
        most = min(self.left("run") / (1 + len(few)), self.left("learning rate") / (1 + len(few) + len(RATES)))
        runs = [self.run(GIVEN, {}, Limits(most), given)]
        if not runs[0].warm:
            raise ConfigError(runs[0].stopped)
        seconds = sum(sum(step.seconds.values()) for step in runs[0].steps)
        for number, (changes, prediction) in enumerate(few):
            short = self.left("run") < max(seconds, LEAST_STEPS * prediction.per_step)
            if short and _text(changes) not in self.runs:
                self.note(f"minutes: too few to run {len(few) - number} of {len(few)} predicted settings")
                break
            runs.append(self.run(_text(changes), changes, Limits(seconds), prediction))
        least = runs[0].mean_passed
        fit = [run for run in runs if run.warm and not run.stopped and not run.mean_passed < least]
        return min(fit or runs[:1], key=lambda run: run.per_signal)

    def choose_rate(self, best: BriefRun) -> BriefRun:
        """Run the best settings at other learning rates; return the run whose mean pass@1 stands out, or the best."""
        if not best.passed or math.isnan(best.mean_passed):
            self.note("learning rate: not tried, as held-out prompts or a definition of right answers are missing")
            return best
        if 3 * self.c.warmup > len(best.steps):
            self.note(f"learning rate: not tried, as {len(best.steps)} steps are mostly the warm-up of {self.c.warmup}")
            return best
        seconds = sum(sum(step.seconds.values()) for step in best.steps)
        rate, runs = best.changes.get("learning_rate", self.c.learning_rate), [best]
        for number, times in enumerate(RATES):
            changes = best.changes | {"learning_rate": float(f"{times * rate:.3g}")}
            if self.left("learning rate") < 0.7 * seconds and _text(changes) not in self.runs:
                self.note(f"minutes: too few to try {len(RATES) - number} of {len(RATES)} other learning rates")
                break
            runs.append(self.run(_text(changes), changes, Limits(seconds)))
        highest = max((run for run in runs if not run.stopped), key=lambda run: run.mean_passed, default=best)
        if highest is not best and highest.mean_passed < best.mean_passed + self._noise(best):
            means = ", ".join(f"{run.changes.get('learning_rate', rate):g}: {run.mean_passed:.3f}" for run in runs)
            self.note(f"learning rate: kept; the minutes were too few to tell the rates apart (mean pass@1 {means})")
            return best
        if highest is not best:
            means = f"{highest.mean_passed:.3f}, at {rate:g} {best.mean_passed:.3f}"
            new = {"learning_rate": f"mean held-out pass@1 over {seconds:.0f} s is {means}"}
            self.reasons[_text(highest.changes)] = self.reasons.get(_text(best.changes), {}) | new
        return highest

    def _noise(self, run: BriefRun) -> float:
        """Return the standard error of a held-out pass@1 by the number of prompts."""
        prompts = max(1, min(self.c.eval_prompts, len(self.task.test)))
        return math.sqrt(max(run.mean_passed * (1 - run.mean_passed), 0.0) / prompts)


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


def _text(changes: Mapping[str, Any]) -> str:
    """Return changes as `key=value ...`."""
    return " ".join(f"{key}={v if isinstance(v, str) else dumps(v)}" for key, v in changes.items()) or GIVEN


def tune(
    c: RunConfig,
    folder: Path,
    minutes: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Return the changes that make runs of `c` fastest here, with reasons, costs, predictions and measurements.

    `folder` keeps the finished runs. Raises ConfigError when the configuration cannot run, KeyboardInterrupt with how
    to continue.
    """
    tuning = Tuning(c, folder, minutes, say, clock)
    ranked: list[tuple[dict[str, Any], Prediction]] = [({}, Prediction([], 0.0, {}))]
    machine: Machine | None = None
    try:
        try:
            if tuning.task.max_turns > 1:
                raise ConfigError("env: lengths of rollouts with several turns cannot be simulated")
            machine = tuning.measure()
            ranked = tuning.search(machine)
        except ConfigError as error:
            tuning.note(f"only the learning rate is tried; {error}")
        best = tuning.contend(ranked)
        say(f"best: {_text(best.changes)}")
        best = tuning.choose_rate(best)
        batch = best.changes.get("prompts_per_step", c.prompts_per_step) / c.prompts_per_step
        if batch != 1 and c.num_train_epochs is None:
            tuning.note(f"max_steps is as it was, so the run trains on {batch:g} times as many groups")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(tuning.runs)} runs are in {folder}; the same command continues") from None
    return {
        "changes": best.changes,
        "reasons": {key: tuning.reasons[_text(best.changes)][key] for key in best.changes},
        "costs_s": {} if machine is None else machine.costs.seconds,
        "predicted": [_of_prediction(*each) for each in ranked if each[1].seconds],
        "runs": [_of_run(name, run) for name, run in tuning.runs.items() if run.warm],
        "notes": tuning.notes,
    }


def _of_prediction(changes: Mapping[str, Any], prediction: Prediction) -> dict[str, Any]:
    return {"settings": _text(changes), "step_s": prediction.per_step, "signal_s": prediction.per_signal}


def _of_run(name: str, run: BriefRun) -> dict[str, Any]:
    measured = {"settings": name, "steps": len(run.steps), "step_s": run.per_step, "signal_s": run.per_signal}
    return measured | {"predicted_step_s": run.predicted, "error": run.error, "pass@1": run.passed}
