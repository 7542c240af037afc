"""What the ARRoL gate costs beside the training step it takes part in, and whether survivors say the same without it.

    python benchmarks/arrol.py --out benchmarks/results/arrol.json

Two models are warm-started and trained on: the demo's task (a dozen tokens an answer, where a step is shortest and the
share largest), and chain sums worked out (about 95 tokens). Engine, rollout and update are the real ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from arms import ROOT, write_json

TASKS = {"countdown": "countdown-arrol", "chain-sum": "chain-sum-arrol"}
COLD = 5


class Clock:
    """Seconds spent in some functions since it was last set to 0."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def config_of(task: str, model: Path, **changes: Any) -> Any:
    from winnow.config import load_config

    changes = {"output_dir": model.parent / f"{task}-run"} | changes | {"model": model, "eval_steps": 100_000}
    overrides = [f"{key}={value}" for key, value in changes.items()]
    return load_config(ROOT / "recipes" / f"{TASKS[task]}.yaml", [*overrides, "max_skipped_steps=100000"])


def warm_model(task: str, directory: Path, work: Path | None) -> Path:
    """The one that `arrol_claims.py` left in `work`, or one made in seconds that solves less."""
    from winnow.run.build import build_demonstrator
    from winnow.study.warm_start import WarmStartConfig, warm_start

    recipe = yaml.safe_load((ROOT / "recipes" / f"{TASKS[task]}.yaml").read_text(encoding="utf-8"))
    model = directory / task
    if work is not None:
        shutil.copytree(work / f"warm-{task}-s0", model)
        return model
    warm_start(
        build_demonstrator(recipe["env"]), model, config=WarmStartConfig(max_steps=150, batch_size=32, threads=1)
    )
    return model


def overhead(task: str, model: Path, steps: int) -> list[dict[str, float]]:
    """One row a step: seconds of the step, of the gate, and the gate's share."""
    from winnow.methods.gate.arrol.rule import ArrolRule
    from winnow.run.trainer import Trainer

    gates = f"[{{name: arrol, cold_start: {COLD}}}]"
    trainer = Trainer(config=config_of(task, model, max_steps=COLD + steps, gates=gates))
    (gate,) = trainer.methods.gates.values()
    clock, rows = Clock(), []
    for name in ("rule", "observe", "metrics"):
        setattr(gate, name, clock.around(getattr(gate, name)))
    decide = ArrolRule.decide
    ArrolRule.decide = clock.around(decide)  # type: ignore[method-assign]
    end_step, last = clock.around(gate.end_step), time.perf_counter()

    def ended() -> None:
        nonlocal last
        end_step()
        now = time.perf_counter()
        rows.append({"step": now - last, "gate": clock.seconds, "share": clock.seconds / (now - last)})
        clock.seconds, last = 0.0, now

    gate.end_step = ended  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        ArrolRule.decide = decide  # type: ignore[method-assign]
    return rows[COLD + 1 : -1]  # the last one includes the evaluation at the end


def phases(task: str, model: Path, steps: int, repeats: int) -> dict[str, list[float]]:
    """How many times faster generation, update and both are with the gate: one ratio a repeat, of median steps."""
    from winnow.run.trainer import Trainer

    ratios: dict[str, list[float]] = {"generate": [], "update": [], "both": []}
    for repeat in range(repeats):
        seconds = []
        for gates in ("[]", f"[{{name: arrol, cold_start: {COLD}}}]"):
            run = model.parent / f"{task}-phases-{repeat}-{len(seconds)}"
            c = config_of(task, model, output_dir=run, max_steps=COLD + steps, gates=gates, seed=repeat)
            Trainer(config=c).train()
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            rows = [row for row in rows if row["step"] > COLD and "updated" in row]
            medians = [statistics.median(row[f"seconds/{phase}"] for row in rows) for phase in ("generate", "update")]
            seconds.append([*medians, sum(medians)])
        for name, plain, pruned in zip(ratios, *seconds, strict=True):
            ratios[name].append(plain / pruned)
    return ratios


def survivors(task: str, model: Path, groups: int, engine: str) -> dict[str, float]:
    """Share of tokens of surviving rollouts that are others when nobody is pruned."""
    from winnow.env.rewards.rewarder import Rewarder
    from winnow.methods.gate import GateContext, NamedRule
    from winnow.methods.gate.arrol.gate import Arrol
    from winnow.rollout.evaluate import run_jobs
    from winnow.rollout.runner import RolloutRunner
    from winnow.run.build import build_policy, build_task, rollout_options
    from winnow.types import Job, Visit

    c = config_of(task, model, engine=engine)
    built = build_task(c.env)
    policy, local = build_policy(c, None, None, None)
    rewarder = Rewarder(c.reward_funcs or built.reward_funcs, c.reward_weights, c.reward_timeout_s)
    assert local is not None
    runner = RolloutRunner(local, built, policy.tokenizer, rewarder, rollout_options(c))

    def rolled_out(prompts: Sequence[Any]) -> list[Any]:
        return run_jobs(runner, [Job(Visit(i, 0, prompt), c.num_generations) for i, prompt in enumerate(prompts)])

    def said() -> list[np.ndarray | None]:
        found = rolled_out(built.train[:groups])
        return [None if r.reward is None else r.token_ids for g in found for r in g.rollouts]

    try:
        plain = said()
        gate = Arrol(cold_start=1).build(GateContext("arrol"))
        runner.set_rules([NamedRule("arrol", gate.rule())])
        for group in rolled_out(built.train[groups : 2 * groups]):
            gate.observe(group)
        gate.end_step()
        runner.set_rules([NamedRule("arrol", gate.rule())])
        pruned = said()
    finally:
        rewarder.close()
    pairs = [(a, b) for a, b in zip(plain, pruned, strict=True) if a is not None and b is not None]
    total = sum(max(len(a), len(b)) for a, b in pairs)
    same = sum(int((a[: len(b)] == b[: len(a)]).sum()) for a, b in pairs)
    return {"rollouts": len(plain), "survivors": len(pairs), "tokens": total, "differing": 1 - same / total}


def spread(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {key: _spread([row[key] for row in rows]) for key in rows[0]}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=20, help="measured, after the gate's cold start")
    parser.add_argument("--repeats", type=int, default=3, help="of the comparison with and without the gate")
    parser.add_argument("--work", type=Path, help="where arrol_claims.py ran: take its warm starts")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for task in TASKS:
            model = warm_model(task, Path(directory), options.work)
            result[task] = spread(overhead(task, model, options.steps))
            ratios = phases(task, model, options.steps, options.repeats)
            result[task]["times_faster"] = {n: {**_spread(v), "repeats": v} for n, v in ratios.items()}
            for name, engine in (
                ("plain", "{name: local, slots: 256}"),
                ("fixed", "{name: local, slots: 256, fixed_slots: true, max_length: 192}"),
            ):
                result[task][f"survivors_{name}"] = survivors(task, model, 16, engine)
            print(task, json.dumps(result[task]), flush=True)
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
