"""The whole training step - generate, reward, update, publish - of Winnow against TRL's GRPOTrainer, side by side.

    python benchmarks/bench.py step --out benchmarks/results/step.json [--quick] [--device cuda]

Same model, prompts, group size, token budget, learning rate and loss; one update a step; runs alternate in one
process and every run starts from the same weights. Each side first picks its own threads and matrix precision. Time
is taken from the end of one step to the end of the next, so everything a user waits for is in it; a run's first step
is not counted. Two workloads: `short`, the demo's model and prompts; `long_tail`, a model built to end its sequences
with a hazard that the first sampled token decides, so that neither side is told the lengths.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import in_turn, machine, spread, write_json
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from workloads import Workload, long_tail_workload, short_workload

from winnow.run.trainer import Trainer

REWARDED_SHARE = 0.1
"""At 8 siblings 43% of the groups then have equal rewards, as in the middle of a run on Countdown."""


@dataclass(frozen=True)
class Setting:
    """What a user would tune on a given machine."""

    threads: int
    matmul_precision: str
    rows_per_microbatch: int = 256
    """TRL only; Winnow cuts by tokens."""
    tokens_per_microbatch: int | str = 16_384
    dtype: str = "float32"
    """Of forward and backward pass (under autocast), and of generation."""
    gradient_checkpointing: bool = False


@dataclass
class Run:
    """What one run did, from its second step on."""

    step_seconds: list[float]
    lengths: list[int]
    zero_variance: list[bool]
    phases: dict[str, float] = field(default_factory=dict)
    """Mean seconds of a step."""

    @property
    def seconds(self) -> float:
        return statistics.mean(self.step_seconds)

    def summary(self) -> dict[str, Any]:
        tokens = sum(self.lengths) / len(self.step_seconds)
        return {
            "step_seconds": [round(s, 4) for s in self.step_seconds],
            "tokens_per_step": tokens,
            "tokens_per_second": tokens / self.seconds,
            "zero_variance_share": statistics.mean(self.zero_variance),
            "lengths": {
                "mean": statistics.mean(self.lengths),
                "median": statistics.median(self.lengths),
                "p90": float(np.quantile(self.lengths, 0.9)),
                "max": max(self.lengths),
            },
            **({"phases": self.phases} if self.phases else {}),
        }


class Judge:
    """A cheap reward: 1 for a pseudo-random tenth of all completions, by their texts; or, if the workload says how many
    groups have equal rewards, for the first of each other."""

    def __init__(self, w: Workload) -> None:
        self.w = w
        self.lengths: list[int] = []
        self.zero_variance: list[bool] = []

    def reward(self, completions: list[str], completion_ids: list[Any], **_: Any) -> list[float | None]:
        rewards = [float(zlib.crc32(c.encode()) / 2**32 < REWARDED_SHARE) for c in completions]
        self.lengths += [len(ids) for ids in completion_ids]
        size, share = self.w.num_generations, self.w.zero_variance_share
        for start in range(0, len(rewards), size):
            if share is not None:
                number = len(self.zero_variance)
                same = int((number + 1) * share) > int(number * share)
                rewards[start : start + size] = [float(not same)] + [0.0] * (size - 1)
            self.zero_variance.append(len(set(rewards[start : start + size])) == 1)
        return list(rewards)

    def run(self, marks: list[float], phases: list[dict[str, float]]) -> Run:
        """The run but for its first step; `phases` are those of each step."""
        seconds = [b - a for a, b in itertools.pairwise(marks)]
        means = {name: round(statistics.mean(p[name] for p in phases[1:]), 5) for name in phases[1]}
        return Run(seconds, self.lengths[self.w.rollouts :], self.zero_variance[self.w.prompts_per_step :], means)


class Marks(TrainerCallback):
    """Notes when each step has ended."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.marks: list[float] = []
        self.phases: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.marks.append(self.clock())
        if state.log_history:  # Winnow's; TRL is told to log nothing
            self.phases.append({k: v for k, v in state.log_history[-1].items() if k.startswith("seconds/")})


def run_winnow(w: Workload, setting: Setting, steps: int, device: str) -> Run:
    judge = Judge(w)
    with tempfile.TemporaryDirectory() as directory:
        clock = Marks()
        trainer = Trainer(
            model=str(w.model_dir),
            train_dataset=[{"prompt": text} for text in w.prompts],
            reward_funcs=[judge.reward],
            processing_class=PreTrainedTokenizerFast.from_pretrained(w.model_dir),
            config={
                "output_dir": f"{directory}/run",
                "device": device,
                "threads": setting.threads,
                "matmul_precision": setting.matmul_precision,
                "dtype": setting.dtype,
                "engine": {"name": "local", "dtype": setting.dtype},
                "gradient_checkpointing": setting.gradient_checkpointing,
                "tokens_per_microbatch": setting.tokens_per_microbatch,
                "max_steps": steps + 1,
                "prompts_per_step": w.prompts_per_step,
                "num_generations": w.num_generations,
                "max_completion_length": w.max_completion_length,
                "learning_rate": w.learning_rate,
                "selector": "ordered",
                "filter": {"name": "zero_variance", "refill": False},
                "save_steps": 10_000,
                "log_completions": 0,
            },
            callbacks=[clock],
        )
        trainer.train()
    phases = [{k.removeprefix("seconds/"): v for k, v in p.items() if "total" not in k} for p in clock.phases]
    return judge.run(clock.marks, phases)


