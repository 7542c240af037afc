"""`winnow demo` and `demo-llm`: a model, training, evaluation, report, and a short summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.errors import ConfigError
from ..base.machine import lasting_imports
from ..base.sanitize import visible
from ..config import RunConfig, read_settings, validate
from ..config.options import build_options
from ..record.failures import failures_of
from ..record.ledger import Ledger
from ..record.progress import fate_line
from ..record.records import LEDGER, SAMPLES, read_config, read_metrics
from ..record.resume_keys import changes_of
from ..types import Fate

RECIPES = {"countdown": "demo.yaml", "llm": "demo-llm.yaml"}
"""Recipes of `run_demo`, and their files in `assets`."""
QUESTIONS_SHOWN = 6
"""Number of held-out questions whose first answers are shown before and after."""


def run_demo(output: Path, overrides: Sequence[str], console: Console, recipe: str = "countdown") -> dict[str, Any]:
    """Train one of `RECIPES` end to end in `output`; an interrupted demo resumes.

    A recipe with `warm_start` makes its model; another's is fetched. Overrides are `key=value` of the recipe; a resume
    refuses those that it cannot change. Returns `summary`.
    """
    model_dir, run_dir = output / "warm-start", output / "run"
    with as_file(files("winnow.study") / "assets" / RECIPES[recipe]) as file:
        values = read_settings(file, overrides, {"seed": 0, "model": str(model_dir)})
    if any(override.startswith("output_dir=") for override in overrides):
        raise ConfigError(f"output_dir: the demo's run is {run_dir}; name its folder with --output")
    values["output_dir"] = str(run_dir)
    warm_options = values.pop("warm_start", None)
    config = validate(values, "demo")
    if config.eval_steps is None:
        raise ConfigError("eval_steps: the demo compares held-out figures before and after; give a number of steps")
    with lasting_imports():  # seconds: only for settings that are right
        from ..engine.pretrained import PRETRAINED
        from ..engine.pretrained import get as get_model
        from ..run.inputs import build_task
        from ..run.trainer import Trainer
        from .report import write_report
        from .warm_start import WarmStartConfig, warm_start

    if warm_options is None and config.model in PRETRAINED:
        console.rule(f"the model: {config.model}")
        get_model(config.model, console.print)
    elif warm_options is not None and not (model_dir / "config.json").exists():
        console.rule("warm start: a small model learns from generated solutions")
        options = build_options(WarmStartConfig, {"seed": values["seed"]} | warm_options, "warm_start")
        warm_start(build_task(config.env), model_dir, config=options)
    console.rule("reinforcement learning")
    if (run_dir / LEDGER).exists():
        saved, given = read_config(run_dir), changes_of(run_dir, overrides)
        given = {key: value for key, value in given.items() if key in RunConfig.model_fields}
        now = validate(saved | given, "demo").model_dump(mode="json")
        trainer = Trainer.resume(run_dir, {key: given[key] for key in given if saved.get(key) != now[key]})
    else:
        trainer = Trainer(config=config)
    trainer.console = console
    trainer.train()
    page = output / "report.html"
    write_report([run_dir], page)
    return summary(run_dir, page)


def summary(run_dir: Path, page: Path) -> dict[str, Any]:
    """Return the demo's summary: training, held-out figures before and after, tokens by fate, and the report's path."""
    lines = list(read_metrics(run_dir))
    evaluations = [m for m in lines if "eval/avg@n" in m]
    first, last = evaluations[0], evaluations[-1]
    names = [name for name in ("pass@1", "greedy", "avg@n") if f"eval/{name}" in last]  # no pass@1 if none is known
    with Ledger.open(run_dir / LEDGER, read_only=True) as ledger:
        totals = ledger.totals()
    return {
        "run": str(run_dir),
        "step": lines[-1]["step"],
        "seconds": lines[-1]["seconds_total"],
        **{name: [first[f"eval/{name}"], last[f"eval/{name}"]] for name in names},
        "answers": _answers(run_dir),
        "failed": failures_of(run_dir),
        "tokens": {str(f): int(totals[f]["tokens"]) for f in Fate if f in totals and totals[f]["tokens"]},
        "report": str(page),
    }


def _answers(run_dir: Path) -> list[dict[str, str]]:
    """Return a chat model's answers to a few held-out questions in the first evaluation and in the last."""
    lines = [json.loads(line) for line in (run_dir / SAMPLES).read_text(encoding="utf-8").splitlines()]
    tested = [line for line in lines if line["split"] == "test" and isinstance(line["prompt"], list)]
    by_step: dict[int, dict[int, dict[str, Any]]] = {}
    for line in tested:
        by_step.setdefault(line["step"], {})[line["visit"]] = line
    if not by_step:
        return []
    first, last = by_step[min(by_step)], by_step[max(by_step)]
    return [
        {
            "question": line["prompt"][-1]["content"],
            "before": line["completion"],
            "after": last[visit]["completion"],
        }
        for visit, line in list(first.items())[:QUESTIONS_SHOWN]
    ]


def render(found: Mapping[str, Any]) -> RenderableType:
    """Return lines of a summary and next commands; before them a chat model's answers before and after."""
    evaluated = next(name for name in ("pass@1", "avg@n") if name in found)
    before, after = found[evaluated]
    times = f" ({after / before:.1f}x)" if before > 0 else ""
    greedy = "  greedy {:.3f} -> {:.3f}".format(*found["greedy"]) if "greedy" in found else ""
    failed = [f"failed     {count}x {visible(str(cause))}" for cause, count in found["failed"].items()]
    lines: list[str | Text] = [
        f"trained    {found['step']} steps in {found['seconds']:.0f} s; the model is in {found['run']}/model",
        f"held-out   {evaluated} {before:.3f} -> {after:.3f}{times}{greedy}",
        fate_line(found["tokens"]),
        *failed,
        f"report     {found['report']}",
        f"next       winnow verify {found['run']}",
    ]
    text = Text("\n").join(line if isinstance(line, Text) else Text(line) for line in lines)
    if not found["answers"]:
        return text
    table = Table("held-out question", "before", "after")
    for answer in found["answers"]:
        table.add_row(*(Text(answer[key].replace("\n", " ")) for key in ("question", "before", "after")))
    return Group(table, text)
