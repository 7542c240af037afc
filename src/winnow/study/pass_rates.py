"""`winnow pass-rates`: a pass-rate profile of a model, in a file that survives interruptions.

The file grows by whole chunks of prompts. `<file>.meta.json` next to it records its inputs (`key`), how many of the
task's first training prompts have been tried, and the cost. A file only continues under its own key, in one process at
a time. Its noise is keyed by prompt, so it ends as if never interrupted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..base.failpoint import failpoint
from ..base.files import from_json, write_json
from ..base.weights import weights_digest
from ..env.prompting import tokenizer_digest
from ..methods.pass_rates import BINS, PassRate, ProfileError, histogram, parse_profile, summary
from ..methods.success import Success
from ..rollout.evaluate import RollOut, RolloutsFailedError
from ..rollout.profile import CHUNK, Profiler
from ..run.build_methods import differences, meta_path, profile_settings
from ..run.inputs import build_task
from ..run.standalone import model_config, opened
from ..types import Prompt

COSTS = ("rollouts", "tokens", "seconds")


def profile_model(
    model: str,
    values: Mapping[str, Any],
    *,
    n: int = 16,
    prompts: int | None = None,
    output: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Roll out `n` samples of every training prompt (of the first `prompts`), or reuse a finished file.

    `model` is a run directory (its configuration is the default for `values`), a Hugging Face directory or a hub name.
    Returns counts by pass rate, the file, whether it was `cached`, and the file's cost over all calls (`rollouts`,
    sampled `tokens`, `seconds`). Raises ConfigError on settings that cannot run, ProfileError when `output` belongs to
    another key or another process is writing it, and RolloutsFailedError when no rollout of the first prompts can be
    judged. On an interrupt it raises KeyboardInterrupt with how to resume.
    """
    with ExitStack() as stack:
        config, name, saved = stack.enter_context(model_config(model, values))
        task = build_task(config.env)
        wanted = list(task.train[:prompts])
        policy, roll_out, rewarder, success = stack.enter_context(opened(config, task, wanted, saved))
        success.require()
        key = profile_settings(config, task, rewarder, success) | {  # everything that decides the file's lines
            "weights": weights_digest(policy.model.state_dict()),
            "tokenizer": tokenizer_digest(policy.tokenizer),
            "n": n,
            "seed": config.seed,
        }
        path = output or default_path(task.name, key)
        with ProfileFile(path, key, {"model": name, "task": task.name}) as file:
            cached = file.has(wanted)
            if not cached:
                _fill(file, roll_out, wanted, success, n, console or Console(quiet=True))
            rates = [file.rates[p.id] for p in wanted if p.id in file.rates]
            return {
                "profile": str(path),
                "cached": cached,
                "prompts": len(wanted),
                **summary(rates),
                "unjudged": len(wanted) - len(rates),
                "n": n,
                "temperature": config.temperature,
                **file.cost,
                "histogram": dict(zip(BINS, histogram(rates), strict=True)),
            }


