"""Steps to the same accuracy: Winnow's own loop and `WinnowGRPOTrainer` inside TRL, on the demo's task and model.

    python benchmarks/trl_agreement.py --out benchmarks/results/trl_agreement.json

Both sides start from the same warm start (its seed is 0) and have the same selector, filter, advantage, loss and Adam;
only the order of prompts, the sampler and the update differ. Every few steps held-out prompts are answered, by one
engine for both. Goes on where it was interrupted; the figures so far are in the file after every run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from arms import ROOT, write_json
from claims_figures import interval
from machine import machine
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback

from winnow.run.standalone import evaluate_model
from winnow.run.trainer import Trainer
from winnow.study.warm_start import WarmStartConfig, warm_start
from winnow.tasks.countdown import CountdownConfig, countdown_reward

PROMPTS, G, EVERY = 16, 8, 10
METHODS: dict[str, Any] = {"selector": "greso", "filter": "zero_variance", "advantage": "rloo"}
OPTIMIZER = {"learning_rate": 2e-4, "warmup_steps": 10, "adam_beta2": 0.98, "weight_decay": 0.0, "max_grad_norm": 1.0}
TESTED = {
    "env": "countdown",
    "max_completion_length": 24,
    "max_prompt_length": 32,
    "eval_prompts": 256,
    "eval_generations": 8,
    "threads": 1,
}


def tested(model: Path) -> float:
    """pass@1 on held-out prompts."""
    return float(evaluate_model(str(model), TESTED)["pass@1"])


def own(start: Path, run: Path, seed: int, steps: int) -> None:
    """Winnow's own loop; weights of every `EVERY` steps are in its checkpoints."""
    settings = (
        TESTED
        | METHODS
        | OPTIMIZER
        | {"prompts_per_step": PROMPTS, "num_generations": G, "seed": seed, "env": "countdown"}
    )
    more = {"max_steps": steps, "save_steps": EVERY, "save_total_limit": steps, "output_dir": str(run)}
    Trainer(model=str(start), config=settings | more).train()


def inside(start: Path, run: Path, seed: int, steps: int) -> None:
    """`WinnowGRPOTrainer`; weights of every `EVERY` steps beside its folder."""
    from datasets import Dataset
    from trl import GRPOConfig

    from winnow.integrations.trl import WinnowGRPOTrainer

    class Keep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step % EVERY == 0:
                model.save_pretrained(run / "weights" / str(state.global_step))
                tokenizer.save_pretrained(run / "weights" / str(state.global_step))

    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    args = GRPOConfig(
        output_dir=str(run),
        per_device_train_batch_size=PROMPTS * G,
        num_generations=G,
        max_completion_length=24,
        lr_scheduler_type="constant_with_warmup",
        max_steps=steps,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=EVERY,
        save_strategy="no",
        disable_tqdm=True,
        **OPTIMIZER,
    )
    trainer = WinnowGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        reward_funcs=solved,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": p.text, **p.columns} for p in CountdownConfig().build().train]),
        processing_class=tokenizer,
        callbacks=[Keep()],
        **METHODS,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def solved(completions: list[str], **columns: Any) -> list[float | None]:
    """Reward of the task under TRL's signature."""
    return countdown_reward(completions, *(columns[name] for name in ("numbers", "target", "style")))


SIDES = {"winnow": own, "inside_trl": inside}


def measure(side: str, start: Path, run: Path, seed: int, steps: int) -> dict[str, Any]:
    """Accuracy by step of one run."""
    began = time.perf_counter()
    SIDES[side](start, run, seed, steps)
    seconds = time.perf_counter() - began
    folders = {
        s: run / "weights" / str(s) if side == "inside_trl" else _saved(run, s) for s in range(EVERY, steps + 1, EVERY)
    }
    curve = {0: tested(start)} | {s: tested(folder) for s, folder in folders.items()}
    return {"side": side, "seed": seed, "seconds": round(seconds, 1), "pass@1": curve}


def _saved(run: Path, step: int) -> Path:
    (found,) = [path for path in run.glob("checkpoints/*") if path.name.split("-")[-1].lstrip("0") == str(step)]
    return found / "model"


def steps_to(curve: Mapping[Any, float], goal: float) -> float:
    """Step at which the accuracy first reaches `goal`, on straight lines between evaluations; NaN: never."""
    points = sorted((int(step), value) for step, value in curve.items())
    for (s0, v0), (s1, v1) in itertools.pairwise(points):
        if v0 < goal <= v1:
            return s0 + (s1 - s0) * (goal - v0) / (v1 - v0)
    return math.nan


def figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Steps of both sides to accuracies that all runs reach, and their differences by seed with 95% intervals."""
    seeds = sorted(set.intersection(*({r["seed"] for r in runs if r["side"] == side} for side in SIDES)))
    of = {(r["side"], r["seed"]): r["pass@1"] for r in runs}
    if not seeds:
        return {}
    begin = max(statistics.mean((curve["0"],)) for curve in of.values())
    end = min(max(curve.values()) for curve in of.values())
    found: dict[str, Any] = {"seeds": seeds, "goals": []}
    for share in (0.4, 0.6, 0.8):
        goal = begin + share * (end - begin)
        steps = {side: [steps_to(of[side, seed], goal) for seed in seeds] for side in SIDES}
        ratios = [math.log(b / a) for a, b in zip(steps["winnow"], steps["inside_trl"], strict=True)]
        around = interval(ratios)
        found["goals"].append(
            {
                "pass@1": round(goal, 4),
                "steps": {side: [round(s, 1) for s in values] for side, values in steps.items()},
                "ratio": round(math.exp(statistics.mean(ratios)), 3),
                "interval_95": None
                if around is None or around.low is None
                else [round(math.exp(x), 3) for x in (around.low, around.high)],
            }
        )
    last = [of["inside_trl", seed][max(of["inside_trl", seed], key=int)] for seed in seeds]
    first = [of["winnow", seed][max(of["winnow", seed], key=int)] for seed in seeds]
    around = interval([b - a for a, b in zip(first, last, strict=True)])
    found["end"] = {
        "winnow": first,
        "inside_trl": last,
        "difference_interval_95": None
        if around is None or around.low is None
        else [round(around.low, 4), round(around.high, 4)],
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "trl_agreement")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    start = options.work / "start"
    if not (start / "config.json").exists():
        warm_start(CountdownConfig().build(), start, config=WarmStartConfig(max_steps=270, threads=1))
    result = {"machine": machine("cpu", "trl"), "methods": METHODS, "prompts": PROMPTS, "group": G, "runs": []}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
    for seed in options.seeds:
        for side in SIDES:
            if any((r["side"], r["seed"]) == (side, seed) for r in result["runs"]):
                continue
            run = options.work / f"{side}-s{seed}-{time.time_ns()}"  # one that was interrupted is begun anew
            result["runs"].append(measure(side, start, run, seed, options.steps))
            result = json.loads(json.dumps(result))
            result["figures"] = figures(result["runs"])
            write_json(options.out, result)
            print(json.dumps(result["runs"][-1]), flush=True)
    print(json.dumps(result["figures"], indent=1))


if __name__ == "__main__":
    main()
