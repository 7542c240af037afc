"""Checkpoints: every stateful part in one atomic snapshot.

A checkpoint is a directory `checkpoints/step-000042` with the trained weights (an ordinary Hugging Face or PEFT
directory), the names of frozen parameters (without LoRA), the optimizer, `state.json` (all other state, including the
ledger's mark) and `manifest.json` with a SHA-256 per file. It is written under a temporary name. Files and directory
are fsynced before the rename and the parent after it, so a checkpoint is either complete or absent.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from safetensors import SafetensorError

from ..base.errors import ConfigError, ExpectedError
from ..base.failpoint import failpoint
from ..base.files import bytes_of, from_json, fsync, fsync_tree, private_directory, readable, sha256
from ..base.state import Count, State, StateError, at
from ..collect import LoopState
from ..record.account import is_hosted
from ..record.ledger import TABLES
from ..record.records import CONFIG, LEDGER, METRICS, SAMPLES, START, RunDirectoryError

MANIFEST = "manifest.json"
STATE = "state.json"
WRITING = ".model"
"""Where a finished run writes its `model/` before it is whole."""
TRL_FOLDER, TRL_STATE = "winnow", "winnow.json"
"""Of a run inside TRL: Winnow's folder in TRL's, and its state in each checkpoint of TRL."""
FORMAT = 1
SINCE = {"0.1": "solved_steps", "0.2": "num_decoded_tokens"}
"""Earlier versions, each with a key of the loop's state that it did not save."""
ABANDONED_S = 86_400.0
"""Age at which a reader's links to a checkpoint are certainly unused."""


class Mark(State):
    """The ledger's mark of one table."""

    last: Count
    rows: Count
    sha256: str


def _of_every_table(marks: dict[str, Mark]) -> dict[str, Mark]:
    if missing := set(TABLES) - set(marks):
        raise ValueError(f"no mark of {', '.join(sorted(missing))}")
    return marks


class SavedAccount(State):
    """Configuration and account of a run, as every checkpoint has them."""

    config: dict[str, Any]
    offsets: dict[str, Count]
    ledger: Annotated[dict[str, Mark], AfterValidator(_of_every_table)]
    code: dict[str, str]
    """Digests of the user's code."""


class SavedState(SavedAccount):
    """State shared by checkpoints of a run and of a run inside TRL."""

    loop: LoopState


class StateInTrl(SavedState):
    task: str
    rewards: str | None = None  # earlier versions did not save them


class RunState(SavedState):
    fingerprints: dict[str, str]
    seconds_total: Annotated[float, Field(ge=0)]


class CheckpointError(ExpectedError):
    """An unusable checkpoint; the message names the file and the remedy."""


