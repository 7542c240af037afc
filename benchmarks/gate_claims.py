"""The mid-trajectory gate in small ALFWorld rooms, in the paper's three tiers: every arm for every seed, and tables.

One warm start; one calibration of the gate, on groups of that model; then for every seed tiers 1 and 2 and the training
runs of tier 3. What is finished is not done again, and a run that was cut off is resumed.

    python benchmarks/gate_claims.py --out benchmarks/results/gate_claims.json --docs docs/claims.md

A few arms can be run alone, with `--arms`; the others' figures stay in the JSON file, and in the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from arms import ROOT, Arm, read_options, run_all, train, write_json

RECIPE = "alfworld"
WARM_START = "warm-s0"
"""As in the paper, all seeds start from the same model."""
WARM = {"max_steps": 250, "batch_size": 48, "learning_rate": 2e-3, "num_layers": 2, "max_positions": 1024, "threads": 1}
CALIBRATION = {"prompts": 128, "epochs": 2, "precision": 0.8}
STEPS = (4, 6, 8, 10)
"""Where gates may be asked."""
TEMPERATURES = (0.3, 0.4, 0.5, 0.7, 1.0)
"""At which the premise of the gate is looked at."""
LIMITS = (0.0, 0.34, 0.5)
"""Of progress: nothing done, a third, a half of what there is to do."""
TIERS = {"prompts": 128, "repeats": 3}
FINAL = {"eval_generations": 8, "eval_greedy": True}
"""All held-out games, after training."""
GATE, WITHOUT_ZERO = "gates=[{gate}]", "filter={name: zero_variance, refill: false}"
"""`{gate}` and its like are what the calibration found."""
PARTS = ("premise", "tiers")
ARMS = (
    Arm("grpo", RECIPE),
    Arm("gate", RECIPE, (GATE,)),
    Arm("gate-progress", RECIPE, ("gates=[{progress}]",)),
    Arm("dapo", RECIPE, (WITHOUT_ZERO,)),
    Arm("random-cut", RECIPE, ("gates=[{random}]",)),
    Arm("gate-dapo", RECIPE, (GATE, WITHOUT_ZERO)),
    Arm("gate-or", RECIPE, ("gates=[{gate_or}]",)),
)


def config_of(seed: int, work: Path, overrides: tuple[str, ...] = ()) -> Any:
    from winnow.config import load_config

    own = (f"model={work / WARM_START}", f"seed={seed}", f"output_dir={work / 'unused'}")
    return load_config(ROOT / "recipes" / f"{RECIPE}.yaml", [*overrides, *own])


def warm_model(seed: int, work: Path) -> None:
    from winnow.run.build import build_demonstrator
    from winnow.run.standalone import evaluate_model
    from winnow.study.warm_start import WarmStartConfig, warm_start

    path = work / f"warm-s{seed}"
    if not (path / "config.json").exists():
        warm_start(build_demonstrator(_recipe()["env"]), path, config=WarmStartConfig(seed=seed, **WARM))  # type: ignore[arg-type]
    values = {**_recipe(), "model": str(path), "seed": seed, **FINAL}
    write_json(path / "claim.json", {"arm": "warm start", "seed": seed, "deployed": evaluate_model(str(path), values)})


def calibrate(work: Path) -> None:
    """The gate of all arms: the edit distance's best step and threshold under the precision floor, as in the paper."""
    from gate_tiers import by_progress, recorded

    from winnow.methods.gate.recording import rows_of
    from winnow.study.gate_calibration import calibrate as run
    from winnow.study.gate_search import Bound, Search
    from winnow.study.gate_tables import read_recorded

    path = work / "calibration-s0"
    path.mkdir(exist_ok=True)
    config = config_of(0, work)
    groups = recorded(config, CALIBRATION["prompts"], CALIBRATION["epochs"])  # type: ignore[arg-type]
    groups = [g for g in groups if sum(r.reward is not None for r in g.siblings) > 1]
    kept = {
        "K",
        "task_id",
        "task_type",
        "reward_var",
        "steps",
        "steps_k",
        "prefix_edit_distance",
        "termination_fraction",
    }
    rows = [{k: v for k, v in row.items() if k in kept} for g in groups for row in rows_of(g, STEPS)]
    table = path / "gate.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    search = Search(Bound(CALIBRATION["precision"], None), config.env["max_turns"])
    found = asdict(run(read_recorded(table), search))
    progress = by_progress(groups, STEPS, LIMITS)
    sound = [row for row in progress if row["precision"] >= CALIBRATION["precision"]]
    best = max(sound, key=lambda row: row["measured_pct"])
    write_json(path / "claim.json", found | {"progress": progress, "chosen_progress": best})


