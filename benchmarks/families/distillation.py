"""Distillation on Countdown: a small policy learns from a trained one, from rewards, or from both.

The teacher is the demo's model after DAPO (`dapo`, which is trained first: `--arms dapo --seeds 100`); the policy has a
quarter of its parameters. Arms have the same warm start and prompts, and about as many sampled tokens: DAPO rolls out
several groups for one with a signal.
"""

from __future__ import annotations

from families.base import Arm, Family, Start

RECIPE = "countdown-dapo"
DATA = ("env.train_size=4096", "env.test_size=512")
TASK = (*DATA, "eval_prompts=256", "eval_greedy=false", "threads=1")
SMALL = {"max_steps": 900, "hidden_size": 64, "intermediate_size": 192}
POLICY = Start(RECIPE, SMALL, "warm-small", shared=True, overrides=DATA)
LARGE = Start(RECIPE, {"max_steps": 270}, "warm-large", shared=True, overrides=DATA)
TEACHER = "teacher.model=WORK/dapo-s100/model"
ARMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "rewards": (80, ()),
    "teacher": (320, (TEACHER, "teacher.reward_weight=0", "filter=keep_all")),
    "both": (320, (TEACHER, "filter=keep_all")),
}
"""Arm -> steps, and what it changes."""
RATES = (1, 2, 4)
"""In units of 1e-4."""


def arm(name: str, rate: int) -> Arm:
    steps, changes = ARMS[name]
    settings = (f"max_steps={steps}", f"eval_steps={steps // 16}", f"learning_rate={rate * 1e-4:g}")
    return Arm(f"{name}-lr{rate}", RECIPE, (*TASK, *changes, *settings), POLICY)


TRIED = tuple(arm(name, rate) for name in ARMS for rate in RATES)
FAMILY = Family(
    work="distillation",
    arms=(Arm("dapo", RECIPE, (*TASK, "max_steps=250", "eval_steps=50", "learning_rate=2e-4"), LARGE), *TRIED),
    tables={},
    default=tuple(each.name for each in TRIED),
    seeds=2,
)