def quiet_trl(output_dir: str, device: str, **settings: Any) -> Any:
    """TRL's arguments for a run of which only steps are of interest."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=output_dir,
        lr_scheduler_type="constant",
        use_cpu=device == "cpu",
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )


def run_trl(w: Workload, setting: Setting, steps: int, device: str) -> Run:
    from datasets import Dataset
    from trl import GRPOTrainer

    torch.set_num_threads(setting.threads)
    torch.set_float32_matmul_precision(setting.matmul_precision)
    rows = min(setting.rows_per_microbatch, w.rollouts)
    clock, judge = Marks(), Judge(w)
    generation: list[float] = []

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            scored = super()._generate_and_score_completions(inputs)
            generation.append(time.perf_counter() - start)
            return scored

    try:
        with tempfile.TemporaryDirectory() as directory:
            config = quiet_trl(
                directory,
                device,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=w.rollouts // rows,
                num_generations=w.num_generations,
                max_completion_length=w.max_completion_length,
                learning_rate=w.learning_rate,
                max_steps=steps + 1,
                beta=0.0,
                shuffle_dataset=False,
                bf16=setting.dtype == "bfloat16",
                gradient_checkpointing=setting.gradient_checkpointing,
            )
            trainer = Timed(
                model=AutoModelForCausalLM.from_pretrained(w.model_dir, dtype=torch.float32),
                reward_funcs=judge.reward,
                args=config,
                train_dataset=Dataset.from_list([{"prompt": text} for text in w.prompts]),
                processing_class=PreTrainedTokenizerFast.from_pretrained(w.model_dir),
                callbacks=[clock],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
    finally:
        torch.set_float32_matmul_precision("highest")
    steps_seconds = [b - a for a, b in itertools.pairwise([clock.marks[0], *clock.marks])]
    phases = [{"generate": g, "update": s - g} for g, s in zip(generation, steps_seconds, strict=True)]
    return judge.run(clock.marks, phases)


SIDES: dict[str, Callable[[Workload, Setting, int, str], Run]] = {"winnow": run_winnow, "trl": run_trl}


def calibrate(w: Workload, device: str, threads: Sequence[int]) -> tuple[dict[str, Setting], dict[str, Any]]:
    """The fastest setting of each side on a smaller version of the workload, and all that was tried."""
    small = replace(w, prompts_per_step=min(w.prompts_per_step, 16))
    chosen, tried = {}, {}
    for side, run in SIDES.items():
        rows = (64, 256) if side == "trl" else (256,)
        settings = [Setting(t, p, r) for t in threads for p in ("highest", "medium") for r in rows]
        seconds = {s: run(small, s, 1, device).seconds for s in settings}
        chosen[side] = min(seconds, key=lambda s: seconds[s])
        tried[side] = [asdict(s) | {"step_seconds": round(t, 4)} for s, t in seconds.items()]
        print(f"{w.name}: {side} runs best with {chosen[side]}", flush=True)
    return chosen, tried


def measure(w: Workload, repeats: int, steps: int, device: str, threads: Sequence[int]) -> dict[str, Any]:
    chosen, tried = calibrate(w, device, threads)
    sides = {side: partial(run, w, chosen[side], steps, device) for side, run in SIDES.items()}
    rounds = in_turn(sides, repeats)
    summaries = [{side: run.summary() for side, run in runs.items()} for runs in rounds]
    result = {
        "workload": asdict(w) | {"model_dir": w.name, "prompts": len(w.prompts), "rollouts": w.rollouts},
        "settings": {side: asdict(setting) for side, setting in chosen.items()},
        "calibration": tried,
        "runs": summaries,
        "ratio": spread(run["trl"].seconds / run["winnow"].seconds for run in rounds),
        "ratio_of_tokens_per_second": spread(
            run["winnow"]["tokens_per_second"] / run["trl"]["tokens_per_second"] for run in summaries
        ),
    }
    print(f"{w.name}: TRL takes so many times as long: {result['ratio']}", flush=True)
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="a check that it works, in a few minutes")
    parser.add_argument(
        "--threads", type=int, nargs="+", help="thread counts to choose from; 1 and all cores by default"
    )
    parser.add_argument("--only", choices=["short", "long_tail"])


def run(options: argparse.Namespace) -> None:
    quick, device = options.quick, options.device
    threads = options.threads or sorted({1, len(os.sched_getaffinity(0))})
    results: dict[str, Any] = {"machine": machine(device, "trl", "accelerate"), "quick": quick, "workloads": []}
    with tempfile.TemporaryDirectory() as directory:
        folder, repeats = Path(directory), 2 if quick else 5
        for name in [options.only] if options.only else ["short", "long_tail"]:
            if name == "short":
                steps = 3 if quick else 10
                work = short_workload(folder, teaching_steps=30 if quick else 150, prompts_per_step=32)
            else:
                steps = 1 if quick else 2
                work = long_tail_workload(folder, prompts_per_step=16 if quick else 128)
            results["workloads"].append(measure(work, repeats, steps, device, threads))
            write_json(options.out, results)
