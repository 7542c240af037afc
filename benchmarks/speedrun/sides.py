"""One run of one side, in a process of its own: trains under the clock, saves models, leaves `run.json`.

The parent starts it as `sides.py SPEC`, with a `Spec` as JSON. The clock runs from the start of the process; seconds of
saving are taken out. A model is saved whenever the clock has grown by a share, so that every side is measured with the
same relative precision, however long its steps are.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import ROOT, machine, write_json
from speedrun.tracks import TRACKS, Entry, Track

RUN = "run.json"


@dataclass(frozen=True)
class Spec:
    """What a run is, and what the parent decided for it."""

    track: str
    side: str
    seed: int
    rate: float
    device: str
    model: str
    directory: str
    cap_s: float
    growth: float
    """Factor by which the clock grows between two models."""
    changes: tuple[str, ...] = ()
    """Overrides of all sides."""
    began: float = 0.0
    """Start of the process, as `time.time()`."""
    cpu_clock: bool = False
    """Seconds are CPU seconds of the process: right for one thread, whatever else the machine does."""
    decay: float = 0.0
    """Of the averaged weights that are saved in place of the last; 0: the last."""
    span: float = 0.0
    """Of averages over a window that grows with the run (`prototypes/averaging.py`), in place of `decay`."""

    @property
    def entry(self) -> Entry:
        return TRACKS[self.track].entries[self.side]


def config_of(spec: Spec, *changes: str) -> Any:
    """Winnow's configuration of the side; of TRL's sides that of DAPO, with their rate and steps."""
    from winnow.config import load_config

    track: Track = TRACKS[spec.track]
    dapo = track.entries["dapo"]
    recipe, changes_of_dapo = (spec.entry.recipe, ()) if spec.entry.recipe else (dapo.recipe, dapo.changes)
    settings = (
        *changes_of_dapo,
        *spec.entry.changes,
        *track.shared,
        *track.evaluation,
        *(track.on_gpu if spec.device == "cuda" else ()),
        *(f"learning_rate={spec.rate:g}", f"max_steps={spec.entry.steps}", f"seed={spec.seed}"),
        *(f"model={spec.model}", f"device={spec.device}", f"output_dir={spec.directory}/run"),
        *("eval_steps=null", "save_steps=1000000", "log_completions=0"),
        "save_dtype=float32",  # rounded to bfloat16, a model loses what its first steps have changed
    )
    return load_config(ROOT / "recipes" / f"{recipe}.yaml", [*settings, *spec.changes, *changes])


def clock_of(spec: Spec, now: Callable[[], float] = time.time) -> Any:
    """Return a callback of Winnow's and TRL's trainers that keeps the clock.

    Its class needs transformers, whose import is on the clock. `now`: as `spec.began`.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Saves models at their times and ends the run at the cap."""

        def __init__(self) -> None:
            self.save: Callable[[str], None] = lambda directory: None
            self.points: list[dict[str, Any]] = []
            self.steps, self.ended_s, self.loading_s, self.excluded_s = 0, 0.0, 0.0, 0.0

        def seconds(self) -> float:
            if spec.device == "cuda":
                import torch

                torch.cuda.synchronize()
            return now() - spec.began - self.excluded_s

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.loading_s = self.seconds()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps, self.ended_s = state.global_step, self.seconds()
            due = self.points[-1]["seconds"] * spec.growth if self.points else 0.0
            if self.ended_s >= due:
                self.keep()
            if self.ended_s >= spec.cap_s:
                control.should_training_stop = True

        def keep(self) -> None:
            """Save the model of the last step, outside the clock."""
            if self.points and self.points[-1]["step"] == self.steps:
                return
            directory = f"{spec.directory}/step-{self.steps:06d}"
            self.save(directory)
            self.points.append({"seconds": self.ended_s, "step": self.steps, "model": directory})
            self.excluded_s = now() - spec.began - self.ended_s

    return Clock()


def run_winnow(spec: Spec, clock: Any) -> dict[str, Any]:
    from winnow.record.stop_conditions import RunStoppedError
    from winnow.run.trainer import Trainer

    config = config_of(spec)
    callbacks, averaging = [clock], None
    if spec.decay or spec.span:
        from prototypes.averaging import Averaging

        averaging = Averaging(spec.decay, spec.span)
        callbacks = [averaging, clock]
    trainer = Trainer(config=config, callbacks=callbacks)
    scale: Any = trainer.methods.step_scale
    if hasattr(scale, "on_step_end"):  # one of `prototypes`, which reads the groups of each step
        trainer.add_callback(scale)
    clock.save = trainer.save_model if averaging is None else averaging.saving(trainer.save_model)
    stopped = ""
    try:
        trainer.train()
    except RunStoppedError as error:
        stopped = str(error)
    rows = trainer.state.log_history
    return {"configuration": config.model_dump(mode="json"), "stopped": stopped, **figures_of(rows)}


def figures_of(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Seconds by phase and tokens, from Winnow's metrics of each step."""
    phases: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("seconds/"):
                phases[key.removeprefix("seconds/")] = phases.get(key.removeprefix("seconds/"), 0.0) + value
    last = rows[-1] if rows else {}
    tokens = {
        "sampled": last.get("num_tokens"),
        "decoded": last.get("num_decoded_tokens"),
        "computed": last.get("num_computed_tokens"),
        "trained": sum(row.get("tokens/trained", 0.0) for row in rows),
    }
    return {"phases": phases, "tokens": tokens}


