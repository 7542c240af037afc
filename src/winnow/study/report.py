"""One self-contained HTML page for a run, or for several side by side: no network, no external file, under 2 MB.

Python decides the content; the script in `assets/report.js` only draws it, and puts every string of a run into the page
as text, never as markup.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from ..base.files import check_output, write_text
from ..config import RunConfig
from ..record.collapse import ess_of
from ..record.costs import costs_of, seconds_table, tokens_table
from ..record.proof import HEAD, SAMPLED, totals_rows
from .report_data import Run, columns, read_run

DEFAULTS = RunConfig.model_fields
MAX_BYTES = 2_000_000
MAX_POINTS = 500
MAX_SAMPLES = 300
SCRIPTS = ("dom", "charts", "bars", "reliability", "off_policy", "workers", "samples", "plan", "report", "live")

Card = dict[str, str]


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Write the page for the run directories `runs` to `output`, atomically.

    Long series are averaged and samples thinned until the page is under 2 MB. Raises ValueError without a run or when
    one of them is not a run directory, and OSError when `output` cannot be written.
    """
    output = Path(output)
    if runs:
        check_output(output)
    write_text(output, page_of(report_data(runs)))


def report_data(runs: Sequence[Path]) -> dict[str, Any]:
    """Return the page's content as JSON: long series averaged and samples thinned until it fits."""
    if not runs:
        raise ValueError("a report needs at least one run directory.")
    read = [read_run(Path(run), max_samples=max(8, MAX_SAMPLES // len(runs))) for run in runs]
    _tell_apart(read, [Path(run) for run in runs])
    points, share = MAX_POINTS, 1.0
    while True:
        data = _said(read, points, share)
        if len(page_of(data).encode()) <= MAX_BYTES or points < 16:
            return data
        texts = sum(len(_embed(run["samples"])) for run in data["runs"])
        curves = sum(len(_embed([run["metrics"], run["evals"]])) for run in data["runs"])
        if texts > curves:
            share /= 2
        else:
            points //= 2


def page_of(data: Mapping[str, Any]) -> str:
    """Return the page that shows `report_data`."""
    return render_page(data["title"], data, *(f"{name}.js" for name in SCRIPTS))


def _said(runs: Sequence[Run], points: int, share: float) -> dict[str, Any]:
    return {
        "title": "Winnow: " + ", ".join(run.name for run in runs),
        "fates": [*SAMPLED, "void"],
        "cards": [_cards(run) for run in runs],
        "differences": _differences(runs),
        "runs": [_run_data(run, points, share) for run in runs],
    }


def render_page(title: str, data: object, *scripts: str) -> str:
    """Return a page with `data` and the scripts that draw it, by their file names in `assets/`."""
    return Template(_asset("report.html")).substitute(
        title=html.escape(title),
        css=_asset("uPlot.min.css") + _asset("report.css"),
        uplot=_asset("uPlot.iife.min.js"),
        data=_embed(data),
        script="\n".join(_asset(name) for name in scripts),
    )


def _embed(data: object) -> str:
    """Return JSON that no HTML parser can mistake for markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("winnow.study") / "assets" / name).read_text("utf-8")


def _run_data(run: Run, points: int, share: float) -> dict[str, Any]:
    kept = int(share * len(run.samples))
    series = {"metrics": run.rows, "evals": run.evaluations}
    return {
        "name": run.name,
        "heading": _heading(run),
        **{name: columns(rows, points) for name, rows in series.items()},
        "averaged": {name: max(1, -(-len(rows) // points)) for name, rows in series.items()},
        "tokens": run.tokens,
        "totals": _totals(run),
        "costs": _costs(run),
        "proof": run.proof,
        "profile": run.profile,
        "charts": run.charts,
        "reliability": run.reliability,
        "offPolicy": run.off_policy,
        "prompt": run.prompt,
        "samples": [run.samples[i * len(run.samples) // kept] for i in range(kept)],
        "config": _flat(run.config or {}),
        "warnings": run.warnings,
        "notes": run.notes,
    }


def _heading(run: Run) -> dict[str, str]:
    """Return `title`: model and task; `note`: the non-default methods, the start day and the folder."""
    config = run.config or {}
    model = Path(str(config.get("model", ""))).name
    env = config.get("env")
    path = str(env.get("path", "")) if isinstance(env, dict) else ""
    task = path.rpartition("/")[2].removeprefix("made:") or _names(env)
    title = " on ".join(part for part in (model, task) if part) or run.name
    plain = {key: _names(DEFAULTS[key].default) for key in ("selector", "group_size", "filter", "step_scale", "gates")}
    methods = [_names(config.get(key)) for key in ("advantage", *plain)]
    shown = [name for name, none in zip(methods, ("", *plain.values()), strict=True) if name not in ("", none)]
    lag = f"max_lag {config['max_lag']}" if config.get("max_lag") else ""
    return {"title": title, "note": " · ".join(part for part in (*shown, lag, run.begun, run.name) if part)}


def _names(spec: object) -> str:
    """Return the names in one method spec or a list of them."""
    specs = spec if isinstance(spec, list) else [spec]
    found = [one.get("name") if isinstance(one, dict) else one for one in specs]
    return ", ".join(str(name) for name in found if name)


def _totals(run: Run) -> dict[str, Any] | None:
    if run.totals is None:
        return None
    rows = [row for row in totals_rows(run.totals) if any(run.totals[row[0]].values())]
    return {"head": HEAD, "rows": rows}


def _costs(run: Run) -> list[dict[str, Any]]:
    """Return the tables of seconds and tokens, as far as they are known."""
    costs = costs_of(run.rows)
    tables = seconds_table(costs), tokens_table(costs, run.tokens.get("trained", 0))
    return [asdict(table) for table in tables if table is not None]


def _cards(run: Run) -> list[Card]:
    """Return the headline figures of one run."""
    cards = []
    passed = _series(run.evaluations, "eval/pass@1")
    if passed and "eval/pass@1" in run.evaluations[-1]:
        gain = f"{passed[-1] / passed[0]:.2f}× the start" if passed[0] > 0 else f"{len(passed)} evaluations"
        gain = gain if len(passed) > 1 else "one evaluation"
        cards.append(_card("Held-out pass@1", _first_to_last(passed), f"{gain}; best {max(passed):.3f}"))
    elif held_out := _series(run.evaluations, "eval/avg@n"):
        cards.append(_card("Held-out reward", _first_to_last(held_out), "mean; nothing says what is right (success)"))
    rewards = _series(run.rows, "reward")
    if rewards:
        ends = [_mean(rewards[: _tenth(rewards)]), _mean(rewards[-_tenth(rewards) :])]
        cards.append(_card("Training reward", _first_to_last(ends), "mean of the first and last tenth"))
    sampled = sum(run.tokens.get(name, 0) for name in SAMPLED)
    if sampled:
        trained = f"{run.tokens.get('trained', 0) / sampled:.0%} of them in groups that were trained on"
        idle = _series(run.rows, "frac_reward_zero_std")
        if idle and _names((run.config or {}).get("filter")) == _names(DEFAULTS["filter"].default):
            trained += f", {_mean(idle):.0%} of these without signal"
        cards.append(_card("Tokens sampled", count_text(sampled), trained))
    zero = _series(run.rows, "frac_reward_zero_std")
    if zero:
        last = _tenth(zero)
        kinds = [(k, _series(run.rows, f"frac_zero_{k}")) for k in ("easy", "hard", "unknown")]
        split = ", ".join(f"{kind} {_mean(values[-last:]):.0%}" for kind, values in kinds if values)
        cards.append(_card("Groups without signal", f"{_mean(zero[-last:]):.0%}", f"{split}; last tenth of the steps"))
    if run.rows:
        speed = _series(run.rows, "tokens_per_second")
        note = f"{len(run.rows):,} steps" + (f", {count_text(_mean(speed))} tokens/s" if speed else "")
        cards.append(_card("Wall clock", _duration(run.rows[-1]["seconds_total"]), note))
    ess = [share for share in map(ess_of, run.rows) if share is not None]
    if run.off_policy is not None and ess:
        shares = f"{_mean(ess[: _tenth(ess)]):.0%} → {_mean(ess[-_tenth(ess) :]):.0%}"
        ok = False if run.off_policy else None
        cards.append(_card("Effective sample size", shares, "of the rollouts; first and last tenth", ok))
    if run.proof:
        word = "OK" if run.proof["ok"] else f"{len(run.proof['problems'])} problems"
        cards.append(_card("Ledger", word, "exactly-once accounting, proved from the ledger", run.proof["ok"]))
    return cards


def _card(label: str, value: str, note: str, ok: bool | None = None) -> Card:
    return {"label": label, "value": value, "note": note, "state": "" if ok is None else "good" if ok else "bad"}


def _differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return configuration keys on which the runs differ, and their values, one per run."""
    flats = [dict(_flat(run.config or {})) for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    values = {key: [flat.get(key, "–") for flat in flats] for key in keys}
    return {key: row for key, row in values.items() if len(set(row)) > 1}


def _flat(config: object, prefix: str = "") -> list[tuple[str, str]]:
    """Return (dotted key, value) pairs of a nested configuration."""
    if not isinstance(config, dict) or not config:
        text = config if isinstance(config, str) else json.dumps(config, ensure_ascii=False)
        return [(prefix, text)] if prefix else []
    return [pair for key, value in config.items() for pair in _flat(value, f"{prefix}.{key}" if prefix else key)]


def _tell_apart(runs: Sequence[Run], paths: Sequence[Path]) -> None:
    names = [run.name for run in runs]
    for number, (run, path) in enumerate(zip(runs, paths, strict=True), 1):
        if names.count(run.name) > 1:
            run.name = f"{path.resolve().parent.name}/{run.name} ({number})"


def _series(rows: Sequence[dict[str, float]], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]


def _tenth(values: Sequence[float]) -> int:
    return max(1, len(values) // 10)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _first_to_last(values: Sequence[float]) -> str:
    return f"{values[0]:.3f} → {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def count_text(n: float) -> str:
    """Return a readable count: 950, 12.3 k, 4.56 M, 7.89 G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= 0.9995 * size:
            return f"{n / size:.3g} {unit}" if n < 999.5 * size else f"{n / size:,.0f} {unit}"
    return f"{n:.0f}"


def _duration(seconds: float) -> str:
    """Return hours, minutes and seconds: 3:07:00."""
    return str(timedelta(seconds=round(seconds)))
