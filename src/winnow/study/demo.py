"""`winnow demo`: warm start, training, evaluation, report, and five lines that say what happened."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from ..config import build_options, validate
from ..record.ledger import Ledger
from ..record.progress import fate_line
from ..record.records import LEDGER, METRICS
from ..run.build import build_demonstrator, quiet_transformers
from ..run.trainer import Trainer
from ..types import Fate
from .report import write_report
from .warm_start import WarmupConfig, warmup


def run_demo(output: Path, *, seed: int, steps: int | None, console: Console) -> None:
    """Train the recipe `assets/demo.yaml` end to end in `output`; goes on with what an interrupted demo has left."""
    quiet_transformers()
    values = yaml.safe_load((files("winnow.study") / "assets" / "demo.yaml").read_text(encoding="utf-8"))
    warm_options = values.pop("warmup")
    if steps is not None:
        values |= {"max_steps": steps, "warmup_steps": min(values["warmup_steps"], steps - 1)}
    model_dir, run_dir = output / "warm-start", output / "run"
    config = validate(values | {"model": str(model_dir), "output_dir": str(run_dir), "seed": seed}, "demo")
    if not (model_dir / "config.json").exists():
        console.rule("warm start: a small model learns from generated solutions")
        options = build_options(WarmupConfig, warm_options | {"seed": seed}, "warmup")
        warmup(build_demonstrator(config.env), model_dir, config=options)
    console.rule("reinforcement learning")
    if (run_dir / LEDGER).exists():
        trainer = Trainer.resume(run_dir, console=console)
    else:
        trainer = Trainer(config=config, console=console)
    trainer.train()
    page = output / "report.html"
    write_report([run_dir], page)
    for line in summary(run_dir, page):
        console.print(line, highlight=False, soft_wrap=True)


def summary(run_dir: Path, page: Path) -> list[Any]:
    """Five lines: what was trained, before and after, tokens by fate, where the report is, what to try next."""
    lines = [json.loads(line) for line in (run_dir / METRICS).read_text(encoding="utf-8").splitlines()]
    evaluations = [m for m in lines if "eval/pass@1" in m]
    before, after, last = evaluations[0], evaluations[-1], lines[-1]
    with Ledger.open(run_dir / LEDGER, read_only=True) as ledger:
        totals = ledger.totals()
    tokens = {str(f): int(totals[f]["tokens"]) for f in Fate if f in totals and totals[f]["tokens"]}
    change = after["eval/pass@1"] / max(before["eval/pass@1"], 1e-9)
    return [
        f"trained    {last['step']} steps in {last['seconds_total']:.0f} s; the model is in {run_dir / 'model'}",
        f"held-out   pass@1 {before['eval/pass@1']:.3f} -> {after['eval/pass@1']:.3f} ({change:.1f}x), "
        f"greedy {before['eval/greedy']:.3f} -> {after['eval/greedy']:.3f}",
        fate_line(tokens),
        f"report     {page}",
        f"next       winnow audit {run_dir}",
    ]
