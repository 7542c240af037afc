"""Tracks of the speedrun: what all sides share, the target, and what each side may choose for itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness import ROOT

WORK = ROOT / "build" / "speedrun"
"""Models, data and unfinished runs."""
TUNING_SEED = 9
DAPO = (
    *("gates=[]", "filter=zero_variance", "num_generations=8", "prompts_per_step=32", "advantage=rloo"),
    *("policy_loss=plain", "loss_type=sequence_sum", "correction={name: truncate, low: 0.1003, high: 9.974}"),
)
"""`families.tuned.DAPO_REFILL`, whose module would import Winnow's trainer on TRL's clock."""
AHEAD = ("sync={name: in_process, overlap: true}", "max_lag=2")
"""The update runs on the second core while the next batch is generated."""
CONTINUOUS = ("sync={name: in_process, overlap: true, lag: continuous}", "max_lag=4", "rollout_batch=exact")
"""Rollouts go on across updates too, so that decode steps have more rows. It does not pay for 24 tokens."""
ONE_ROUND = ("rollout_batch={name: adaptive, size: 80}",)
"""Two and a half batches of 32, as about half of the groups have no signal: one round of decode steps, not three."""
SIDES = ("trl", "trl-winnow", "dapo", "fastest")


@dataclass(frozen=True)
class Entry:
    """What a side brings to a track."""

    rates: tuple[float, float, float]
    """Learning rates to try; the middle one until the side is tuned."""
    steps: int
    """Most optimizer steps."""
    recipe: str = ""
    """Of Winnow's sides; TRL's take batch, optimizer and lengths from `dapo`, but for their changes."""
    changes: tuple[str, ...] = ()
    cores: int = 1
    """Runs on one core are measured side by side where the track allows it."""
    patience: float = 1.0
    """The cap of its runs, in caps of the track."""


@dataclass(frozen=True)
class Track:
    model: str
    """A name of `winnow models`, or the directory of a warm start in `WORK`."""
    shared: tuple[str, ...]
    """Overrides of all sides: data and rewards."""
    evaluation: tuple[str, ...]
    """Overrides of the evaluation: prompts and answers."""
    target: float
    """Level that the lower bound of held-out pass@1 has to pass for good."""
    cap_s: float
    """A run ends after this much of the clock."""
    entries: Mapping[str, Entry]
    warm_start: Mapping[str, Any] | None = None
    """Options of `winnow warm-start` that make the model, outside the clock; None: it is used as it is."""
    growth: float = 1.1
    """Factor by which the clock grows from one evaluated model to the next."""
    alone: bool = False
    """Runs use all cores, one at a time; else as many run at a time as have the cores that they need."""
    trl_rows: int = 256
    """Rows of a micro-batch in TRL."""
    prepare: Callable[[], None] = lambda: None
    """Makes the data, once."""
    quick: tuple[float, float] = (0.0, 0.0)
    """Target and cap of a first look at it."""
    on_gpu: tuple[str, ...] = ()
    """Overrides of all sides on a GPU."""

    def limits(self, quick: bool) -> tuple[float, float]:
        """Return target and cap."""
        return self.quick if quick else (self.target, self.cap_s)


def same_rates(rates: tuple[float, float, float], steps: int, recipe: str, *changes: str) -> dict[str, Entry]:
    """The entries of TRL, TRL with Winnow inside, and DAPO."""
    trl = Entry(rates, 2 * steps)
    return {"trl": trl, "trl-winnow": trl, "dapo": Entry(rates, steps, recipe, changes)}


SPELLING = WORK / "spell-backward"
LETTERS = {"min_word_len": 3, "max_word_len": 4}


def make_spelling() -> None:
    """Write reasoning-gym's questions as chats, each word once, a fifth of them held out."""
    if (SPELLING / "test.jsonl").exists():
        return
    try:
        from reasoning_gym import create_dataset
    except ImportError:
        raise SystemExit("spell-backward: its words are reasoning-gym's; pip install reasoning-gym") from None
    answers = {e["question"]: e["answer"] for e in create_dataset("spell_backward", size=4000, seed=0, **LETTERS)}
    rows = [
        json.dumps({"prompt": [{"role": "user", "content": question}], "ground_truth": answer}) + "\n"
        for question, answer in answers.items()
    ][:1280]
    SPELLING.mkdir(parents=True, exist_ok=True)
    (SPELLING / "train.jsonl").write_text("".join(rows[256:]), encoding="utf-8")
    (SPELLING / "test.jsonl").write_text("".join(rows[:256]), encoding="utf-8")