def save(
    run_dir: Path, step: int, state: Mapping[str, Any], write: Callable[[Path], None], *, keep_last: int | None
) -> Path:
    """Write one checkpoint and remove the oldest beyond `keep_last` (None: keep all); return its directory.

    `write` receives a directory for weights and optimizer. A failure (disk full ...) leaves the earlier checkpoints
    unchanged.
    """
    root = run_dir / "checkpoints"
    private_directory(root)
    target, temporary = root / _name(step), root / f".writing-{_name(step)}"
    for leftover in root.glob(".removing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        for leftover in root.glob(".writing-*"):
            shutil.rmtree(leftover)
        private_directory(temporary)
        write(temporary)
        readable(temporary)
        failpoint("checkpoint.weights")
        (temporary / STATE).write_text(json.dumps(state, indent=1, allow_nan=False), encoding="utf-8")
        _write_manifest(temporary, step)
        failpoint("checkpoint.manifest")
        fsync_tree(temporary)
        failpoint("checkpoint.fsync")
        replaced = _aside(target) if target.exists() else None  # or from an attempt that a resume rolled back
        temporary.rename(target)
        failpoint("checkpoint.rename")
        fsync(root)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise CheckpointError(f"{target}: could not be saved: {error}; earlier checkpoints are untouched") from error
    for abandoned in root.glob(".reading-*"):
        with suppress(FileNotFoundError):  # its reader has finished
            if time.time() - abandoned.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(abandoned, ignore_errors=True)
    if keep_last is not None:
        for old in steps(run_dir)[:-keep_last]:
            _remove(root / _name(old))
    return target


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _remove(directory: Path) -> None:
    """Remove a checkpoint, renaming it first: a reader must not mistake half of it for a damaged one.

    What cannot be removed now (NFS keeps what somebody reads) goes with the next one.
    """
    shutil.rmtree(_aside(directory), ignore_errors=True)


def _aside(directory: Path) -> Path:
    """Rename a checkpoint that is to be removed. Raises CheckpointError for a link: its target is not the run's."""
    if directory.is_symlink():
        raise CheckpointError(f"{directory}: a symbolic link, not what this run saved; remove it, and resume")
    moved = directory.with_name(f".removing-{time.time_ns()}-{directory.name}")
    return directory.rename(moved)


def _write_manifest(directory: Path, step: int) -> None:
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    entries = {str(p.relative_to(directory)): {"sha256": sha256(p), "bytes": p.stat().st_size} for p in files}
    manifest = {"format": FORMAT, "step": step, "files": entries}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def steps(run_dir: Path) -> list[int]:
    """Return the steps of existing checkpoints, ascending. Raises CheckpointError if they cannot be listed."""
    try:
        names = os.listdir(run_dir / "checkpoints")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{run_dir / 'checkpoints'}: cannot be read ({error.strerror})") from None
    matches = [re.fullmatch(r"step-([0-9]+)", name) for name in names]
    return sorted(int(name[1]) for name in matches if name)


def latest(run_dir: Path) -> Path | None:
    """Return the newest checkpoint, verified; None without one. Raises CheckpointError if it is damaged."""
    saved_steps = steps(run_dir)
    if not saved_steps:
        return None
    directory = run_dir / "checkpoints" / _name(saved_steps[-1])
    try:
        verify(directory)
    except CheckpointError as error:
        earlier = f" To resume from step {saved_steps[-2]} instead, remove {directory}." if len(saved_steps) > 1 else ""
        raise CheckpointError(f"{error}.{earlier}") from None
    return directory


@contextmanager
def newest_model(run_dir: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the finished model, else that of the newest checkpoint, verified; and where it belongs.

    A run in progress removes old checkpoints; inside the block this one stays, as links to its files. Raises
    ConfigError when there is no model yet, CheckpointError if the checkpoint is damaged.
    """
    if (run_dir / "model").is_dir():
        yield run_dir / "model", run_dir / "model"
        return
    root = run_dir / "checkpoints"
    with tempfile.TemporaryDirectory(prefix=".reading-", dir=root if os.access(root, os.W_OK) else None) as own:
        saved = None
        while saved is None and (saved_steps := steps(run_dir)):
            saved = _linked(root / _name(saved_steps[-1]), Path(own))
        if saved is None:
            if is_hosted(run_dir):
                raise ConfigError(f"{run_dir}: is the account of a run inside TRL or verl; name a model that it saved")
            raise ConfigError(f"{run_dir}: no finished model or checkpoint yet; train longer")
        yield saved / "model", root / saved.name / "model"


def _linked(directory: Path, into: Path) -> Path | None:
    """Return a linked copy; None if the run has removed the checkpoint, which implies a newer one."""
    target = into / directory.name
    try:
        shutil.copytree(directory, target, copy_function=_link)
        verify(target)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(target, ignore_errors=True)
        if not directory.exists():
            return None
        raise CheckpointError(str(error).replace(str(target), str(directory))) from None
    return target


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or another user's files
        shutil.copyfile(source, target)


def verify(directory: Path) -> None:
    """Compare every file with the manifest. Raises CheckpointError naming the first difference."""
    try:
        manifest = from_json(bytes_of(directory / MANIFEST))
        entries = {str(name): (int(e["bytes"]), str(e["sha256"])) for name, e in manifest["files"].items()}
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / MANIFEST}: missing or unreadable ({error!r})") from None
    if STATE not in entries:
        raise CheckpointError(f"{directory / MANIFEST}: does not cover {STATE}")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{directory}: format {manifest.get('format')}, this version reads format {FORMAT}")
    for name, (size, digest) in entries.items():
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{directory / MANIFEST}: names {name!r}, which is outside of its directory")
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if path.stat().st_size != size or sha256(path) != digest:
            raise CheckpointError(f"{path}: damaged (its SHA-256 is not the manifest's)")


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # a run in progress has removed it
        return 0.0


def marks(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the ledger's marks of points that this run can resume from, by name: its start, its newest checkpoint.

    Includes those of a run inside TRL, whose checkpoints are next to `run_dir`. If a run in progress removes a
    checkpoint, the next one's mark applies. Raises CheckpointError naming an existing file that cannot be read.
    """
    saved = [run_dir / "checkpoints" / _name(step) / STATE for step in steps(run_dir)[-1:]]
    folder = run_dir.resolve()
    found = folder.parent.glob(f"checkpoint-[0-9]*/{TRL_STATE}") if folder.name == TRL_FOLDER else ()
    of_trl = sorted(found, key=_modified_at)  # a resume from an older one leaves later ones, and touches it
    by_file = {}
    for path in (run_dir / START, *saved, *of_trl[-1:]):
        try:
            values = from_json(bytes_of(path, sys.maxsize))
            by_file[os.path.relpath(path, run_dir)] = values if path.name == START else dict(values["ledger"])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged or unreadable ({error!r})") from None
    return by_file


def parsed(file: Path) -> dict[str, Any]:
    """Return the JSON of a state. Raises ValueError if it is not JSON, or a number is not finite or too large for
    arrays and databases; CheckpointError if an earlier version saved it."""

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"the number {text:.50} is not finite")
        return value

    def whole(text: str) -> int:
        if abs(value := int(text)) >= 1 << 63:
            raise ValueError(f"the number {text:.50} is too large")
        return value

    text = bytes_of(file, sys.maxsize).decode()
    state: dict[str, Any] = from_json(text, parse_float=number, parse_constant=number, parse_int=whole)
    _refuse_earlier(file, state)
    return state


def _refuse_earlier(file: Path, state: Any) -> None:
    """Raise CheckpointError if an earlier version saved the state; a new run can start from its weights."""
    loop = state.get("loop") if isinstance(state, Mapping) else None
    if not isinstance(loop, Mapping) or not {"step", "num_tokens", "selector"} <= loop.keys():
        return  # of no version
    version = next((version for version, key in SINCE.items() if key not in loop), None)
    if version is not None:
        raise CheckpointError(
            f"{file}: saved by Winnow {version}, which this version cannot resume; start a new run "
            "from the weights of this checkpoint"
        )


def load_run_state(directory: Path) -> dict[str, Any]:
    """Return the saved state of a session. Raises CheckpointError naming the invalid part."""
    with understood(directory / STATE):
        state = parsed(directory / STATE)
        RunState.of(state)
        if directory.name != _name(step := state["loop"]["step"]):
            raise ValueError(f"of step {step}, in {directory.name}")
        return state


def load_state_in_trl(file: Path) -> dict[str, Any]:
    """Return the saved state of a run inside TRL. Raises CheckpointError as `load_run_state` does."""
    with understood(file):
        try:
            state = parsed(file)
        except ValueError as error:  # no Winnow manifest covers this file
            raise CheckpointError(f"{file}: damaged ({error}); resume from another checkpoint") from None
        StateInTrl.of(state)
        return state


@contextmanager
def understood(file: Path) -> Iterator[None]:
    """Turn any error of restoring a state into a CheckpointError: the file is intact, but from another version."""
    try:
        with at("state"):
            yield
    except StateError as error:
        raise CheckpointError(
            f"{file}: not what this version saves ({error!s:.300}); "
            "it is of another program or version. Resume from another checkpoint, or start a new run"
        ) from error


def refuse_used_directory(run_dir: Path, go_on: str | None = None) -> None:
    """Raise RunDirectoryError if a run was begun there, or somebody else's files have names that a run would take.

    `go_on`: how to resume it; empty if it cannot be.
    """
    there = next((path for path in (run_dir, *run_dir.parents) if path.exists()), run_dir)
    if there.exists() and not there.is_dir():
        raise RunDirectoryError(f"output_dir: {there} is a file; choose another")
    used = [name for name in (CONFIG, LEDGER, START, "checkpoints") if (run_dir / name).exists()]
    foreign = [name for name in ("model", METRICS, SAMPLES) if (run_dir / name).exists()]
    if foreign and not used:
        raise RunDirectoryError(
            f"{run_dir}: has {', '.join(foreign)}, which a run would replace; choose another output_dir"
        )
    if used:
        go_on = f"`winnow resume {run_dir}` (Trainer.resume in Python)" if go_on is None else go_on
        resume = f"go on with {go_on}, or " if go_on else ""
        raise RunDirectoryError(
            f"{run_dir}: already holds a run ({', '.join(used)}); {resume}choose another output_dir"
        )
