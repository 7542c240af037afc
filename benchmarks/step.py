"""The whole training step - generate, reward, update, publish - of Winnow against TRL's GRPOTrainer, side by side.

    python benchmarks/bench.py step --out benchmarks/results/step.json [--quick]
    python benchmarks/bench.py llm_update --model DIRECTORY --out benchmarks/results/llm_update.json

Same model, prompts, group size, token budget, learning rate and loss; one update a step; runs alternate, and every run
starts from the same weights. Time is taken from the end of one step to the end of the next, so everything a user waits
for is in it; a run's first step is not counted.

`step`: runs in one process, after each side has picked its own threads and matrix precision. Two workloads: `short`,
the demo's model and prompts; `long_tail`, a model built to end its sequences with a hazard that the first sampled token
decides, so that neither side knows the lengths.

`llm_update`: SmolLM2-135M-Instruct, each run in a process of its own, whose peak memory is taken. Two workloads:
`equal`, completions of 64 tokens, one of four groups with equal rewards; `long_tail`, of up to 256, where the model
ends them, all groups with a signal. The update's share of the machine's matrix rate, the highest of all runs, counts
multiply-adds that the loss needs: prompts once a group, recomputed ones not at all, groups without a signal neither.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import in_a_process, in_turn, machine, matmul_rate, spread, write_json
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from workloads import Workload, chat_workload, long_tail_workload, short_workload

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


@dataclass
class Run:
    """What one run did, from its second step on."""

    step_seconds: list[float]
    lengths: list[int]
    zero_variance: list[bool]
    phases: dict[str, float]
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
            "phases": self.phases,
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


def run_winnow(w: Workload, setting: Setting, steps: int) -> Run:
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
                "device": "cpu",
                "threads": setting.threads,
                "matmul_precision": setting.matmul_precision,
                "dtype": setting.dtype,
                "engine": {"name": "local", "dtype": setting.dtype},
                "gradient_checkpointing": False,
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


def train_by_trl(trainer_class: Any, model: Path, rows: list[Any], reward: Any, clock: Marks, **settings: Any) -> None:
    """A run of TRL's of which only steps are of interest. TRL would recompute layers unless told not to.

    `settings`: TRL's arguments; under `methods` more of the trainer's own.
    """
    from datasets import Dataset
    from trl import GRPOConfig

    methods = settings.pop("methods", {})
    silent = {"report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
    same = {"lr_scheduler_type": "constant", "use_cpu": True, "gradient_checkpointing": False}
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(**silent, **same, **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        callbacks=[clock],
        **methods,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def run_trl(w: Workload, setting: Setting, steps: int) -> Run:
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
            train_by_trl(
                Timed,
                w.model_dir,
                [{"prompt": text} for text in w.prompts],
                judge.reward,
                clock,
                output_dir=directory,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=w.rollouts // rows,
                num_generations=w.num_generations,
                max_completion_length=w.max_completion_length,
                learning_rate=w.learning_rate,
                max_steps=steps + 1,
                shuffle_dataset=False,
                bf16=setting.dtype == "bfloat16",
            )
    finally:
        torch.set_float32_matmul_precision("highest")
    steps_seconds = [b - a for a, b in itertools.pairwise([clock.marks[0], *clock.marks])]
    phases = [{"generate": g, "update": s - g} for g, s in zip(generation, steps_seconds, strict=True)]
    return judge.run(clock.marks, phases)


SIDES: dict[str, Callable[[Workload, Setting, int], Run]] = {"winnow": run_winnow, "trl": run_trl}


def calibrate(w: Workload, threads: Sequence[int]) -> tuple[dict[str, Setting], dict[str, Any]]:
    """The fastest setting of each side on a smaller version of the workload, and all that was tried."""
    small = replace(w, prompts_per_step=min(w.prompts_per_step, 16))
    chosen, tried = {}, {}
    for side, run in SIDES.items():
        rows = (64, 256) if side == "trl" else (256,)
        settings = [Setting(t, p, r) for t in threads for p in ("highest", "medium") for r in rows]
        seconds = {s: run(small, s, 1).seconds for s in settings}
        chosen[side] = min(seconds, key=lambda s: seconds[s])
        tried[side] = [asdict(s) | {"step_seconds": round(t, 4)} for s, t in seconds.items()]
        print(f"{w.name}: {side} runs best with {chosen[side]}", flush=True)
    return chosen, tried


def measure(
    name: str, settings: dict[str, Setting], run: Callable[[str, Setting], dict[str, Any]], repeats: int
) -> dict[str, Any]:
    """Both sides in turn; a run of a side returns its summary."""
    rounds = in_turn({side: partial(run, side, settings[side]) for side in SIDES}, repeats)
    pairs = [(found["winnow"], found["trl"]) for found in rounds]
    seconds = [(statistics.mean(a["step_seconds"]), statistics.mean(b["step_seconds"])) for a, b in pairs]
    result = {
        "workload": name,
        "settings": {side: asdict(setting) for side, setting in settings.items()},
        "runs": rounds,
        "step_times_faster": spread(b / a for a, b in seconds),
        "tokens_per_second_ratio": spread(a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs),
        "update_times_faster": spread(b["phases"]["update"] / a["phases"]["update"] for a, b in pairs),
    }
    print(f"{name}: TRL takes so many times as long: {result['step_times_faster']}", flush=True)
    return result


def measure_small(w: Workload, repeats: int, steps: int, threads: Sequence[int]) -> dict[str, Any]:
    chosen, tried = calibrate(w, threads)
    found = measure(w.name, chosen, lambda side, setting: SIDES[side](w, setting, steps).summary(), repeats)
    return found | {"calibration": tried, "prompts_per_step": w.prompts_per_step, "group": w.num_generations}


def pretrained_settings(dtype: str) -> dict[str, Setting]:
    """Winnow as it chooses by itself; TRL with its own number of rows."""
    threads = len(os.sched_getaffinity(0))
    return {
        "winnow": Setting(threads, "highest", tokens_per_microbatch="auto", dtype=dtype),
        "trl": Setting(threads, "highest", rows_per_microbatch=8, dtype=dtype),
    }


def run_pretrained(model: Path, name: str, side: str, dtype: str) -> dict[str, Any]:
    """Of one side, in this process; call it in a fresh one."""
    setting, long_tail = pretrained_settings(dtype)[side], name == "long_tail"
    with tempfile.TemporaryDirectory() as directory:
        w = chat_workload(Path(directory), model, long_tail=long_tail, prompts_per_step=2 if long_tail else 4)
        torch.set_num_threads(setting.threads)
        rate = matmul_rate(getattr(torch, dtype))
        run = SIDES[side](w, setting, 1)
        assert long_tail or set(run.lengths) == {w.max_completion_length}, "a side has ended texts"
        needed = flops(w, run.lengths, run.zero_variance)
    return run.summary() | {
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "update_flops_per_second": needed / run.phases["update"],
        "matmul_rate": rate,
    }


def flops(w: Workload, lengths: list[int], equal: list[bool]) -> float:
    """Of forward and backward passes over the groups with a signal."""
    c, tokenizer = AutoConfig.from_pretrained(w.model_dir), PreTrainedTokenizerFast.from_pretrained(w.model_dir)
    prompt = len(tokenizer(w.prompts[0])["input_ids"])
    kv = c.num_key_value_heads * c.head_dim
    layer = 2 * c.hidden_size * (c.hidden_size + kv) + 3 * c.hidden_size * c.intermediate_size
    total = 0.0
    for number, same in enumerate(equal):
        if same:
            continue
        total += c.num_hidden_layers * prompt * (layer + c.hidden_size * prompt)
        for n in lengths[number * w.num_generations : (number + 1) * w.num_generations]:
            attention = 2 * c.hidden_size * (prompt + n / 2)
            total += n * (c.num_hidden_layers * (layer + attention) + c.hidden_size * c.vocab_size)
    return 6 * total


def measure_pretrained(name: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    def run(side: str, setting: Setting) -> dict[str, Any]:
        return in_a_process("llm_update", "--model", str(options.model), "--dtype", dtype, "--one", name, side)

    found = measure(name, pretrained_settings(dtype), run, options.repeats)
    ours, theirs = ([pair[side] for pair in found["runs"]] for side in ("winnow", "trl"))
    rate = max(one["matmul_rate"] for one in (*ours, *theirs))
    return (
        {"dtype": dtype}
        | found
        | {
            "peak_memory_ratio": spread(a["peak_mib"] / b["peak_mib"] for a, b in zip(ours, theirs, strict=True)),
            "update_share_of_matmul_rate": spread(a["update_flops_per_second"] / rate for a in ours),
        }
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    if parser.get_default("benchmark") == "step":
        parser.add_argument("--quick", action="store_true", help="smaller steps, two repeats: a few minutes")
        parser.add_argument("--threads", type=int, nargs="+", help="to choose from; by default 1 and all cores")
        return
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "SIDE"), help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    results: dict[str, Any] = {"machine": machine("cpu", "trl", "accelerate"), "runs": []}
    if options.benchmark == "step":
        for found in small_runs(options.quick, options.threads or sorted({1, len(os.sched_getaffinity(0))})):
            results["runs"].append(found)
            write_json(options.out, results | {"quick": options.quick})
    elif options.one:
        print(json.dumps(run_pretrained(options.model, *options.one, *options.dtype)))
    else:
        for dtype, name in itertools.product(options.dtype, ("equal", "long_tail")):
            results["runs"].append(measure_pretrained(name, dtype, options))
            write_json(options.out, results)


def small_runs(quick: bool, threads: Sequence[int]) -> Iterator[dict[str, Any]]:
    repeats = 2 if quick else 5
    with tempfile.TemporaryDirectory() as directory:
        short = short_workload(Path(directory), teaching_steps=30 if quick else 150, prompts_per_step=32)
        yield measure_small(short, repeats, 3 if quick else 10, threads)
        long_tail = long_tail_workload(Path(directory), prompts_per_step=16 if quick else 128)
        yield measure_small(long_tail, repeats, 1 if quick else 2, threads)
