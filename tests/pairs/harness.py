"""One composition of settings: refused at the start by name, or run, killed, resumed and compared. No third case."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from winnow import ConfigError, Trainer
from winnow.record.ledger import Ledger
from winnow.study.report import write_report

from ..builders.runs import WALL_CLOCK, assert_clean, fingerprint, metrics_of
from .variants import MODEL, PROFILE, Settings
from .world import World

STEPS = 3
BASE: Settings = {
    "env": "world",
    "max_steps": STEPS,
    "prompts_per_step": 3,
    "num_generations": 4,
    "max_prompt_length": 16,
    "max_completion_length": 12,
    "learning_rate": 1e-2,
    "save_steps": 1,
    "save_total_limit": 20,
    "max_failed_share": 1.0,
    "log_completions": 1,
}
NO_STATE = WALL_CLOCK
"""Wall-clock times within the state of a loop."""


@dataclass(frozen=True)
class Place:
    """Where runs take place: a folder of their own, the model, and the file of pass rates."""

    folder: Path
    model: Path
    profile: Path

    def config(self, settings: Settings) -> Settings:
        """The whole configuration of a composition."""
        return _filled(BASE | settings | {"model": str(self.model), "output_dir": str(self.folder / "whole")}, self)

    def clear(self) -> None:
        """Remove the runs."""
        for name in ("whole", "part"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


@dataclass
class Outcome:
    """What became of a composition."""

    refused: str = ""
    """The message, if it was refused."""
    fates: Counter[str] = field(default_factory=Counter)
    """Rollouts by fate; visits that were skipped."""
    updates: int = 0


def has_agents(settings: Settings) -> bool:
    """Return whether a composition takes rewards by agent: unbiased sizes do not."""
    size = settings.get("group_size")
    return not (isinstance(size, dict) and size.get("unbiased"))


def _filled(value: Any, place: Place) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, place) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, place) for inner in value]
    return {PROFILE: str(place.profile), MODEL: str(place.model)}.get(value, value) if isinstance(value, str) else value


def check(place: Place, settings: Settings, kill_after: int, *, alike: bool = False) -> Outcome:
    """Run a composition. Raises AssertionError, or whatever the run raises, when it is neither refused nor right.

    `kill_after`: the checkpoint that the run is resumed from; it is killed in the middle of a rollout of the next step.
    `alike`: of the world's prompts.
    """
    config = place.config(settings)
    kill_after = max(kill_after, config["save_steps"])
    whole, part = place.folder / "whole", place.folder / "part"
    world = World(agents=has_agents(settings), alike=alike)
    refused = ""
    try:
        trainer = Trainer(config=config, env=world)
    except ConfigError as error:
        refused = str(error)
    if refused:
        assert any(key in refused for key in settings), f"refused without naming one of {[*settings]}: {refused}"
        assert not whole.exists(), "refused, but something was written"
        return Outcome(refused)

    def kill() -> None:
        """Keep what a kill would leave at this moment."""
        if not part.exists() and (whole / "checkpoints" / f"step-{kill_after:06d}").exists():
            shutil.copytree(whole, part)

    world.on_step = kill
    trainer.train()
    if not part.exists():  # no rollout since the checkpoint: go back to it from the end
        shutil.copytree(whole, part)
        for step in range(kill_after + 1, STEPS + 1):
            shutil.rmtree(part / "checkpoints" / f"step-{step:06d}")
    outcome = examine(whole, config)
    Trainer.resume(part, env=World(agents=has_agents(settings), alike=alike)).train()
    assert_clean(part)
    assert_same(whole, part)
    return outcome


def check_sharing(place: Place, settings: Settings) -> Outcome:
    """Run a composition whose rollouts share places, and again from its first checkpoint.

    Answers arrive in any order then, so rounding may differ: the account must be clean, and bits are not compared.
    """
    config = place.config(settings)
    Trainer(config=config, env=World(sharing=True)).train()
    whole = Path(config["output_dir"])
    outcome = examine(whole, config)
    for checkpoint in sorted((whole / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(checkpoint)
    Trainer.resume(whole, env=World(sharing=True)).train()
    examine(whole, config)
    return outcome


def examine(run: Path, config: Settings) -> Outcome:
    """Raises AssertionError unless ledger, metrics and weights of a finished run are sound and agree."""
    assert_clean(run)
    rows = metrics_of(run)
    for row in rows:
        wrong = {k: v for k, v in row.items() if not isinstance(v, int | float) or not math.isfinite(v)}
        assert not wrong, f"metrics of step {row['step']} are not finite: {wrong}"
    steps = [row for row in rows if row["step"]]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for file in sorted((run / "checkpoints").rglob("*.safetensors")):
        wrong = [name for name, tensor in load_file(file).items() if not torch.isfinite(tensor).all()]
        assert not wrong, f"{file.relative_to(run)}: not finite: {wrong}"
    write_report([run], run / "report.html")
    with sqlite3.connect(run / "ledger.sqlite") as db:
        _examine_counts(db, steps, config)
        fates = Counter(dict(db.execute("SELECT fate, COUNT(*) FROM rollouts WHERE void = 0 GROUP BY fate")))
        fates["skipped"] = db.execute("SELECT COUNT(*) FROM outcomes WHERE fate = 'skipped'").fetchone()[0]
        fates["late"] = db.execute(
            "SELECT COUNT(*) FROM rollouts JOIN steps USING (step) WHERE fate = 'trained' AND version > first_version"
        ).fetchone()[0]
    fates["audited"] = sum(int(value) for key, value in rows[-1].items() if fnmatch(key, "audit/*/audited"))
    return Outcome(fates=+fates, updates=sum(int(row["updated"]) for row in steps))


def _examine_counts(db: sqlite3.Connection, steps: Sequence[Mapping[str, float]], config: Settings) -> None:
    """Groups, rollouts and tokens that the metrics tell of are those that the ledger holds."""

    def one(query: str, *parameters: Any) -> Any:
        return db.execute(query, parameters).fetchone()[0]

    for row in steps:
        assert row["groups/effective"] <= config["prompts_per_step"], row
        groups = row["groups/effective"] - row.get("reuse/groups", 0)
        trained = one(
            "SELECT COUNT(DISTINCT visit) FROM rollouts WHERE void = 0 AND fate = 'trained' AND step = ?",
            row["step"] - 1,
        )
        wrong = f"step {row['step']}: {groups} groups, but {trained} were trained"
        assert trained <= groups * row["updated"], wrong
        if not config.get("mask_truncated_completions"):  # with it, a group of truncated rollouts alone has no row
            assert trained == groups * row["updated"], wrong
        for name, value in row.items():
            assert not name.endswith(("share", "_ratio")) or -1e-9 <= value <= 1 + 1e-6, (name, value)
        late = one(
            "SELECT COUNT(*) FROM rollouts WHERE void = 0 AND fate = 'trained' AND step = ? AND first_version < ?",
            row["step"] - 1,
            row["step"] - 1,
        )
        sampled_now = not late and not row.get("reuse/groups", 0)
        engine = config.get("engine")
        types = {
            config.get("dtype", "float32"),
            engine.get("dtype", "float32") if isinstance(engine, dict) else "float32",
        }
        exact = sampled_now and config.get("num_iterations", 1) == 1 and types == {"float32"}
        difference = row.get("sampling/sampling_logp_difference/max", 0.0)
        assert difference < 1e-4 or not exact, f"step {row['step']}: learner and engine differ by {difference}"
    assert one("SELECT COUNT(*) FROM rollouts WHERE void = 0 AND NOT (survival_p > 0 AND survival_p <= 1)") == 0
    cut = "SELECT visit FROM rollouts WHERE void = 0 AND fate = 'cut'"
    assert one(f"SELECT COUNT(*) FROM rollouts WHERE void = 0 AND fate = 'trained' AND visit IN ({cut})") == 0
    sync = config.get("sync")
    if isinstance(sync, dict) and (sync["name"] != "in_process" or sync.get("lag") == "continuous"):
        return  # what is in flight at the end is in no step's metrics
    rolled_out = sum(row["groups/rolled_out"] for row in steps)
    assert rolled_out == one("SELECT COUNT(*) FROM outcomes WHERE void = 0 AND fate <> 'skipped'")
    sampled, booked = sum(row["rollouts/sampled"] for row in steps), one("SELECT COUNT(*) FROM rollouts WHERE void = 0")
    assert booked == sampled, f"{booked} rollouts are booked, {sampled} were counted"
    assert steps[-1]["num_tokens"] == one("SELECT SUM(tokens) FROM rollouts WHERE void = 0")


def assert_same(whole: Path, part: Path) -> None:
    """A resumed run has the weights, optimizer, metrics, ledger and state of one that nothing has interrupted."""
    one, other = fingerprint(whole), fingerprint(part)
    for a, b in zip(one["metrics"], other["metrics"], strict=True):
        wrong = {key: (a.get(key), b.get(key)) for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
        assert not wrong, f"metrics of step {a['step']} differ after a resume: {wrong}"
    wrong_states = list(_differences(_state(whole), _state(part)))
    assert not wrong_states, f"the state differs after a resume: {wrong_states[:5]}"
    assert one["weights"] == other["weights"], "weights or optimizer differ after a resume"
    assert one["ledger"] == other["ledger"], f"the ledger differs after a resume: {_ledger_rows(whole, part)}"


def _state(run: Path) -> Any:
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    return json.loads((last / "state.json").read_text())["loop"]


def _differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            if key not in NO_STATE:
                yield from _differences(a.get(key), b.get(key), f"{where}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(one, other, f"{where}[{i}]")
    elif a != b:
        yield f"{where}: {str(a)[:80]} then, {str(b)[:80]} resumed"


def _ledger_rows(whole: Path, part: Path) -> list[str]:
    """The first rows that differ, for a message that helps."""
    found = []
    for query in ("SELECT visit, sibling, fate, reason, tokens, reward, survival_p FROM rollouts WHERE void = 0",):
        rows = []
        for run in (whole, part):
            with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
                rows.append(sorted(ledger._db.execute(query).fetchall()))
        found += [f"{a} then, {b} resumed" for a, b in zip(*rows, strict=False) if a != b][:3]
        if len(rows[0]) != len(rows[1]):
            found.append(f"{len(rows[0])} rows then, {len(rows[1])} resumed")
    return found
