"""The papers' claims: trains every arm of a family for every seed, then writes figures, the notebook and a picture.

    python benchmarks/claims.py selection --out benchmarks/results/claims.json --docs docs/claims-appendix.md
    python benchmarks/claims.py lag --arms 'lag12-*' --seeds 0 1 --out FILE
    python benchmarks/claims.py --docs docs/claims-appendix.md     # trains nothing: the notebook of what results/ has

Each run is a process with one thread and leaves `claim.json` in its directory. What is there is not done again, and a
run that was cut off is resumed. Seeds go first to last, so that the arms always have nearly the same number of them.
Arms that are not named, and seeds that are not in the work directory, keep their figures in the JSON file.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from families.base import Arm, Family, Start
from harness import ROOT, read_json, write_json

FAMILIES = {
    "tuned": "what is saved on DAPO at its best learning rate, on four tasks",
    "selection": "GRESO, Active-RLOO and both together on Countdown",
    "stopping": "the mid-trajectory gate in ALFWorld rooms, ARRoL on short and on long answers",
    "lag": "what each method makes of stale samples; samplers in other processes, by result and by the clock",
    "pretrained": "the methods with a pretrained model of 135M parameters",
    "distillation": "a teacher against rewards on Countdown",
}
"""Name -> what it tries; the module is `families/NAME.py`."""
RESULTS = ROOT / "benchmarks" / "results"
PROFILE, PROFILES = "profile.jsonl", "pass-rates"


def load(name: str) -> Family:
    family: Family = importlib.import_module(f"families.{name}").FAMILY
    return family


def make_start(start: Start, family: Family, seed: int, work: Path) -> None:
    """Make a model and evaluate it as finished runs are."""
    from winnow.config import load_config
    from winnow.run.inputs import build_task
    from winnow.run.standalone import evaluate_model
    from winnow.study.warm_start import WarmStartConfig, warm_start

    path = start.directory(seed, work)
    settings = [f"model={path}", f"seed={seed}", "gates=[]", *start.overrides]
    recipe = load_config(ROOT / "recipes" / f"{start.recipe}.yaml", settings)
    if not (path / "config.json").exists():
        warm_start(build_task(recipe.env), path, config=WarmStartConfig(seed=seed, threads=1, **start.settings))
    deployed = evaluate_model(str(path), recipe.model_dump() | dict(family.final))
    write_json(path / "claim.json", {"arm": "warm start", "seed": seed, "deployed": deployed})


def make_profile(arm: Arm, seed: int, work: Path) -> None:
    """Pass rates of all training prompts under the start of a seed, sixteen rollouts each."""
    from winnow.config import load_config
    from winnow.study.pass_rates import profile_model

    assert arm.start is not None
    model, path = str(arm.start.directory(seed, work)), work / f"{PROFILES}-s{seed}"
    recipe = load_config(ROOT / "recipes" / f"{arm.recipe}.yaml", [f"model={model}", f"seed={seed}"])
    found = profile_model(model, recipe.model_dump(), n=16, output=path / PROFILE)
    write_json(path / "claim.json", {"arm": "pass rates", "seed": seed, "profile": found})


def train_arm(arm: Arm, family: Family, seed: int, work: Path, changes: Sequence[str]) -> None:
    """One run, resumed if it was begun, and its evaluation."""
    from winnow.record.stop_conditions import OutOfMemoryError, RunStoppedError
    from winnow.run.standalone import evaluate_model
    from winnow.study.vote import vote_model

    run = work / f"{arm.name}-s{seed}"
    overrides = [override.replace("WORK", str(work)) for override in arm.overrides]
    overrides += [f"seed={seed}", f"output_dir={run}", "save_steps=100", "save_total_limit=1"]
    if arm.start is not None:
        overrides.append(f"model={arm.start.directory(seed, work)}")
    if arm.profiled:
        overrides.append(f"selector={{name: pass_rate, profile: {work / f'{PROFILES}-s{seed}' / PROFILE}}}")
    claim: dict[str, Any] = {"arm": arm.name, "seed": seed}
    if family.may_stop:
        claim["stopped"] = ""
    try:
        with family.around(arm):
            train(run, arm.recipe, [*overrides, *family.prepare(work), *changes])
    except (RunStoppedError, FloatingPointError) as error:
        if not family.may_stop or isinstance(error, OutOfMemoryError):
            raise
        claim["stopped"] = str(error)  # the last checkpoint has what it had come to
    claim["deployed"] = evaluate_model(str(run), dict(family.final))
    if arm.votes:
        claim["votes"] = vote_model(str(run), {"eval_generations": 32} | dict(family.vote_settings), arm.votes)
    write_json(run / "claim.json", claim)


def train(run: Path, recipe: str, overrides: Sequence[str]) -> None:
    from winnow.base.errors import ConfigError
    from winnow.config import load_config
    from winnow.run.trainer import Trainer

    if (run / "model").exists():
        return
    try:
        if (run / "config.json").exists():
            trainer = Trainer.resume(run)
        else:
            trainer = Trainer(config=load_config(ROOT / "recipes" / f"{recipe}.yaml", list(overrides)))
    except ConfigError as error:
        raise SystemExit(f"{run}: {error}") from None
    trainer.train()


def do(name: str, family: Family, seed: int, work: Path, changes: Sequence[str]) -> None:
    """A job by its name: an arm, a start, or the pass rates."""
    arms = family.by_name()
    starts = {arm.start.name: arm.start for arm in family.arms if arm.start is not None}
    if name in arms:
        train_arm(arms[name], family, seed, work, changes)
    elif name in starts:
        make_start(starts[name], family, seed, work)
    else:
        make_profile(next(arm for arm in family.arms if arm.profiled), seed, work)


def stages(arms: Sequence[Arm], seed: int) -> list[list[tuple[str, int]]]:
    """Jobs of a seed (name, seed), a stage after the other: models, pass rates, runs."""
    models: list[tuple[str, int]] = []
    for arm in arms:
        if arm.start is not None and (job := (arm.start.name, arm.start.seed(seed))) not in models:
            models.append(job)
    profiles = [(PROFILES, seed)] if any(arm.profiled for arm in arms) else []
    return [models, profiles, [(arm.name, seed) for arm in arms]]


def run_all(family: str, arms: Sequence[Arm], options: argparse.Namespace) -> bool:
    """Every job that has left no claim.json, `jobs` at a time. Returns whether all of them succeeded."""
    options.work.mkdir(parents=True, exist_ok=True)
    ok = True
    for seed in options.seeds:
        for stage in stages(arms, seed):
            todo = [job for job in stage if not (options.work / f"{job[0]}-s{job[1]}" / "claim.json").exists()]
            with ThreadPoolExecutor(options.jobs) as pool:
                ok &= all(list(pool.map(lambda job: child(family, job, options), todo)))
    return ok


def child(family: str, job: tuple[str, int], options: argparse.Namespace) -> bool:
    name, seed = job
    command = [sys.executable, __file__, family, "--one", name, str(seed), "--work", str(options.work)]
    if options.changes:
        command += ["--changes", *options.changes]
    started = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, check=False)
    state = "done" if done.returncode == 0 else f"FAILED ({done.returncode})"
    print(f"{name} {seed}: {state}, {time.monotonic() - started:.0f} s", flush=True)
    return done.returncode == 0


def write_figures(family: Family, arms: Sequence[str], options: argparse.Namespace) -> None:
    """Add figures of these arms' finished runs to the JSON file, and draw the picture of what it has."""
    from runs import read_runs
    from tables import merged

    content = {"runs": {}} | read_json(options.out)
    figures = merged(content["runs"], family.figures(read_runs(options.work, arms)))
    write_json(options.out, content | {"runs": figures})
    if options.picture and family.draw is not None:
        family.draw(figures, options.picture)


