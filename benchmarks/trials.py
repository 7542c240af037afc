"""Paired trials: does a method or setting make training faster than the recipe that it is added to?

    python benchmarks/trials.py countdown --arms groups-16 muon     # tune, then up to six paired seeds
    python benchmarks/trials.py countdown --table                   # the table again, from the records
    python benchmarks/trials.py countdown-64 --arms muon            # at half the base model's hidden size
    python benchmarks/trials.py countdown --quick --arms muon       # one rate, two seeds, seconds: to try an arm

An arm is the base recipe with other settings. Each run has the same CPU seconds on a core of its own. The base runs at
the same time as each of an arm's reported runs, on the other core, with the same seed and noise from the same model:
the work of a second differs by up to 40% from one hour to the next. Rates are chosen by the mean of pass@1 over the
seconds of two tuning seeds, with as many tries for each arm. The rule, written before the runs, is `verdict`;
docs/trials.md has it in words, and the table. A run leaves one JSON file; what has one is not run again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tables as t
from harness import ROOT, read_json, write_json
from speedrun.run import make_model, run_all
from speedrun.sides import Spec
from speedrun.table import mean_over_the_clock
from speedrun.tracks import TRACKS, WORK
from tables import Column, Figures, Summary, fill

TUNING, SEEDS, FOLLOWING = (8, 9), (10, 11, 12, 13, 14, 15), (22, 23, 24, 25, 26, 27)
"""No other benchmark has these seeds but 9, on which the speedrun is tuned. An arm that follows from another's result
has `FOLLOWING`."""
EARLY = 4
"""Seeds after which a clear arm has no more."""
PASS_AT_8 = -0.02
"""A mean difference of pass@8 below it is a loss of variety."""
CAP_S, GROWTH = 120.0, 1.25
PROTOTYPES = ROOT / "benchmarks" / "prototypes"
"""Methods that are tried here, a file each; what wins is built in `src`."""
PREFIXES = PROTOTYPES / "prefixes.py"
SIZES: dict[str, tuple[str, int]] = {"countdown-64": ("countdown", 64), "countdown-256": ("countdown", 256)}
"""Tracks with the base model at half and double its hidden size -> the speedrun's track, hidden size."""
RESULTS = ROOT / "benchmarks" / "results" / "trials"
DOCS = ROOT / "docs" / "trials.md"


@dataclass(frozen=True)
class Arm:
    """The base with other settings."""

    changes: tuple[str, ...] = ()
    rates: tuple[float, ...] = (1e-4, 2e-4, 4e-4)
    seeds: tuple[int, ...] = SEEDS
    """Reported."""
    decay: float = 0.0
    """Of averaged weights, which are evaluated in place of the last."""
    span: float = 0.0
    """The same over a window that grows with the run."""


ONE_PROCESS = ("sync=in_process", "rollout_batch=adaptive", "max_lag=1")
REUSE = ("policy_loss=clip", "epsilon_high=0.28", "correction=none", "step_scale=ess")
GATED = (f"learner={PROTOTYPES}/dgg.py:Dgg", *REUSE)
INVERSE_SQRT = ("lr_scheduler_type=inverse_sqrt", "lr_scheduler_kwargs={timescale: 50}")
ARMS: dict[str, Arm] = {
    "base": Arm(),
    "batch-16": Arm(("prompts_per_step=16",)),
    "batch-8": Arm(("prompts_per_step=8",), (5e-5, 1e-4, 2e-4)),
    "groups-16": Arm(("num_generations=16", "prompts_per_step=16")),
    "groups-4": Arm(("num_generations=4", "prompts_per_step=64")),
    "sequential": Arm(("group_size={name: sequential, probe: 4}",)),
    "reuse-2": Arm(("reuse={updates: 2, max_age: 16, min_ess: 0.5}", *REUSE)),
    "reuse-4": Arm(("reuse={updates: 4, max_age: 16, min_ess: 0.5}", *REUSE)),
    "dgg": Arm(("reuse={updates: 2, max_age: 16, min_ess: 0.5}", *GATED)),
    "dgg-alone": Arm(("reuse={updates: 2, max_age: 16, min_ess: 0.0}", *GATED)),
    "clip-high": Arm(("policy_loss=clip", "epsilon_high=0.28", "correction=none")),
    "cispo": Arm(("policy_loss=cispo", "correction=none")),
    "sapo": Arm(("policy_loss=sapo", "correction=none")),
    "dppo": Arm(("policy_loss=dppo", "correction=none")),
    "muon": Arm(("optim=muon",), (5e-4, 1e-3, 2e-3)),
    "muon-low": Arm(("optim=muon",), (1.25e-4, 2.5e-4, 5e-4), FOLLOWING),
    "opob": Arm(("advantage=opob",)),
    "entropy": Arm(("entropy_coef=0.003",)),
    "no-drafts": Arm(("speculative=false",)),
    "bayes": Arm(("selector=bayes",)),
    "thompson-16": Arm(("selector={name: thompson, candidates: 16}",)),
    "allocate": Arm(("group_size=allocate",)),
    "inverse-sqrt": Arm(INVERSE_SQRT, (1.5e-4, 3e-4, 6e-4)),
    "grpo": Arm(("advantage=grpo",)),
    "averaged": Arm(decay=0.9),
    "averaged-20": Arm((), (2e-4, 4e-4, 6e-4), FOLLOWING, span=20.0),
    "mixed-rate": Arm((f"step_scale={PROTOTYPES}/mixed_rate.py:MixedRate",)),
    "pods": Arm((f"advantage={PROTOTYPES}/pods.py:Pods",)),
    "nat": Arm((f"learner={PROTOTYPES}/nat.py:Nat",)),
    "tree-baseline": Arm((f"learner={PROTOTYPES}/tree_baseline.py:TreeBaseline",)),
    "prefixes": Arm((f"selector={PREFIXES}:Prefixes", f"env.name={PREFIXES}:CountdownWithPrefixes")),
    "demonstrations": Arm((f"selector={PREFIXES}:Demonstrations", f"env.name={PREFIXES}:CountdownWithPrefixes")),
}
"""Arms by name. What they are compared with: docs/trials.md."""


