"""Files of a run other than checkpoints and ledger: config, metrics, samples, and the trackers of `report_to`."""

from __future__ import annotations

import fcntl
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from ..base.errors import ExpectedError
from ..base.files import bytes_of, from_json, json_default, private_file
from ..base.sanitize import redact
from ..config.paths import from_saved
from ..methods.gate.signals import table_rows
from ..methods.group_kind import GroupJudge
from ..types import Group
from .ledger import Ledger
from .ledger_file import LEDGER as LEDGER
from .samples import sample
from .trackers import Trackers

CONFIG, METRICS, SAMPLES = "config.json", "metrics.jsonl", "samples.jsonl"
MOST_CONFIG = 16 << 20
"""Largest size of a configuration, in bytes."""
WARNINGS = "warnings.jsonl"
"""Warnings of `Watchdogs`; absent without any."""
PROMPT = "prompt.json"
"""A prompt as the model gets it; absent if an agent writes the prompts."""
CHARTS = "charts.json"
"""Charts that the run's methods define."""
START = "start.json"
"""The ledger's mark before anything was booked, to which a run killed before its first checkpoint returns."""
GATE = "gate.jsonl"
"""Signals for a mid-trajectory gate, for `winnow gate`: written by runs of many turns; with gates only if audits let
groups end that a gate would have cut."""
GATE_STEPS = 12
"""Largest number of environment steps at which it is written."""


class RunDirectoryError(ExpectedError):
    """A run directory is unusable; the message names it and the remedy."""


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the configuration that a run was started with. Raises RunDirectoryError, naming the file."""
    try:
        values = from_json(bytes_of(run_dir / CONFIG, MOST_CONFIG))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{run_dir}: not a run directory ({CONFIG}: {error}); name the output_dir of a run"
        ) from None
    if not isinstance(values, dict):
        raise RunDirectoryError(f"{run_dir / CONFIG}: damaged: a JSON object was expected; restore the file")
    seed = values.get("seed", 0)
    if not isinstance(seed, int):
        raise RunDirectoryError(f"{run_dir / CONFIG}: damaged: seed must be a whole number ({seed}); restore the file")
    return from_saved(values)


def read_metrics(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics.jsonl. Warns of a damaged one, and leaves it out: no state depends on it."""
    with (run_dir / METRICS).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = from_json(line)
                int(row["step"])
            except (ArithmeticError, ValueError, TypeError, KeyError) as error:
                warnings.warn(f"{run_dir / METRICS}:{number}: damaged ({error!r}), so it is left out", stacklevel=2)
                continue
            yield row


def fingerprints_of(run_dir: Path, name: str = "fingerprints") -> dict[str, str]:
    """Return digests of the run's task, tokenizer, base model and reward functions; empty before it has begun.

    `name`: another set of digests from its start, such as `code`; empty for a version that has none.
    """
    if not (run_dir / START).exists():
        return {}
    with Ledger.open(run_dir / LEDGER, read_only=True) as ledger:
        return dict(json.loads(ledger.get_meta(name) or "{}"))


def lock(run_dir: Path) -> IO[str]:
    """Lock the directory until the file is closed. Raises RunDirectoryError when another run has it."""
    file = private_file(run_dir / "run.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        problem = "another run is using this directory; wait for it or choose another output_dir"
        if not isinstance(error, BlockingIOError):
            problem = f"its file system has no locks ({error.strerror}), which SQLite needs, too; put it on another one"
        raise RunDirectoryError(f"{run_dir}: {problem}") from None
    return file


class Records:
    """Appends to the run's files. On a resume, lines beyond the checkpoint's offsets are removed first.

    `settings`: the configuration as it is saved. `offsets`, `step`: those of the checkpoint to resume from.
    `tokenizer`: for the tokens of samples.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: Mapping[str, Any],
        offsets: Mapping[str, int] | None = None,
        *,
        step: int | None = None,
        max_turns: int = 1,
        tokenizer: Any = None,
    ) -> None:
        self.run_dir = run_dir
        every = -(-(max_turns - 1) // GATE_STEPS)
        unbiased = settings["audit"] or not settings["gates"]
        self._gate_steps = range(every, max_turns, every) if every and unbiased else ()
        self._settings = settings
        self.failed = True
        """Whether the run is closed by an error, as trackers report; the session sets it."""
        self._tokenizer = tokenizer
        self._files: dict[str, IO[bytes]] = {}
        with ExitStack() as stack:  # closed if this fails
            for name in (METRICS, SAMPLES, GATE) if self._gate_steps else (METRICS, SAMPLES):
                file = stack.enter_context(private_file(run_dir / name).open("ab"))
                size, wanted = file.tell(), (offsets or {}).get(name, 0)
                if size < wanted:
                    raise RunDirectoryError(
                        f"{run_dir / name}: has {size} bytes, the checkpoint was saved with {wanted}; restore the file"
                    )
                file.truncate(wanted)
                self._files[name] = file
            self._trackers = Trackers(run_dir, settings, step)  # last, since nothing here would close them
            stack.pop_all()

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl and send it to trackers. FloatingPointError on a non-finite value."""
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise FloatingPointError(f"metrics: not finite ({', '.join(bad)})")
        self._append(METRICS, [metrics])
        self.track(metrics)

    def track(self, metrics: Mapping[str, float]) -> None:
        """Send metrics to the trackers alone."""
        self._trackers.log(metrics, int(metrics["step"]))

    def warning(self, step: int, message: str) -> None:
        """Append a line to warnings.jsonl. A resume keeps warnings of voided steps: they were true."""
        with private_file(self.run_dir / WARNINGS).open("ab") as file:
            file.write(json.dumps({"step": step, "warning": redact(message)}).encode() + b"\n")

    def samples(self, step: int, groups: Sequence[Group], split: str) -> None:
        """Append a few groups to samples.jsonl: the first sibling, readable."""
        shown = groups[: self._settings["log_completions"]]
        self._append(SAMPLES, (sample(step, group, split, self._tokenizer) for group in shown))

    def signals(self, groups: Sequence[Group], judge: GroupJudge) -> None:
        """Append divergence signals of groups that ran to their end, unless a gate decided about single siblings."""
        if self._gate_steps:
            whole = [g for g in groups if sum(r.reward is not None for r in g.siblings) > 1]
            whole = [g for g in whole if len({r.survival_p for r in g.siblings}) == 1]
            rows = (row for group in whole for row in table_rows(group, self._gate_steps, judge))
            # Without gates only a group size sets chances, and the groups that it stops are among the rows.
            self._append(GATE, rows if self._settings["gates"] else (row | {"weight": 1.0} for row in rows))

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        file = self._files[name]
        for row in rows:
            line = json.dumps(row, ensure_ascii=True, allow_nan=False, default=json_default)
            file.write(line.encode() + b"\n")
        file.flush()

    def offsets(self) -> dict[str, int]:
        """Return the durable lengths of the files, for a checkpoint."""
        for file in self._files.values():
            os.fsync(file.fileno())
        return {name: file.tell() for name, file in self._files.items()}

    def close(self) -> None:
        with ExitStack() as stack:  # all of them, also after one that fails
            for file in self._files.values():
                stack.callback(file.close)
            self._trackers.close(failed=self.failed)
