"""Checkpoints: every stateful part in one atomic cut.

A checkpoint is a directory `checkpoints/step-000042` with the trained weights (an ordinary Hugging Face or PEFT
directory), the optimizer, `state.json` (everything else, the ledger's mark among it) and `manifest.json` with a SHA-256
per file. It is written under a temporary name; files and directory are fsynced before the rename, the parent after, so
a checkpoint either is whole or is not there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..base.failpoint import failpoint
from ..base.files import fsync, fsync_tree, private_directory, readable, sha256

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message says which file and what to do."""


def save(run_dir: Path, step: int, state: Mapping[str, Any], write: Callable[[Path], None], *, keep_last: int) -> Path:
    """Write one checkpoint and remove the oldest beyond `keep_last`; returns its directory.

    `write` puts weights and optimizer into the directory it is given. A failure (disk full ...) leaves the earlier
    checkpoints as they were.
    """
    root = run_dir / "checkpoints"
    private_directory(root)
    target, temporary = root / f"step-{step:06d}", root / f".writing-step-{step:06d}"
    for leftover in root.glob(".writing-*"):
        shutil.rmtree(leftover)
    try:
        private_directory(temporary)
        write(temporary)
        readable(temporary)
        failpoint("checkpoint.weights")
        (temporary / STATE).write_text(json.dumps(state, indent=1, allow_nan=False), encoding="utf-8")
        _write_manifest(temporary, step)
        failpoint("checkpoint.manifest")
        fsync_tree(temporary)
        failpoint("checkpoint.fsync")
        if target.exists():  # left by an attempt that a resume has rolled back
            shutil.rmtree(target)
        temporary.rename(target)
        failpoint("checkpoint.rename")
        fsync(root)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise CheckpointError(f"{target}: could not be saved: {error}; earlier checkpoints are untouched") from error
    for old in steps(run_dir)[:-keep_last]:
        shutil.rmtree(root / f"step-{old:06d}")
    return target


def _write_manifest(directory: Path, step: int) -> None:
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    entries = {str(p.relative_to(directory)): {"sha256": sha256(p), "bytes": p.stat().st_size} for p in files}
    manifest = {"format": FORMAT, "step": step, "files": entries}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints there are, ascending."""
    names = [re.fullmatch(r"step-([0-9]+)", p.name) for p in (run_dir / "checkpoints").glob("step-*")]
    return sorted(int(name[1]) for name in names if name)


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint, verified; None when there is none. Raises CheckpointError when it is damaged."""
    found = steps(run_dir)
    if not found:
        return None
    directory = run_dir / "checkpoints" / f"step-{found[-1]:06d}"
    try:
        verify(directory)
    except CheckpointError as error:
        earlier = f" To resume from step {found[-2]} instead, remove {directory}." if len(found) > 1 else ""
        raise CheckpointError(f"{error}.{earlier}") from None
    return directory


def verify(directory: Path) -> None:
    """Compare every file with the manifest. Raises CheckpointError naming the first difference."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        entries = {str(name): (int(e["bytes"]), str(e["sha256"])) for name, e in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / MANIFEST}: missing or unreadable ({error!r})") from None
    if STATE not in entries:
        raise CheckpointError(f"{directory / MANIFEST}: does not cover {STATE}")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{directory}: format {manifest.get('format')}, this version reads format {FORMAT}")
    for name, (size, digest) in entries.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if path.stat().st_size != size or sha256(path) != digest:
            raise CheckpointError(f"{path}: damaged (its SHA-256 is not the manifest's)")


def load_state(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
    return state