def spec_of(track: str, arm: Arm, model: str, cap_s: float) -> Spec:
    """Return what all runs of an arm share."""
    changes = (*ONE_PROCESS, *arm.changes, "max_steps=1000000")
    directory = str(WORK / "trials" / track)
    base, _ = of_speedrun(track)
    spec = Spec(base, "fastest", 0, 0.0, "cpu", model, directory, cap_s, GROWTH, changes, cpu_clock=True)
    return replace(spec, decay=arm.decay, span=arm.span)


def of_speedrun(track: str) -> tuple[str, int | None]:
    """Return the speedrun's track, and the hidden size of its model; None: the default."""
    return SIZES.get(track, (track, None))


def ran(
    track: str, name: str, rates: Sequence[float], seeds: Sequence[int], model: str, cap_s: float, paired_with: str = ""
) -> None:
    """Make the runs of an arm that have no record; those of the base `paired_with` an arm are kept with that arm's."""
    spec = spec_of(track, ARMS[name], model, cap_s)
    spec = replace(spec, directory=f"{spec.directory}/{paired_with}/{name}")
    jobs = [("fastest", rate, seed) for seed in seeds for rate in rates]
    records = records_of(track, paired_with, cap_s) / name if paired_with else records_of(track, name, cap_s)
    if not run_all(jobs, spec, records, again=False, cores=1):
        raise SystemExit(f"{name}: a run failed")


def ran_in_pairs(track: str, name: str, seeds: Sequence[int], model: str) -> None:
    """Make an arm's reported runs, each at the same time as the base's; they take turns on the cores."""
    rates = [best_rate(runs_of(records_of(track, each, CAP_S), TUNING)) for each in (name, "base")]
    cores = sorted(os.sched_getaffinity(0))

    def one(each: str, rate: float, seed: int, core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        ran(track, each, [rate], [seed], model, CAP_S, paired_with="" if each == name else name)

    for number, seed in enumerate(seeds):
        turns = cores[-2:] if number % 2 else cores[-2:][::-1]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, (name, "base"), rates, (seed, seed), (turns[0], turns[-1])))


def records_of(track: str, name: str, cap_s: float) -> Path:
    return (RESULTS if cap_s == CAP_S else WORK / "trials" / "quick") / track / name


def runs_of(directory: Path, seeds: Sequence[int]) -> list[Summary]:
    """Return the figures of the runs on these seeds."""
    found = [read_json(file) for file in sorted(directory.glob("*.json"))]
    return [figures_of(record) for record in found if record["seed"] in seeds]