def default_path(task: str, key: Mapping[str, Any]) -> Path:
    """Return `profiles/<task>-<hash of the key>.jsonl` in the working directory."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return Path("profiles") / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', task)}-{digest}.jsonl"


class ProfileFile:
    """A profile under construction: locked, checked against its key, appended to by chunks. A context manager.

    Raises ProfileError when the file has another key, is not a profile, or is being written right now.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], made_with: Mapping[str, str]) -> None:
        self.path = path
        self.meta_path = meta_path(path)
        self.rates: dict[str, PassRate] = {}
        self.tried = 0
        """Number of the task's first prompts that are done; those without a line cannot be judged."""
        self.cost: dict[str, float] = dict.fromkeys(COSTS, 0)
        self._fixed = {"key": json.loads(json.dumps(key)), "made_with": dict(made_with)}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ProfileFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def has(self, prompts: Sequence[Prompt]) -> bool:
        """Return whether a task's first `prompts` are done."""
        return all(p.id in self.rates for p in prompts[self.tried :])

    def append(self, rates: Sequence[PassRate], *, tried: int, cost: Mapping[str, float]) -> None:
        """Add lines, durable on return; then record progress and cost."""
        self._file.write("".join(rate.line() + "\n" for rate in rates).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        failpoint("profile.lines")
        self.rates |= {rate.id: rate for rate in rates}
        self.tried = max(self.tried, tried)
        self.cost = {name: self.cost[name] + cost[name] for name in COSTS}
        self._write_meta()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ProfileError(
                f"{self.path}: another process is writing this profile; wait for it, or choose another file with -o"
            ) from None
        except OSError as error:
            raise ProfileError(
                f"{self.path}: its file system has no locks ({error.strerror}); choose a file elsewhere with -o"
            ) from None

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        if not content:
            self._write_meta()
            return
        self._check_meta()
        whole = content[: content.rfind(b"\n") + 1]
        self.rates = parse_profile(whole, self.path)
        self._file.truncate(len(whole))  # a last line that was being written when the process died

    def _check_meta(self) -> None:
        try:
            meta = from_json(self.meta_path.read_text(encoding="utf-8"))
            key, tried = dict(meta["key"]), int(meta["tried"])
            cost = {name: meta["cost"][name] + 0 for name in COSTS}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProfileError(
                f"{self.path}: there is no telling what it was made for ({self.meta_path.name}: {error!r}); "
                "choose another file with -o, or move this one away"
            ) from None
        if found := differences(key, self._fixed["key"]):
            raise ProfileError(
                f"{self.path}: this profile was made for something else ({found}); choose another file with -o"
            )
        self.tried, self.cost = tried, cost

    def _write_meta(self) -> None:
        write_json(self.meta_path, self._fixed | {"tried": self.tried, "cost": self.cost})


def _fill(
    file: ProfileFile, roll_out: RollOut, prompts: Sequence[Prompt], success: Success, n: int, console: Console
) -> None:
    """Fill the file by chunks with fixed borders, so that a resumed file has the same batches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("profile", total=len(prompts), completed=file.tried)
        for start in range(0, len(prompts), CHUNK):
            stop = min(start + CHUNK, len(prompts))
            todo = [p for p in prompts[max(start, file.tried) : stop] if p.id not in file.rates]
            if not todo:
                continue
            profiler = Profiler(roll_out)
            try:
                rates = list(profiler.run(todo, n=n, success=success))
                success.require()
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"{len(file.rates)} of {len(prompts)} prompts are in {file.path}; the same command goes on"
                ) from None
            if not rates and not file.rates:
                cause = next(iter(profiler.unjudged.values()))
                raise RolloutsFailedError(
                    f"none of the {n * len(todo)} rollouts of the first {len(todo)} prompts could be judged; "
                    f"first cause: {cause}"
                )
            file.append(rates, tried=stop, cost={name: getattr(profiler, name) for name in COSTS})
            s = summary(list(file.rates.values()))
            text = f"dead {s['dead']}  in band {s['in_band']}  solved {s['solved']}"
            progress.update(bar, completed=stop, description=text)


def bars_of(counts: Mapping[str, int]) -> Table:
    """Return a histogram of pass rates for a terminal."""
    most, total = max(*counts.values(), 1), max(sum(counts.values()), 1)
    bars = Table("pass rate", "", "prompts", "", box=None, padding=(0, 1), header_style="dim")
    for label, count in counts.items():
        name = {"0": "dead: 0", "1": "solved: 1"}.get(label, label)
        color = {"0": "red", "1": "blue"}.get(label, "green")
        bars.add_row(name, Bar(most, 0, count, width=40, color=color), str(count), f"{count / total:.1%}")
    for column, justify in zip(bars.columns, ("right", "left", "right", "right"), strict=True):
        column.justify = justify  # type: ignore[assignment]
    return bars
