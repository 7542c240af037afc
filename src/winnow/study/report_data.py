"""Data of a run directory for a report: read with tolerance, thinned to a budget, made safe to print.

A run directory may hold `config.json`, `metrics.jsonl`, `samples.jsonl` and `ledger.sqlite`. Missing or damaged files
become a note for the reader, never a crash.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..base.files import bytes_of, from_json
from ..base.sanitize import plain, redact, visible
from ..methods.base import Chart
from ..methods.pass_rates import BINS, histogram, read_profile, summary
from ..record.collapse import off_policy_marks
from ..record.ledger import Ledger, LedgerError
from ..record.proof import LONGEST_GAP, verdict
from ..record.records import CHARTS, CONFIG, MOST_CONFIG, PROMPT, START, WARNINGS
from ..record.rule_audits import HEAD, rows
from ..run.checkpoint import CheckpointError, marks
from .report_samples import thin_samples

Row = dict[str, float]
CUMULATIVE = ("step", "num_tokens", "seconds_total", "num_decoded_tokens", "num_computed_tokens")
RELIABILITY = re.compile(r"gate/[^/]+/reliability/(?P<bin>\d)/(?P<name>rollouts|predicted|right)")
CHART_LIST = TypeAdapter(list[Chart])
MOST_CHARTS = 100
LONGEST_PROMPT = 4_000
"""Most characters shown of the prompt."""


@dataclass
class Run:
    """One run directory as read. `rows` has one dict per step, `evaluations` one per step with `eval/` keys."""

    name: str
    begun: str = ""
    """Day of its configuration file."""
    config: dict[str, Any] | None = None
    rows: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    tokens: dict[str, float] = field(default_factory=dict)
    """Sampled tokens by fate over the whole run; `void` are those lost to restarts."""
    totals: dict[str, dict[str, float]] | None = None
    proof: dict[str, Any] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    prompt: dict[str, str] | None = None
    """`text` and `caption` of a prompt in the form the model gets."""
    charts: list[dict[str, Any]] = field(default_factory=list)
    """Charts of its methods (`winnow.methods.base.Chart`)."""
    reliability: dict[str, Any] | None = None
    """`points` and `caption` of a gate's predictions and the outcomes."""
    off_policy: list[dict[str, Any]] | None = None
    """Marks of a collapse, if any, of a run with stale tokens or a correction; None for other runs."""
    profile: dict[str, Any] | None = None
    """`labels`, `counts` and `caption` of the pass rates that its selector used, or a `note` why they are missing."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of watchdogs during the run."""
    notes: list[str] = field(default_factory=list)


def read_run(path: Path, *, max_samples: int) -> Run:
    """Read a run directory. Raises ValueError when `path` is not one."""
    known = ("config.json", "metrics.jsonl", "ledger.sqlite")
    if not any((path / name).is_file() for name in known):
        problem = f"it has none of {', '.join(known)}" if path.is_dir() else "there is no such folder"
        inside = path / "winnow"  # of TRL's output_dir
        named = inside if (inside / "ledger.sqlite").is_file() else "the output_dir of a run"
        raise ValueError(f"{path}: not a run directory: {problem}. Name {named}.")
    run = Run(name=visible(path.resolve().name))
    run.config = _read_json(path / "config.json", run.notes, _config)
    if not (path / "config.json").is_file():
        run.notes.append("config.json is missing.")
    if run.config is not None:
        began = next(file for name in (START, CONFIG) if (file := path / name).is_file())  # a resume writes the latter
        run.begun = date.fromtimestamp(began.stat().st_mtime).isoformat()
    run.profile = _read_profile((run.config or {}).get("selector"))
    merged = merge_steps(read_lines(path / "metrics.jsonl", run.notes))
    run.rows = [row for row in merged if any(not k.startswith("eval/") for k in row if k not in CUMULATIVE)]
    run.reliability = _take_reliability(run.rows)
    run.off_policy = off_policy_marks(run.rows, CUMULATIVE)
    run.evaluations = [row for row in merged if any(k.startswith("eval/") for k in row)]
    _read_ledger(path / "ledger.sqlite", run)
    run.warnings = _warnings(path / WARNINGS, run.notes)
    run.prompt = _read_json(path / PROMPT, run.notes, _prompt)
    charts = _read_json(path / CHARTS, run.notes, partial(CHART_LIST.validate_json, strict=True))
    run.charts = _shown_charts(charts or [], {key for row in run.rows for key in row})
    run.samples = thin_samples(read_lines(path / "samples.jsonl", run.notes), max_samples)
    return run