def figures_of(record: Mapping[str, Any]) -> Summary:
    curve = record["curve"]
    by_eight = [point | {"pass@1": point["pass@8"]} for point in curve]
    return {
        "seed": record["seed"],
        "rate": record["rate"],
        "pass@1": mean_over_the_clock(curve),
        "pass@8": mean_over_the_clock(by_eight),
        "last_pass@1": curve[-1]["pass@1"],
        "last_pass@8": curve[-1]["pass@8"],
        "steps": record["steps"],
        "seconds": record["seconds"],
        "tokens": record["tokens"],
        "load_average": record["load_average"],
        "cpu": record["machine"]["cpu"],
    }


def best_rate(runs: Sequence[Summary]) -> float:
    """Return the rate with the best mean pass@1 over the tuning seeds."""
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        by_rate.setdefault(run["rate"], []).append(run["pass@1"])
    return max(by_rate, key=lambda rate: sum(by_rate[rate]) / len(by_rate[rate]))


def verdict(runs: list[Summary], base: list[Summary]) -> str:
    """Return `won`, `lost` or `undecided`.

    Won: the 95% interval of the paired difference of pass@1, a mean over the run's seconds, is above 0, and the mean
    difference of pass@8 is not below `PASS_AT_8`. Lost: the interval is below 0, or that of pass@8 is below
    `PASS_AT_8`. Four seeds decide if the interval is further from 0 than it is wide; else six, if it excludes 0.
    """
    one, eight = (t.against(runs, base, key, as_ratio=False) for key in ("pass@1", "pass@8"))
    if one is None or eight is None or one.low is None or one.high is None or one.n < EARLY:
        return "undecided"
    margin = (one.high - one.low) if one.n < len(SEEDS) else 0.0
    if one.low > margin:
        return "won" if eight.mean >= PASS_AT_8 else "lost"
    if one.high < -margin or (eight.high is not None and eight.high < PASS_AT_8 - margin):
        return "lost"
    return "undecided"


def try_arm(track: str, name: str, model: str) -> str:
    """Tune an arm, run its seeds until it is decided, and return the verdict."""
    ran(track, name, ARMS[name].rates, TUNING, model, CAP_S)
    seeds = ARMS[name].seeds
    for part in (seeds[:EARLY], seeds) if name != "base" else ():
        ran_in_pairs(track, name, part, model)
        if (found := verdict(*chosen(track, name))) != "undecided":
            return found
    return "undecided" if name != "base" else "tuned"


def chosen(track: str, name: str) -> tuple[list[Summary], list[Summary]]:
    """Return an arm's reported runs, and those of the base paired with them."""
    directory = records_of(track, name, CAP_S)
    seeds = ARMS[name].seeds
    return runs_of(directory, seeds), runs_of(directory / "base", seeds)


def write_table(track: str) -> str:
    figures: Figures = {}
    for name in ARMS:
        if name != "base":
            figures[name], figures[f"{name}/base"] = chosen(track, name)
    columns = (
        t.SEEDS,
        Column("rate", lambda runs, _: f"{runs[0]['rate']:g}"),
        Column("pass@1 of the base over its run", lambda _, base: t.text(t.over_seeds(base, "pass@1"))),
        t.difference("pass@1 over the run", "pass@1"),
        t.difference("at its end", "last_pass@1"),
        t.difference("pass@8 over the run", "pass@8"),
        t.difference("at its end", "last_pass@8"),
        t.ratio("steps", "steps"),
        *(t.ratio(f"{kind} tokens", f"tokens.{kind}") for kind in ("sampled", "computed", "trained")),
        Column("verdict", verdict),
    )
    table = t.table_of(figures, columns, arms=list(ARMS), base=lambda name: f"{name}/base", head="arm")
    out = RESULTS.parent / "trials.json"
    write_json(out, read_json(out) | {track: {"table": table.splitlines(), "runs": figures}})
    fill(DOCS, {f"trials-{track}": table})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("track", choices=[*TRACKS, *SIZES])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=[])
    parser.add_argument("--quick", action="store_true", help="a rate, two seeds and 40 seconds each")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    model = "" if options.table else make_model(*of_speedrun(options.track))
    names = [] if options.table else list(dict.fromkeys(["base", *options.arms]))
    for name in names:
        if options.quick:
            ran(options.track, name, ARMS[name].rates[1:2], TUNING, model, CAP_S / 3)
            found = runs_of(records_of(options.track, name, CAP_S / 3), TUNING)
            print(name, [(run["seed"], round(run["pass@1"], 3), run["steps"]) for run in found], flush=True)
        else:
            print(name, try_arm(options.track, name, model), flush=True)
            write_table(options.track)
    if options.table:
        print(write_table(options.track))


if __name__ == "__main__":
    main()
