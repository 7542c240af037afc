"""`winnow warm-start`, `pass-rates` and `simulate`: a model to start with, how well it solves each prompt, and what
methods would make of that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from ..base.errors import ConfigError
from .console import Config, Json, Model, Overrides, command, lines, progress_console, run_config, settings, show

app = typer.Typer()


@command(app, "warm-start")
def warm_start(
    output: Annotated[Path, typer.Option("-o", "--output", help="Model directory to make.")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Make a small model, or take `model=DIR`, and teach it from solutions; saves a Hugging Face directory.

    Overrides are options of the warm start (max_steps=300) and of the task (env=countdown env.count=4). Solutions are
    the task's own, or a column of your data (env=dataset env.path=rows.jsonl completion_column=solution).
    """
    values = settings(overrides, env="countdown")
    from ..config.options import build_options
    from ..run.inputs import build_task
    from ..study.warm_start import WarmStartConfig
    from ..study.warm_start import warm_start as run  # takes seconds

    task = build_task(values.pop("env"))
    show(run(task, output, config=build_options(WarmStartConfig, values, "warm start")), as_json)


@command(app, "pass-rates")
def pass_rates(
    model: Model,
    overrides: Overrides = None,
    config: Config = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Samples per prompt.")] = 16,
    prompts: Annotated[int | None, typer.Option(min=1, help="Only this many training prompts, from the first.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="JSONL file; default: one in profiles/, named by its inputs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how often the model solves each training prompt, for `selector: pass_rate`.

    The file is a pass-rate profile. The same command continues an interrupted one.
    """
    values = settings(overrides, config, model)
    from ..study.pass_rates import bars_of, profile_model  # takes seconds

    console = progress_console(as_json)
    found = profile_model(model, values, n=n, prompts=prompts, output=output, console=console)
    figures = lines({name: value for name, value in found.items() if name != "histogram"})
    show(found, as_json, lambda f: Group(bars_of(f["histogram"]), "", figures))


@command(app)
def simulate(
    config: Annotated[Path, typer.Argument(help="YAML file of a run.")],
    rates: Annotated[Path, typer.Option(help="Pass-rate profile of its model, from `winnow pass-rates`.")],
    overrides: Overrides = None,
    growth: Annotated[float, typer.Option(help="Logits that 1,000 groups with a signal add to all pass rates.")] = 0.0,
    ends_at: Annotated[
        float | None, typer.Option(min=0, max=1, help="In place of growth: the mean pass rate that such a run reached.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a rollout.")] = 1,
    as_json: Json = False,
) -> None:
    """Run a configuration's selector, group sizes, filter and reuse against pass rates, without a model.

    Prints tokens by fate, the signal for 1,000 tokens, and that of an oracle which knows every pass rate.
    """
    c = run_config(config, overrides)
    if ends_at is not None and growth:
        raise ConfigError("growth: ends-at chooses it; give one of them")
    from ..study.simulate import growth_to
    from ..study.simulate import simulate as run  # takes seconds

    if ends_at is not None:
        growth = growth_to(c, rates, ends_at)
    show(run(c, rates, growth=growth, length=length), as_json)