def columns(rows: Sequence[Row], max_points: int) -> dict[str, list[float | None]]:
    """Return columns by key, thinned to `max_points`: means over consecutive rows, the last value of monotone counters.

    None where no row has the key.
    """
    size = max(1, math.ceil(len(rows) / max_points))
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    found: dict[str, list[float | None]] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        column = found[key] = []
        for part in parts:
            values = [row[key] for row in part if key in row]
            if not values:
                column.append(None)
            elif key in CUMULATIVE:
                column.append(float(f"{values[-1]:.9g}"))
            else:
                column.append(float(f"{math.fsum(values) / len(values):.5g}"))
    return found


def _take_reliability(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Sum a diagram's data over all steps, and remove its many series from the rows."""
    sums: dict[int, dict[str, float]] = {}
    for row in rows:
        for key in [k for k in row if "/reliability/" in k]:
            found = RELIABILITY.fullmatch(key)
            if found and 0 <= row[key] < 1e12:
                bin_ = sums.setdefault(int(found["bin"]), dict.fromkeys(("rollouts", "predicted", "right"), 0.0))
                bin_[found["name"]] += row[key]
            del row[key]
    shares = ((b["predicted"], b["right"], b["rollouts"]) for _, b in sorted(sums.items()) if b["rollouts"] >= 1)
    points = [[min(q / n, 1.0), min(right / n, 1.0), n] for q, right, n in shares]
    if not points:
        return None
    total = math.fsum(n for *_, n in points)
    gap = math.fsum(n * abs(predicted - right) for predicted, right, n in points) / total
    caption = f"{total:,.0f} rollouts, pruned ones estimated; mean distance from the diagonal (ECE) {gap:.3f}"
    return {"points": [[round(v, 4) for v in point] for point in points], "caption": caption}


def _read_json(path: Path, notes: list[str], read: Callable[[bytes], Any]) -> Any:
    """Return what `read` makes of a file; None if it is absent, or damaged, which is noted."""
    if not path.is_file():
        return None
    try:
        return read(bytes_of(path, MOST_CONFIG))
    except (OSError, ValueError, TypeError, KeyError) as error:
        notes.append(f"{path.name} cannot be read: {visible(str(error))}.")
        return None


def _config(content: bytes) -> dict[str, Any]:
    config = plain(from_json(content.decode("utf-8", "replace")), lambda text: visible(redact(text)))
    return config if isinstance(config, dict) else {"config": config}


def _read_profile(selector: Any) -> dict[str, Any] | None:
    if not isinstance(selector, dict) or not selector.get("profile"):
        return None
    name = str(selector["profile"])
    try:
        rates = list(read_profile(name).values())
    except (OSError, ValueError) as error:
        return {"note": visible(f"The profile that the selector went by cannot be shown: {error}")}
    s = summary(rates)
    caption = (
        f"{s['profiled']:,} prompts in {name}: {s['dead']:,} never solved, {s['solved']:,} always, "
        f"{s['in_band']:,} in between; mean pass rate {s['mean_pass_rate']:.3f}"
    )
    return {"labels": list(BINS), "counts": histogram(rates), "caption": visible(caption)}


def _prompt(content: bytes) -> dict[str, str]:
    found = from_json(content.decode("utf-8", "replace"))
    text, tokens, name = str(found["text"]), int(found["tokens"]), str(found["id"])
    if len(text) > LONGEST_PROMPT:
        text = f"{text[: LONGEST_PROMPT // 2]}\n[...]\n{text[-LONGEST_PROMPT // 2 :]}"
    follows = f"; {found['follows']} follows" if found.get("follows") else ""
    caption = f"Prompt '{name}' with its special tokens: {tokens:,} tokens{follows}."
    return {"text": visible(redact(text)), "caption": visible(caption)}


def _shown_charts(charts: Sequence[Chart], metrics: set[str]) -> list[dict[str, Any]]:
    """Return charts of a run's methods, of the `metrics` that it logged."""
    found = []
    for chart in charts[:MOST_CHARTS]:
        lines = [[metric, visible(name)] for metric, name in chart.lines.items() if metric in metrics]
        texts = {"title": visible(chart.title), "section": visible(chart.section)}
        if lines:
            found.append(asdict(chart) | texts | {"lines": lines})
    return found


def _warnings(path: Path, notes: list[str]) -> list[str]:
    """Return each warning once, with its first step."""
    if not path.is_file():
        return []
    first: dict[str, str] = {}
    for line in read_lines(path, notes):
        step, message = line.get("step"), visible(str(line.get("warning")))
        first.setdefault(message, f"Step {step}: {message}." if isinstance(step, int) else message)
    return list(first.values())


def read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a JSONL file; a torn last line is left out, other damage is noted."""
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
        return
    bad: list[int] = []
    number = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                value = from_json(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield value
            elif line.strip("\ufeff \t\r\n"):
                bad.append(number)
    if bad and bad[-1] == number:
        bad.pop()  # the run was writing it, or was killed meanwhile
    if bad:
        notes.append(f"{path.name}: {len(bad)} lines left out that are not JSON objects, the first is line {bad[0]}.")


def merge_steps(lines: Iterator[dict[str, Any]]) -> list[Row]:
    """Return metrics rows, one per step, in the order of the file: an evaluation may have a line of its own."""
    rows: list[Row] = []
    names: dict[str, str] = {}
    for line in lines:
        row = {k: float(v) for k, v in line.items() if isinstance(v, int | float) and math.isfinite(v)}
        if "step" not in row:
            continue
        names.update((k, visible(k)) for k in row.keys() - names.keys())
        if not rows or rows[-1]["step"] != row["step"]:
            rows.append({})
        rows[-1].update({names[k]: v for k, v in row.items()})
    for key in ("num_tokens", "seconds_total"):
        highest = 0.0
        for row in rows:
            highest = row[key] = max(highest, row.get(key, highest))
    return rows


def _read_ledger(path: Path, run: Run) -> None:
    """Read totals and verdict; without a usable ledger, tokens by fate are those of the metrics."""
    fates = dict.fromkeys(k for row in run.rows for k in row if k.startswith("tokens/"))
    run.tokens = {key.removeprefix("tokens/"): math.fsum(row.get(key, 0) for row in run.rows) for key in fates}
    if not path.is_file():
        run.notes.append("ledger.sqlite is missing: tokens by fate are those of metrics.jsonl, and there is no proof.")
        return
    try:
        found = marks(path.parent)
        with Ledger.open(path, read_only=True) as ledger:
            result, again = ledger.verify(found), ledger.recurrence()
    except (LedgerError, CheckpointError, OSError) as error:
        run.notes.append(f"ledger.sqlite cannot be used: {visible(str(error).replace(str(path), path.name))}")
        return
    run.proof = {"ok": result.ok, "verdict": verdict(result), "problems": [visible(p) for p in result.problems]}
    if result.rules:
        run.proof["rules"] = {"head": HEAD, "rows": [[visible(cell) for cell in row] for row in rows(result.rules)]}
    if again:
        cells = [
            [f"{gap}{' and more' if gap == LONGEST_GAP else ''}", f"{visits:,}", f"{zero / visits:.1%}"]
            for gap, visits, zero in again
        ]
        run.proof["again"] = {"head": ["epochs between", "visits", "zero-variance again"], "rows": cells}
    run.totals = result.totals
    untrained = ("in_flight", "evaluation", "probe")
    run.tokens = {name: row["tokens"] for name, row in result.totals.items() if name not in untrained}
