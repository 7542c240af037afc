"""Seconds until a model is trained: TRL, TRL with Winnow inside, Winnow as DAPO, and Winnow's fastest recipe.

    python benchmarks/speedrun/run.py countdown --tune          # the learning rates of each side, on the tuning seed
    python benchmarks/speedrun/run.py countdown                 # four seeds; the table and docs/speedrun.png
    python benchmarks/speedrun/run.py countdown --quick         # a first seed in ten minutes, in build/speedrun/quick
    python benchmarks/speedrun/run.py arithmetic --device cuda --quick --model DIR

Rules: docs/speedrun.md. Each run is a process of its own, and sides alternate. A run leaves one JSON file once all have
been trained; what has one is not run again. An interrupted training begins again; a trained run is only evaluated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import ROOT, read_json, write_json
from speedrun import table
from speedrun.evaluation import CURVE
from speedrun.sides import RUN, Spec
from speedrun.tracks import SIDES, TRACKS, TUNING_SEED, WORK
from tables import fill

HERE = Path(__file__).resolve().parent
Job = tuple[str, float, int]
"""Side, learning rate, seed."""
TRAINED = "trained.json"
"""Written once a run has been trained: what it was, load averages, commit."""
Stage = Callable[[Spec, Path, set[int]], bool]
"""A run, its record, and the cores to use -> whether it succeeded."""
QUICK_GROWTH = 1.3
DOCS = ROOT / "docs" / "speedrun.md"
OFFICIAL, QUICK = ROOT / "benchmarks" / "results", WORK / "quick"


def available(sides: Sequence[str]) -> list[str]:
    """Return the sides whose packages are installed; say which are left out."""
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    left_out = [side for side in sides if side.startswith("trl") and missing]
    if left_out:
        print(f"left out: {', '.join(left_out)}; not installed: {', '.join(missing)}", flush=True)
    return [side for side in sides if side not in left_out]


def rate_of(side: str, track: str, directory: Path) -> float:
    """Return the tuned learning rate of a side; the middle one of its grid until it is tuned."""
    tuned = read_json(directory / table.TUNED)
    return float(tuned[side]["rate"]) if side in tuned else TRACKS[track].entries[side].rates[1]


def jobs_of(track: str, sides: Sequence[str], seeds: Sequence[int], directory: Path, tune: bool) -> list[Job]:
    """Return the runs in their order: seed by seed (rate by rate), the sides in changing order."""
    entries = TRACKS[track].entries
    jobs: list[Job] = []
    for number, seed in enumerate(range(3) if tune else seeds):
        for side in sides if number % 2 == 0 else reversed(sides):
            rate = entries[side].rates[number] if tune else rate_of(side, track, directory)
            jobs.append((side, rate, TUNING_SEED if tune else seed))
    return jobs


def make_model(track: str, hidden_size: int | None = None) -> str:
    """Return the directory of the model that all sides start from, made first if need be. Exits if it is not here.

    `hidden_size`: of a warm start with layers of another width, and all else the same.
    """
    from winnow.base.errors import ConfigError
    from winnow.engine.pretrained import located

    t = TRACKS[track]
    t.prepare()
    if t.warm_start is None:
        try:
            return located(t.model)
        except ConfigError as error:
            raise SystemExit(str(error)) from None
    of_size = {} if hidden_size is None else widths(hidden_size)
    path = WORK / "models" / (t.model if hidden_size is None else f"{t.model}-{hidden_size}")
    if not (path / "config.json").exists():
        from speedrun.sides import config_of

        from winnow.run.inputs import build_task
        from winnow.study.warm_start import WarmStartConfig, warm_start

        print(f"{track}: making the model that all sides start from, outside the clock", flush=True)
        spec = Spec(track, "dapo", 0, 0.0001, "cpu", str(path), str(WORK), 0.0, 0.0)
        warm_start(build_task(config_of(spec).env), path, config=WarmStartConfig(**t.warm_start, **of_size))
    return str(path)


def widths(hidden_size: int) -> dict[str, int]:
    """Return options of a warm start whose layers and heads have the default's proportions."""
    return {"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, "num_heads": hidden_size // 32}


def is_trained(spec: Spec) -> bool:
    """Whether this very run has been trained, and not yet evaluated."""
    return bool(read_json(Path(spec.directory) / TRAINED).get("run") == _run_of(spec))


def _run_of(spec: Spec) -> Any:
    found = asdict(replace(spec, began=0.0)) | {"entry": asdict(spec.entry)}
    return json.loads(json.dumps(found))


def train(spec: Spec, record: Path, cores: set[int]) -> bool:
    """Train in a process, unless that is done. Returns whether it succeeded."""
    if is_trained(spec):
        return True
    directory = Path(spec.directory)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    before = os.getloadavg()[0]
    if not _child("sides.py", json.dumps(asdict(replace(spec, began=time.time()))), directory, cores):
        return False
    loads = [before, os.getloadavg()[0]]
    write_json(directory / TRAINED, {"run": _run_of(spec), "load_average": loads, "commit": commit()})
    return True


def evaluate(spec: Spec, record: Path, cores: set[int]) -> bool:
    """Evaluate a run's models in a process, write the record, remove the models. Returns whether it succeeded."""
    directory = Path(spec.directory)
    if not _child("evaluation.py", spec.directory, directory, cores):
        return False
    kept = read_json(directory / RUN) | read_json(directory / TRAINED)
    kept["curve"] = json.loads((directory / CURVE).read_text(encoding="utf-8"))
    del kept["points"], kept["run"]
    text = json.dumps(kept).replace(f"{ROOT}/", "").replace(str(Path.home()), "~")
    write_json(record, json.loads(text))  # a machine's paths tell nobody anything
    shutil.rmtree(directory)
    return True


def _child(script: str, argument: str, directory: Path, cores: set[int]) -> bool:
    """Run a script on these cores; its output goes to a log, of which a failure shows the end."""
    log = directory / "log.txt"
    with log.open("a", encoding="utf-8") as out:
        command = [sys.executable, str(HERE / script), argument]
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        os.sched_setaffinity(child.pid, cores)
        child.wait()
    if child.returncode:
        print("".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-15:]) + f"failed: {log}", flush=True)
    return child.returncode == 0