def tables_of(results: Path) -> dict[str, str]:
    """Every table of every results file, by name."""
    made: dict[str, str] = {}
    for family in map(load, FAMILIES):
        for name, tables in family.tables.items():
            made |= tables(read_json(results / name)["runs"])
    return made


def notebook(results: Path) -> str:
    """The page of all results: headings and notes of `notes.json`, each with the tables that it names."""
    made = tables_of(results)
    parts = []
    for section in json.loads((results / "notes.json").read_text(encoding="utf-8")):
        parts.append(section["heading"])
        parts += section["notes"]
        parts += [f"`{name}`\n\n{made[name].rstrip()}" for name in section.get("tables", [])]
    return "\n\n".join(parts) + "\n"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:12s}{what}" for name, what in FAMILIES.items()),
    )
    parser.add_argument("family", choices=list(FAMILIES), nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--arms", nargs="+", help="names or patterns, in the place of the family's default arms")
    parser.add_argument("--jobs", type=int, help="runs at a time")
    parser.add_argument("--work", type=Path, help="directory of the runs (default: under runs/)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--docs", type=Path, help="Markdown file that becomes the notebook of all result files")
    parser.add_argument("--picture", type=Path, help="PNG file for the curves")
    parser.add_argument("--changes", nargs="+", default=[], help="key=value of every run, to try the script")
    parser.add_argument("--one", nargs=2, metavar=("JOB", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.family is None and options.docs is None:
        parser.error("name a family to run, or a page to write with --docs")
    return options


def with_defaults(family: Family, options: argparse.Namespace) -> list[Arm]:
    """Fill in what the family knows; return the arms to run."""
    known = family.by_name()
    chosen: list[str] = []
    for pattern in options.arms or family.default or known:
        matching = fnmatch.filter(known, pattern)
        if not matching:
            raise SystemExit(f"--arms: unknown {pattern}; known: {', '.join(known)}")
        chosen += matching
    if options.picture and family.draw is None:
        raise SystemExit(f"--picture: {options.family} has none")
    options.seeds = list(range(family.seeds)) if options.seeds is None else options.seeds
    options.jobs = options.jobs or family.jobs
    options.work = options.work or ROOT / "runs" / family.work
    return [known[name] for name in dict.fromkeys(chosen)]


def main() -> None:
    options = read_options()
    ok = True
    if options.family:
        family = load(options.family)
        arms = with_defaults(family, options)
        if options.one:
            name, seed = options.one
            do(name, family, int(seed), options.work, options.changes)
            return
        ok = run_all(options.family, arms, options)
        write_figures(family, [arm.name for arm in arms], options)
    if options.docs:
        options.docs.write_text(notebook(RESULTS), encoding="utf-8")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
