"""`winnow eval`, `vote` and `compare`: how good models and methods are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import Config, Json, Model, Overrides, command, out, settings, show

app = typer.Typer()


@command(app, "eval")
def evaluate(model: Model, overrides: Overrides = None, config: Config = None, as_json: Json = False) -> None:
    """pass@k, mean reward and greedy on held-out prompts.

    Settings of a run are its own unless overridden: env=countdown eval_prompts=256 eval_generations=16
    eval_temperature=0.6 eval_top_p=0.95.
    """
    values = _settings(overrides, config, model)
    from ..run.standalone import evaluate_model  # takes seconds

    show(evaluate_model(model, values), as_json)


@command(app)
def vote(
    model: Model,
    overrides: Overrides = None,
    config: Config = None,
    weights: Annotated[
        str,
        typer.Option(help="majority, head (of a run with gate arrol), or both; differences: to the first."),
    ] = "majority",
    as_json: Json = False,
) -> None:
    """Let candidates vote on the answer, equally or weighted by a head (test-time scaling).

    Settings as for `eval`; 32 candidates a prompt unless eval_generations says otherwise.
    """
    values = _settings(overrides, config, model, eval_generations=32)
    from ..study.vote import render, vote_model  # takes seconds

    show(vote_model(model, values, [w.strip() for w in weights.split(",")]), as_json, render)


@command(app)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories.")],
    seeds: Annotated[bool, typer.Option("--seeds", help="Runs that differ only in their seed are one method.")] = False,
    baseline: Annotated[str | None, typer.Option(help="Method to compare with; default: the first one.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write an HTML page.")] = None,
    as_json: Json = False,
) -> None:
    """Methods side by side: means over seeds and paired differences to a baseline, with Student intervals."""
    from ..study.compare import compare as run
    from ..study.compare_view import render, write_page

    found = run(runs, seeds, baseline)
    if output is not None:
        write_page(found, output)
    show(asdict(found), as_json, lambda _: render(found, out.width))


def _settings(overrides: Sequence[str] | None, config: Path | None, model: str, **defaults: Any) -> dict[str, Any]:
    """Read settings. Raises ConfigError for an override that only training reads, e.g. temperature."""
    from ..base.errors import ConfigError
    from ..config import RunConfig

    for key in (override.partition("=")[0] for override in overrides or ()):
        here = f"eval_{key.removeprefix('num_')}"
        if here in RunConfig.model_fields:
            raise ConfigError(f"{key}: has no effect on an evaluation; set {here}")
    return settings(overrides, config, model, **defaults)