def run_trl(spec: Spec, clock: Any) -> dict[str, Any]:
    """TRL's `GRPOTrainer`, or `WinnowGRPOTrainer`, as TRL's documentation sets up DAPO, with the batch of `dapo`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from winnow.base.machine import usable_threads
    from winnow.run.inputs import build_task

    track, inside = TRACKS[spec.track], spec.side == "trl-winnow"
    c = config_of(spec)
    torch.set_num_threads(c.threads if isinstance(c.threads, int) else usable_threads())
    task = build_task(c.env)
    counts = {"sampled": 0, "computed": 0}
    base: Any = GRPOTrainer
    methods: dict[str, Any] = {}
    if inside:
        from winnow.integrations.trl import WinnowGRPOTrainer as base  # noqa: N813

        methods = {"selector": "thompson", "filter": "zero_variance", "advantage": "rloo", "engine": "local"}
    generation = [0.0]

    class Timed(base):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = time.monotonic()
            scored = super()._generate_and_score_completions(inputs)
            generation[0] += time.monotonic() - started
            return scored

    settings = trl_settings(spec, c, track)
    silent = {"report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32),
        reward_funcs=reward_of(task, c, counts),
        args=GRPOConfig(output_dir=c.output_dir, **settings, **silent),
        train_dataset=Dataset.from_list([{"prompt": _prompt(p), "ordinal": p.ordinal} for p in task.train]),
        processing_class=AutoTokenizer.from_pretrained(spec.model),
        callbacks=[clock],
        **methods,
    )
    trainer.remove_callback(PrinterCallback)
    clock.save = trainer.save_model
    trainer.train()
    found = {"tokens": {**counts, "trained": counts["sampled"]}}
    if inside:
        lines = (Path(c.output_dir) / "winnow" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found = {"tokens": figures_of([json.loads(line) for line in lines])["tokens"]}
    update_s = clock.ended_s - clock.loading_s - generation[0]
    phases = {"generate": generation[0], "update": update_s}
    return {"configuration": settings | methods, "stopped": "", "phases": phases, **found}


def _prompt(prompt: Any) -> Any:
    return prompt.text if prompt.messages is None else list(prompt.messages)


def trl_settings(spec: Spec, c: Any, track: Track) -> dict[str, Any]:
    """Return TRL's DAPO: its default loss and no KL penalty, `epsilon_high` as its documentation recommends."""
    rollouts = c.prompts_per_step * c.num_generations
    rows = min(track.trl_rows if spec.device == "cpu" else rollouts, rollouts)
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": rollouts // rows,
        "num_generations": c.num_generations,
        "max_completion_length": c.max_completion_length,
        "learning_rate": spec.rate,
        "lr_scheduler_type": "constant_with_warmup" if c.lr_scheduler_type == "constant" else c.lr_scheduler_type,
        "warmup_steps": c.warmup_steps,
        "adam_beta2": c.adam_beta2,
        "max_steps": c.max_steps,
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "beta": 0.0,
        "seed": spec.seed,
        "use_cpu": spec.device == "cpu",
        "bf16": spec.device == "cuda",
        "gradient_checkpointing": False,
    }


def reward_of(task: Any, c: Any, counts: dict[str, int]) -> Callable[..., list[float | None]]:
    """Return the task's reward function under TRL's signature; it also counts tokens.

    `computed` has what a batch pads, as the longest completion decides how long all rows are decoded.
    """
    from winnow.config.paths import REWARDS
    from winnow.env.workers.functions import load_function, parameters_of

    (function,) = [load_function(REWARDS[name]) for name in c.reward_funcs or ()] or task.reward_funcs
    parameters = parameters_of(function)

    def reward(
        completions: list[Any], completion_ids: list[list[int]], ordinal: list[int], **_: Any
    ) -> list[float | None]:
        lengths = [len(ids) for ids in completion_ids]
        counts["sampled"] += sum(lengths)
        counts["computed"] += max(lengths) * len(lengths)
        rows = [task.train[i].columns for i in ordinal]
        names = [name for name in rows[0] if name in parameters or "**" in parameters]
        columns = {name: [row[name] for row in rows] for name in names}
        return list(function(completions=completions, **columns))

    return reward


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    spec = replace(spec, changes=tuple(spec.changes))
    clock = clock_of(replace(spec, began=0.0), time.process_time) if spec.cpu_clock else clock_of(spec)
    run = run_trl if spec.side.startswith("trl") else run_winnow
    found = run(spec, clock)
    clock.keep()
    shutil.rmtree(f"{spec.directory}/run", ignore_errors=True)
    packages = ["trl"] if run is run_trl else []
    ended = {"steps": clock.steps, "seconds": clock.ended_s, "loading_s": clock.loading_s, "saving_s": clock.excluded_s}
    here = machine(spec.device, *packages)
    del here["load_average_at_start"]  # the parent has measured it, before and after
    record = {**asdict(spec), **ended, **found, "machine": here, "points": clock.points}
    write_json(Path(spec.directory) / RUN, record)


if __name__ == "__main__":
    main()
