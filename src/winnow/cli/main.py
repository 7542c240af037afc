"""The command `winnow`. Every subcommand is a thin layer over the Python API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..config import apply_override, load_config, read_yaml
from .console import Json, clear_errors, err, out, show
from .gate import gate

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Post-train language models with group-relative RL and pay only for rollouts that teach.",
)
app.add_typer(gate, name="gate")

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value; dots reach into sections: filter.atol=1e-6")]
Run = Annotated[Path, typer.Argument(help="A run directory.")]


def main() -> None:
    app()


@app.command()
@clear_errors
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Run directory to make.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of warm start and training.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Fewer training steps, for a quick look.")] = None,
) -> None:
    """Warm-start a small model, train it on Countdown, and show where every token went (minutes on two cores)."""
    from ..study.demo import run_demo

    run_demo(output, seed=seed, steps=steps, console=out)


@app.command()
@clear_errors
def warmup(
    output: Annotated[Path, typer.Option("-o", "--output", help="Model directory to make.")],
    env: Annotated[str, typer.Option(help="Task with demonstrations.")] = "countdown",
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Make a small tokenizer and model and teach it from generated solutions; saves a Hugging Face directory.

    Overrides are options of the warm start (max_steps=300) or, after `env.`, of the task (env.count=4).
    """
    from ..config import build_options
    from ..run.build import build_demonstrator, quiet_transformers
    from ..study.warm_start import WarmupConfig
    from ..study.warm_start import warmup as run

    quiet_transformers()
    values: dict[str, Any] = {"env": {"name": env}}
    for override in overrides or []:
        apply_override(values, override)
    task = build_demonstrator(values.pop("env"))
    config = build_options(WarmupConfig, values, "warmup")
    show(run(task, output, config=config), as_json=as_json)


