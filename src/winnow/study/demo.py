"""`winnow demo`: warm start, training, evaluation, report, and five lines that say what happened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..config import build_options, read_settings, validate
from ..engine.loading import quiet_transformers
from ..record.ledger import Ledger
from ..record.progress import fate_line
from ..record.records import LEDGER, METRICS
from ..run.build import build_demonstrator
from ..run.trainer import Trainer
from ..types import Fate
from .report import write_report
from .warm_start import WarmStartConfig, warm_start


def run_demo(output: Path, overrides: Sequence[str], console: Console) -> dict[str, Any]:
    """Train the recipe `assets/demo.yaml` end to end in `output`; goes on with what an interrupted demo has left.

    Overrides are `key=value` of the recipe. Returns `summary`.
    """
    quiet_transformers()
    model_dir, run_dir = output / "warm-start", output / "run"
    with as_file(files("winnow.study") / "assets" / "demo.yaml") as recipe:
        values = read_settings(recipe, overrides, {"seed": 0, "model": str(model_dir), "output_dir": str(run_dir)})
    warm_options = {"seed": values["seed"]} | values.pop("warm_start")
    config = validate(values, "demo")
    if not (model_dir / "config.json").exists():
        console.rule("warm start: a small model learns from generated solutions")
        options = build_options(WarmStartConfig, warm_options, "warm_start")
        warm_start(build_demonstrator(config.env), model_dir, config=options)
    console.rule("reinforcement learning")
    if (run_dir / LEDGER).exists():
        trainer = Trainer.resume(run_dir, console=console)
    else:
        trainer = Trainer(config=config, console=console)
    trainer.train()
    page = output / "report.html"
    write_report([run_dir], page)
    return summary(run_dir, page)


def summary(run_dir: Path, page: Path) -> dict[str, Any]:
    """Summary of the demo: training, held-out figures before and after, tokens by fate, and where the report is."""
    lines = [json.loads(line) for line in (run_dir / METRICS).read_text(encoding="utf-8").splitlines()]
    evaluations = [m for m in lines if "eval/pass@1" in m]
    with Ledger.open(run_dir / LEDGER, read_only=True) as ledger:
        totals = ledger.totals()
    return {
        "run": str(run_dir),
        "step": lines[-1]["step"],
        "seconds": lines[-1]["seconds_total"],
        "pass@1": [m["eval/pass@1"] for m in (evaluations[0], evaluations[-1])],
        "greedy": [m["eval/greedy"] for m in (evaluations[0], evaluations[-1])],
        "tokens": {str(f): int(totals[f]["tokens"]) for f in Fate if f in totals and totals[f]["tokens"]},
        "report": str(page),
    }


def render(found: Mapping[str, Any]) -> Text:
    """Five lines of a summary, and what to try next."""
    (before, after), (greedy_before, greedy_after) = found["pass@1"], found["greedy"]
    lines = (
        f"trained    {found['step']} steps in {found['seconds']:.0f} s; the model is in {found['run']}/model",
        f"held-out   pass@1 {before:.3f} -> {after:.3f} ({after / max(before, 1e-9):.1f}x), "
        f"greedy {greedy_before:.3f} -> {greedy_after:.3f}",
        fate_line(found["tokens"]),
        f"report     {found['report']}",
        f"next       winnow verify {found['run']}",
    )
    return Text("\n").join(line if isinstance(line, Text) else Text(line) for line in lines)
