"""`winnow train`, `resume`, `demo` and `demo-llm`: runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from ..base import cluster
from ..base.errors import ConfigError
from ..base.machine import lasting_imports
from ..base.sanitize import visible
from .console import Json, Overrides, Run, command, lines, progress_console, run_config, show

if TYPE_CHECKING:
    from ..run.trainer import Trainer

app = typer.Typer()


FAILED, TRUNCATED = "failed rollouts", "truncated rollouts"


def _train(trainer: Trainer, as_json: bool) -> None:
    """Train to the end; show the last evaluation, totals, failed rollouts by cause, and truncated ones by limit."""
    from ..record.failures import failures_of, truncated_of

    found: dict[str, Any] = {**trainer.train()}
    counted = {FAILED: failures_of(trainer.run_dir), TRUNCATED: truncated_of(trainer.run_dir)}
    found |= {name: counts for name, counts in counted.items() if counts}
    show(found | {"run": trainer.config.output_dir}, as_json, _table)


def _table(found: dict[str, Any]) -> RenderableType:
    counted = {name: found[name] for name in (FAILED, TRUNCATED) if name in found}
    shown = {name: "\n".join(f"{n}x {visible(what)}" for what, n in counts.items()) for name, counts in counted.items()}
    return lines(found | shown)


@command(app)
def train(
    config: Annotated[Path, typer.Argument(help="YAML file.")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate everything and print the plan.")] = False,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="With --dry-run: the memory budget on GPUs not here: 24GiB, 2x80GiB.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train from a YAML file; `key=value` arguments override it."""
    if gpu is not None and not dry_run:
        raise ConfigError("--gpu: only plans a run; add --dry-run")
    c = run_config(config, overrides)
    with lasting_imports():
        from ..run.budget import Gpus
        from ..run.plan import plan, plan_for
        from ..run.preflight import STARTS
        from ..run.trainer import Trainer
        from ..tasks.prompt_example import on_one_line

    if gpu is not None:
        show(plan_for(c, Gpus.from_text(gpu)), as_json)
        return
    if dry_run:
        try:
            with Trainer(config=c) as trainer:
                found = plan(trainer)
        finally:
            cluster.discard()
        if found["prompt_example"] and not as_json:
            found["prompt_example"] = on_one_line(found["prompt_example"])
        show(found, as_json)
        if any(not problem.endswith(STARTS) for problem in found.get("does_not_fit", [])):
            raise typer.Exit(1)
        return
    trainer = Trainer(config=c)
    trainer.console = progress_console(as_json)
    _train(trainer, as_json)


@command(app)
def resume(run: Run, overrides: Overrides = None, as_json: Json = False) -> None:
    """Resume a run from its last checkpoint."""
    from ..record.resume_keys import changes_of, resumed_config

    changes = changes_of(run, overrides or ())
    resumed_config(run, changes)  # refused before the import below, which takes seconds
    with lasting_imports():
        from ..run.trainer import Trainer

    trainer = Trainer.resume(run, changes)
    trainer.console = progress_console(as_json)
    _train(trainer, as_json)


@command(app)
def demo(
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Run directory to make.")] = Path("runs/demo"),
    as_json: Json = False,
) -> None:
    """Warm-start a small model, train it on Countdown, and show where every token went (2 to 10 minutes on two cores).

    Overrides change the demo's configuration: seed=1 max_steps=100.
    """
    from ..study.demo import render, run_demo

    show(run_demo(output, overrides or (), progress_console(as_json)), as_json, render)


@command(app, "demo-llm")
def demo_llm(
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Run directory to make.")] = Path("runs/demo-llm"),
    as_json: Json = False,
) -> None:
    """Train a pretrained chat model of 135M parameters on arithmetic, and show its answers before and after.

    It is fetched first, as by `winnow models get`. Overrides change the demo's configuration: seed=1 max_steps=100.
    """
    from ..study.demo import render, run_demo

    show(run_demo(output, overrides or (), progress_console(as_json), "llm"), as_json, render)