def premise(work: Path) -> None:
    """Does converging mean ending alike? The same model at several temperatures."""
    from gate_tiers import recorded

    from winnow.methods.gate.recording import rows_of
    from winnow.study.gate_tables import correlate, read_recorded

    path = work / "premise-s0"
    path.mkdir(exist_ok=True)
    found = {}
    for temperature in TEMPERATURES:
        config = config_of(0, work, (f"temperature={temperature}",))
        groups = recorded(config, CALIBRATION["prompts"], CALIBRATION["epochs"])  # type: ignore[arg-type]
        table = path / f"gate-{temperature}.jsonl"
        whole = [g for g in groups if sum(r.reward is not None for r in g.siblings) > 1]
        rows = [row for g in whole for row in rows_of(g, (8,))]
        table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        found[str(temperature)] = [asdict(row) for row in correlate(read_recorded(table))]
    write_json(path / "claim.json", found)


def gates(work: Path) -> dict[str, dict[str, Any]]:
    """The gates of the arms. The random one cuts as many groups as that by progress, at the same step."""
    found = json.loads((work / "calibration-s0" / "claim.json").read_text(encoding="utf-8"))
    chosen, stuck = found["chosen"], found["chosen_progress"]
    gate = {"name": "divergence", "signal": chosen["signal"], "k": chosen["k"], "threshold": chosen["threshold"]}
    return {
        "gate": gate,
        "gate_or": gate | {"termination": 0.9},
        "progress": {"name": "divergence", "k": stuck["k"], "threshold": 0.0, "progress": stuck["progress"]},
        "random": {"name": "random", "k": stuck["k"], "share": round(stuck["cut"] / stuck["can_be_cut"], 3)},
    }


def tiers(seed: int, work: Path) -> None:
    from gate_tiers import tier_1_and_2

    path = work / f"tiers-s{seed}"
    path.mkdir(exist_ok=True)
    both = {name: gate for name, gate in gates(work).items() if name in ("gate", "progress")}
    write_json(path / "claim.json", tier_1_and_2(config_of(seed, work), both, TIERS["prompts"], TIERS["repeats"]))


def train_arm(arm: Arm, seed: int, work: Path) -> None:
    from winnow.run.standalone import evaluate_model

    found = gates(work)
    filled = Arm(arm.name, arm.recipe, tuple(_filled(o, found) for o in arm.overrides))
    run = train(filled, seed, work, [f"model={work / WARM_START}"])
    said = {"arm": arm.name, "seed": seed, "overrides": filled.overrides}
    write_json(run / "claim.json", said | {"deployed": evaluate_model(str(run), FINAL)})


def _filled(override: str, gates: dict[str, dict[str, Any]]) -> str:
    for name, gate in gates.items():
        override = override.replace(f"{{{name}}}", json.dumps(gate))
    return override


def _recipe() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / f"{RECIPE}.yaml").read_text(encoding="utf-8"))
    return loaded


def one(name: str, seed: int, work: Path) -> None:
    if name == "warm":
        warm_model(seed, work)
    elif name == "calibration":
        calibrate(work)
    elif name == "premise":
        premise(work)
    elif name == "tiers":
        tiers(seed, work)
    else:
        train_arm(next(arm for arm in ARMS if arm.name == name), seed, work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = read_options(parser, [*PARTS, *(arm.name for arm in ARMS)], "gate-claims")
    if options.one:
        one(*options.one, options.work)
        return
    ok = run_all(__file__, [["warm"], ["calibration"]], [0], options.work, 1)
    arms = [arm for arm in options.arms if arm != "premise"]
    ok = ok and run_all(__file__, [arms], options.seeds, options.work, options.jobs)
    if "premise" in options.arms:
        ok = ok and run_all(__file__, [["premise"]], [0], options.work, 1)
    if options.out or options.docs:
        from gate_tables import write_figures

        write_figures(options.work, [arm.name for arm in ARMS], out=options.out, docs=options.docs)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