SMOLLM2 = ("threads=auto", "reward_funcs=[exact]", "lr_scheduler_type=linear", "warmup_steps=0")
"""A constant rate that is right for the first minute is too high later. Sides plan for five to seven minutes, and TRL's
warmup would begin with a step at rate 0."""
SMOLLM2_DAPO = Entry((2e-5, 4e-5, 8e-5), 16, "arithmetic-smollm2", DAPO)
SMOLLM2_TRL = Entry((1e-5, 2e-5, 4e-5), 20, changes=("prompts_per_step=8",), patience=2.0)
"""A quarter of DAPO's batch: with all of it a step takes four minutes."""
SMALL_BATCH = ("selector=thompson", "prompts_per_step=8", "rollout_batch={name: adaptive, size: 20}", "max_lag=1")
"""A quarter of DAPO's batch in one round: at 135M parameters an update takes as long as its tokens, of any batch."""
SMOLLM2_FASTEST = Entry((1e-5, 2e-5, 4e-5), 48, "arithmetic-smollm2", (*DAPO, *SMALL_BATCH))
SMOLLM2_SIDES = {"trl": SMOLLM2_TRL, "trl-winnow": SMOLLM2_TRL, "dapo": SMOLLM2_DAPO, "fastest": SMOLLM2_FASTEST}
SPELL_DATA = (f"env.path={SPELLING}/train.jsonl", f"env.test={SPELLING}/test.jsonl")

TRACKS = {
    "countdown": Track(
        model="countdown",
        shared=("env.train_size=4096", "env.test_size=512"),
        evaluation=("eval_prompts=512", "eval_generations=8"),
        target=0.30,
        cap_s=900,
        entries={
            **same_rates((1e-4, 2e-4, 4e-4), 300, "countdown-dapo"),
            "fastest": Entry((1e-4, 2e-4, 4e-4), 600, "thrifty", (*AHEAD, *ONE_ROUND), cores=2),
        },
        warm_start={"max_steps": 270},
        quick=(0.18, 90),
    ),
    "chain-sums": Track(
        model="chain-sum",
        shared=("env.test_size=1024",),
        evaluation=("eval_prompts=512", "eval_generations=8"),
        target=0.80,
        cap_s=900,
        entries={
            **same_rates((1e-4, 2e-4, 4e-4), 60, "chain-sum-arrol", *DAPO),
            "fastest": Entry((5e-5, 1e-4, 2e-4), 240, "chain-sum-thrifty", (*CONTINUOUS, "reuse=null"), cores=2),
        },
        warm_start={"max_steps": 900, "batch_size": 32},
        growth=1.15,
        quick=(0.60, 90),
    ),
    "arithmetic": Track(
        model="smollm2-135m",
        shared=SMOLLM2,
        evaluation=("eval_prompts=128", "eval_generations=8"),
        target=0.45,
        cap_s=600,
        entries=SMOLLM2_SIDES,
        growth=1.2,
        alone=True,
        trl_rows=16,
        quick=(0.30, 100),
        on_gpu=("dtype=bfloat16",),
    ),
    "spell-backward": Track(
        model="spell-backward",
        shared=(*SMOLLM2, *SPELL_DATA),
        evaluation=("eval_prompts=256", "eval_generations=8"),
        target=0.30,
        cap_s=1800,
        entries=SMOLLM2_SIDES,
        warm_start={"model": "smollm2-135m", "max_steps": 400, "batch_size": 16, "learning_rate": 1e-4},
        growth=1.15,
        alone=True,
        trl_rows=16,
        prepare=make_spelling,
        quick=(0.15, 100),
        on_gpu=("dtype=bfloat16",),
    ),
}