def commit() -> str:
    """Return the commit, with a mark if files have changed since; empty outside a repository."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def tune(directory: Path, target: float) -> None:
    """Write each side's choice, with all of its tries."""
    tries: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(directory.glob(f"*-{TUNING_SEED}.json")):
        record = read_json(file)
        tries.setdefault(record["side"], []).append(table.summary_of(record, target))
    choices = {side: {"rate": table.chosen(runs)["rate"], "tries": runs} for side, runs in tries.items()}
    write_json(directory / table.TUNED, choices)
    for side, choice in choices.items():
        print(f"{side}: {choice['rate']:g}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("track", choices=list(TRACKS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 to 3; with --quick 0")
    parser.add_argument("--tune", action="store_true", help="choose each side's learning rate of three")
    parser.add_argument("--quick", action="store_true", help="lower target and cap, fewer evaluations")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="directory of the model to start from; default: made or fetched")
    parser.add_argument("--again", action="store_true", help="also run what has a record")
    parser.add_argument("--changes", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of all sides")
    parser.add_argument("--out", type=Path, help="folder of records, table and plot instead of benchmarks/results")
    options = parser.parse_args()
    if options.changes and options.out is None:
        parser.error("--changes: other settings need a folder of their own; set --out")
    return options


def run_all(jobs: Sequence[Job], spec: Spec, records: Path, again: bool, cores: int | None = None) -> bool:
    """Run the jobs without a record, in their order. Returns whether all succeeded. `cores`: of a run; None: those of
    the side.

    Sides that need one core run side by side, each on its own, so that what disturbs one disturbs the other; a side
    that needs all cores runs by itself. Models are evaluated when all runs have ended; where runs have all cores, after
    each run.
    """
    all_cores, track = os.sched_getaffinity(0), TRACKS[spec.track]
    free: Queue[int] = Queue()
    for core in sorted(all_cores):
        free.put(core)

    def name_of(job: Job) -> str:
        side, rate, seed = job
        return f"{side}-{rate:g}-{seed}"

    def spec_of(job: Job) -> Spec:
        side, rate, seed = job
        own = {"cap_s": spec.cap_s * track.entries[side].patience, "directory": f"{spec.directory}/{name_of(job)}"}
        return replace(spec, side=side, rate=rate, seed=seed, **own)

    def run(stages: Sequence[Stage], job: Job) -> bool:
        side, rate, seed = job
        taken = {free.get() for _ in range(cores_of(stages, job))}
        print(f"{spec.track}: {side}, rate {rate:g}, seed {seed}: {', '.join(s.__name__ for s in stages)}", flush=True)
        try:
            return all(stage(spec_of(job), records / f"{name_of(job)}.json", taken) for stage in stages)
        finally:
            for core in taken:
                free.put(core)

    def cores_of(stages: Sequence[Stage], job: Job) -> int:
        if spec.device == "cuda" or track.alone:
            return len(all_cores)
        return min(cores or track.entries[job[0]].cores, len(all_cores)) if train in stages else 1

    def has_record(job: Job) -> bool:
        return (records / f"{name_of(job)}.json").exists()

    ok = True
    left = [job for job in jobs if again or not has_record(job) or is_trained(spec_of(job))]
    order: list[list[Stage]] = [[train, evaluate]] if track.alone else [[train], [evaluate]]
    for stages in order:
        done: list[bool] = []
        for needed, some in groupby(left, key=partial(cores_of, stages)):
            with ThreadPoolExecutor(len(all_cores) if needed == 1 else 1) as pool:
                done += pool.map(partial(run, stages), some)
        ok &= all(done)
        left = [job for job, succeeded in zip(left, done, strict=True) if succeeded]
    return ok


def main() -> None:
    options = arguments()
    suffix = "-cuda" if options.device == "cuda" else ""
    name = options.track + suffix
    out = options.out or (QUICK if options.quick else OFFICIAL)
    work, plot = (WORK, DOCS.parent) if out == OFFICIAL else (out.resolve(), out)
    records = out / "speedrun" / name
    target, cap_s = TRACKS[options.track].limits(options.quick)
    growth = QUICK_GROWTH if options.quick else TRACKS[options.track].growth
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2, 3])
    tuned = records if (records / table.TUNED).exists() else OFFICIAL / "speedrun" / name
    jobs = jobs_of(options.track, available(options.sides), seeds, tuned, options.tune)
    model = options.model or make_model(options.track)
    directory, changes = str(work / "runs" / name), tuple(options.changes)
    spec = Spec(options.track, "", 0, 0.0, options.device, model, directory, cap_s, growth, changes)
    if options.tune:
        spec = replace(spec, cap_s=cap_s / 3, growth=growth**3, directory=f"{directory}/tune")
    ok = run_all(jobs, spec, records, options.again)
    if options.tune:
        tune(records, target)
    else:
        made = table.write(out / "speedrun.json", name, table.figures_in(records, target), target)
        print(made)
        if out == OFFICIAL:
            fill(DOCS, {f"speedrun-{name}": made})
        targets = {track + s: TRACKS[track].limits(options.quick)[0] for s in ("", "-cuda") for track in TRACKS}
        table.draw(out / "speedrun", targets, plot / "speedrun.png")
    if not ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
