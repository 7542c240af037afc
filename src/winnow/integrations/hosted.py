"""The account of a run inside another trainer: its files, and what its checkpoints must agree with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.files import private_directory, write_json
from ..config import METHODS, RunConfig
from ..config.paths import as_saved
from ..record.ledger import Ledger
from ..record.records import CHARTS, CONFIG, GATE, LEDGER, METRICS, SAMPLES, WARNINGS, RunDirectoryError
from ..record.resume_keys import MAY_CHANGE_ON_RESUME
from ..run.build_methods import Methods, method_charts

KEPT = frozenset({*METHODS, "audit", "seed", "success"} - MAY_CHANGE_ON_RESUME)
"""Keys that stay the same on a resume."""


def open_account(run_dir: Path, c: RunConfig, methods: Methods, mark: Mapping[str, Any] | None, step: int) -> Ledger:
    """Open the ledger in `run_dir`, and write the run's configuration and charts.

    `mark`: that of the checkpoint of `step`, to which the ledger is rolled back; None for a new run.
    """
    private_directory(run_dir)
    write_json(run_dir / CONFIG, as_saved(c), private=True)
    write_json(run_dir / CHARTS, method_charts(methods.options), private=True)
    ledger = Ledger.open(run_dir / LEDGER)
    ledger.judge = methods.judge
    if mark is not None:
        ledger.rollback(mark, reason=f"resumed from step {step}")
    else:
        ledger.set_meta("max_lag", "0")
        ledger.set_meta("finished", "false")
        ledger.set_meta("hosted", "true")
    ledger.set_meta("success", str(methods.judge.success))
    return ledger


def discard_account(run_dir: Path) -> None:
    """Remove the files of an account in which no step was trained; they are closed."""
    for name in (CONFIG, CHARTS, METRICS, SAMPLES, GATE, WARNINGS, LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm"):
        (run_dir / name).unlink(missing_ok=True)


def keep_from_uploads(run_dir: Path) -> None:
    """Name the account in the .gitignore of the host's folder, which the hub respects: `push_to_hub` takes it all."""
    file, line = run_dir.parent / ".gitignore", f"{run_dir.name}/"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    if line not in lines:
        file.write_text("".join(f"{each}\n" for each in (*lines, line)), encoding="utf-8")


def require_ledger(run_dir: Path, of: object, instead: str) -> None:
    """Raise RunDirectoryError if the ledger that a checkpoint (`of`) continues is not in `run_dir`."""
    if not (run_dir / LEDGER).is_file():
        raise RunDirectoryError(
            f"{run_dir / LEDGER}: missing; {of} continues a ledger; resume with the output_dir that has it, or "
            f"{instead}"
        )


def require_unchanged(where: object, saved: Mapping[str, Any], c: RunConfig, prompts: bool, data_key: str) -> None:
    """Raise RunDirectoryError if a checkpoint is of other methods or data, with both values.

    `saved`: its configuration. `prompts`: whether its prompts are those of now. `data_key`: where they are set.
    """
    now = as_saved(c)
    changed = [
        f"{key} ({_short(saved.get(key))}, now {_short(now.get(key))})"
        for key in sorted(KEPT)
        if saved.get(key) != now.get(key)
    ]
    if changed or not prompts:
        what = ", ".join(changed) or data_key
        raise RunDirectoryError(f"{where}: saved with other {what}; go on with the same, or start a new run")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