@app.command()
@clear_errors
def train(
    config: Annotated[Path, typer.Argument(help="YAML file.")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate everything and print the plan.")] = False,
    as_json: Json = False,
) -> None:
    """Train as a YAML file says, `key=value` arguments winning."""
    from ..run.plan import plan
    from ..run.trainer import Trainer

    resolved = load_config(config, overrides or [])
    trainer = Trainer(config=resolved, console=err if as_json else out)
    if dry_run:
        show(plan(trainer), as_json=as_json)
        return
    show(trainer.train() | {"run": str(trainer.run_dir)}, as_json=as_json)


@app.command()
@clear_errors
def resume(run: Run, overrides: Overrides = None, as_json: Json = False) -> None:
    """Go on where a run was saved last."""
    from ..run.trainer import Trainer

    values: dict[str, Any] = {}
    for override in overrides or []:
        apply_override(values, override)
    trainer = Trainer.resume(run, values, console=err if as_json else out)
    show(trainer.train() | {"run": str(run)}, as_json=as_json)


def _values(config: Path | None, given: dict[str, Any], overrides: list[str] | None) -> dict[str, Any]:
    """Settings from a YAML file, then what was given as options, then overrides."""
    values = read_yaml(config) if config else {}
    values |= {k: v for k, v in given.items() if v is not None}
    for override in overrides or []:
        apply_override(values, override)
    return values


@app.command("eval")
@clear_errors
def evaluate(
    model: Annotated[str, typer.Argument(help="A run directory, a Hugging Face directory, or a hub name.")],
    overrides: Overrides = None,
    env: Annotated[str | None, typer.Option(help="Task; for a run, its own unless given.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file to take task and sampling from.")] = None,
    n: Annotated[int | None, typer.Option("-n", help="Samples a prompt.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Held-out prompts.")] = None,
    as_json: Json = False,
) -> None:
    """pass@k, mean reward and greedy on held-out prompts. Sampling: eval_temperature=0.6 eval_top_p=0.95 ..."""
    from ..run.build import quiet_transformers
    from ..run.standalone import evaluate_model

    quiet_transformers()
    given = {"env": env, "eval_generations": n, "eval_prompts": prompts}
    show(evaluate_model(model, _values(config, given, overrides)), as_json=as_json)


@app.command()
@clear_errors
def vote(
    model: Annotated[str, typer.Argument(help="A run directory, a Hugging Face directory, or a hub name.")],
    overrides: Overrides = None,
    env: Annotated[str | None, typer.Option(help="Task; for a run, its own unless given.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file to take task and sampling from.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Candidates a prompt.")] = 32,
    prompts: Annotated[int | None, typer.Option(help="Held-out prompts.")] = None,
    weights: Annotated[
        str, typer.Option(help="majority, deepconf, deepconf-tail, logprob, head; differences are to the first.")
    ] = "majority,deepconf",
    as_json: Json = False,
) -> None:
    """Let candidates vote on the answer, weighted by how good they look (test-time scaling)."""
    from ..run.build import quiet_transformers
    from ..study.vote import render, vote_model

    quiet_transformers()
    given = {"env": env, "eval_generations": n, "eval_prompts": prompts}
    found = vote_model(model, _values(config, given, overrides), [w.strip() for w in weights.split(",")])
    if as_json:
        print(json.dumps(found))
    else:
        out.print(render(found), highlight=False)


@app.command()
@clear_errors
def profile(
    model: Annotated[str, typer.Argument(help="A run directory, a Hugging Face directory, or a hub name.")],
    overrides: Overrides = None,
    env: Annotated[str | None, typer.Option(help="Task; for a run, its own unless given.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file to take task and sampling from.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Samples a prompt.")] = 16,
    prompts: Annotated[int | None, typer.Option(min=1, help="Only the first so many training prompts.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="JSONL file; else one in profiles/, named by what decides it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """How often the model solves each training prompt, for `selector: pass_rate`; goes on with an interrupted file."""
    from ..run.build import quiet_transformers
    from ..study.profile import profile_model, render

    quiet_transformers()
    values = _values(config, {"env": env}, overrides)
    found = profile_model(model, values, n=n, prompts=prompts, output=output, console=err if as_json else out)
    if as_json:
        print(json.dumps(found))
    else:
        out.print(render(found))


@app.command()
@clear_errors
def audit(run: Run, as_json: Json = False) -> None:
    """Prove from the ledger alone that everything dispatched came back exactly once, and show where it went."""
    from ..record.ledger import Ledger
    from ..record.proof import render, to_json
    from ..record.records import LEDGER

    with Ledger.open(run / LEDGER, read_only=True) as ledger:
        result = ledger.audit()
    if as_json:
        print(json.dumps(to_json(result)))
    else:
        out.print(render(result))
    if not result.ok:
        raise typer.Exit(1)


@app.command()
@clear_errors
def report(
    runs: Annotated[list[Path], typer.Argument(help="One or more run directories.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML page to write.")] = Path("report.html"),
) -> None:
    """One self-contained HTML page: curves, where every token went, samples."""
    from ..study.report import write_report

    write_report(runs, output)
    out.print(f"{output} ({output.stat().st_size / 1e6:.2f} MB)", highlight=False)


@app.command()
@clear_errors
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories.")],
    seeds: Annotated[bool, typer.Option("--seeds", help="Runs that differ only in their seed are one method.")] = False,
    baseline: Annotated[str | None, typer.Option(help="Method to compare with; the first one given otherwise.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="HTML page to write, too.")] = None,
    as_json: Json = False,
) -> None:
    """Methods side by side: means over seeds and paired differences to a baseline, with bootstrap intervals."""
    from ..study.compare import compare as run
    from ..study.compare_view import render, to_json, write_page

    found = run(runs, seeds, baseline)
    if output is not None:
        write_page(found, output)
    if as_json:
        print(json.dumps(to_json(found)))
    else:
        out.print(render(found))


@app.command()
@clear_errors
def methods(as_json: Json = False) -> None:
    """Every method with what it does, its paper, file and options."""
    from ..run.catalogue import all_methods

    found = all_methods()
    if as_json:
        print(json.dumps(found))
        return
    field = ""
    for m in found:
        if m["field"] != field:
            field = m["field"]
            out.print(f"\n[bold]{field}[/]")
        out.print(f"  [cyan]{m['name']}[/]  {escape(m['summary'])}", highlight=False)
        options = ", ".join(escape(f"{k}={v}") for k, v in m["options"].items())
        out.print(f"    {m['file']}" + (f"  options: {options}" if options else ""), style="dim", highlight=False)


if __name__ == "__main__":
    main()
