"""Failures that leave a run going, caused one by one: the console, the run's files and its page say so in two steps."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnow.base.weights import Weights, state_of
from winnow.config import validate
from winnow.engine import ModelReference
from winnow.engine.local.engine import LocalEngine
from winnow.record.stop_conditions import RunStoppedError
from winnow.record.watchdogs import GAP, Watchdogs
from winnow.rollout.evaluate import Evaluation
from winnow.run.session import Session
from winnow.tasks.prompt_example import PromptExample

from ..builders.watchdogs import run

QUIET = {"learning_rate": 1e-5, "eval_steps": None, "max_steps": 6}
"""Weights move so little that no bound of log-probabilities is reached: the run goes on."""


def half(completions: list[str], **columns: Any) -> list[float]:
    return [0.5 for _ in completions]


def test_a_sound_run_is_not_barked_at(tiny_config: dict[str, Any]) -> None:
    assert run(tiny_config) == {}
    assert not (Path(tiny_config["output_dir"]) / "warnings.jsonl").exists()


@dataclass(frozen=True)
class KeepsFirst:
    """The embedded engine with its first weights, or with its first head, for ever."""

    head_only: bool = False

    def build(self, model: ModelReference, tokenizer: Any) -> LocalEngine:
        engine = LocalEngine(model.load(), tokenizer)
        load, old = engine.load_weights, {}

        def keep(weights: Weights, version: int) -> None:
            now = {k: v.clone() for k, v in state_of(weights).items()}
            old.update({} if old else now)
            load(now | {k: v for k, v in old.items() if not self.head_only or "embed" in k}, version)

        engine.load_weights = keep  # type: ignore[method-assign]
        return engine


def engine(**options: Any) -> dict[str, Any]:
    return {"engine": {"name": f"{__name__}:KeepsFirst"} | options}


@pytest.mark.parametrize("head_only", [False, True])
def test_weights_that_the_engine_does_not_take(tiny_config: dict[str, Any], head_only: bool) -> None:
    """All of them, or the head that is tied to the embedding alone."""
    said = run(tiny_config | QUIET | {"learning_rate": 3e-5 if head_only else 1e-5} | engine(head_only=head_only))
    ((step, message),) = said.items()
    assert step <= 3, "the first update is in the tokens of step 2"
    assert "the engine does not sample from the learner's weights" in message
    assert "in a tied head" in message


@dataclass(frozen=True)
class Initial:
    """The embedded engine, in which a resume leaves what is in `directory`, whatever it is given."""

    directory: str
    run: str

    def build(self, model: ModelReference, tokenizer: Any) -> LocalEngine:
        from winnow.engine.loading import load_causal_lm

        engine = LocalEngine(model.load(), tokenizer)
        load = engine.load_weights
        resumed = (Path(self.run) / "checkpoints").exists()

        def keep(weights: Weights, version: int) -> None:
            initial = dict(load_causal_lm(self.directory, torch.device("cpu")).state_dict())
            load({k: initial.get(k, v) for k, v in state_of(weights).items()} if resumed else weights, version)

        engine.load_weights = keep  # type: ignore[method-assign]
        return engine


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_resume_that_leaves_the_sampler_on_initial_weights(tiny_config: dict[str, Any], lag: int) -> None:
    config = tiny_config | QUIET | {"max_lag": lag, "max_steps": 4}
    config |= {"engine": {"name": f"{__name__}:Initial", "directory": str(tiny_config["model"])}}
    config["engine"]["run"] = config["output_dir"]
    assert run(config) == {}
    directory = Path(config["output_dir"])
    shutil.rmtree(directory / "checkpoints" / "step-000004")
    if lag:  # stale tokens differ anyway, so the comparison after the first update finds it
        with pytest.raises(RunStoppedError, match="its log-probabilities are not the learner's"):
            run(config, resume=True)
        return
    said = run(config, resume=True)
    assert [*said] == [3], "before the first step of the resumed run"
    assert "It may have kept old ones (after a resume" in said[3]


def test_a_difference_that_grows_at_learning_rate_0(tiny_config: dict[str, Any]) -> None:
    """Nothing may change then, so it is the engine."""
    config = tiny_config | QUIET | {"learning_rate": 0.0, "engine": f"{__name__}:Drifting"}
    said = run(config)
    assert [*said] == [2]
    assert "The learning rate is 0, so the policy cannot have moved" in said[2]


@dataclass(frozen=True)
class Drifting:
    """The embedded engine with a little noise on its weights, once there were two versions."""

    def build(self, model: ModelReference, tokenizer: Any) -> LocalEngine:
        engine = LocalEngine(model.load(), tokenizer)
        load = engine.load_weights

        def add(weights: Weights, version: int) -> None:
            noise = 2e-3 if version > 0 else 0.0
            generator = torch.Generator().manual_seed(0)
            state = state_of(weights).items()
            load({k: v + noise * v.std() * torch.randn(v.shape, generator=generator) for k, v in state}, version)

        engine.load_weights = add  # type: ignore[method-assign]
        return engine


def test_a_reward_that_is_always_the_same(tiny_config: dict[str, Any]) -> None:
    said = run(tiny_config | {"max_skipped_steps": 100, "eval_steps": None}, half)
    assert [*said] == [2]
    assert "the reward function 'half' gave 0.5 to every completion of 2 steps in a row" in said[2]


def test_a_reward_that_is_always_the_same_but_for_rounding(tiny_config: dict[str, Any]) -> None:
    """Standard deviation and mean of a hundred times 0.1 are not 0 and 0.1."""
    for reward in (0.1, -0.2, 1e6 / 3):
        dogs, rows = Watchdogs(validate(tiny_config | {"eval_steps": None})), []
        for step, n in enumerate((96, 101), 1):
            values = [reward] * n
            mean, std = float(np.mean(values)), float(np.std(values))
            rows.append({"step": step, "rewards/format/mean": mean, "rewards/format/std": std})
        said = [message for row in rows for message in dogs.observe(row)]
        assert len(said) == 1
        assert f"the reward function 'format' gave {reward:g} to every completion" in said[0]
    assert rows[0]["rewards/format/std"] != 0


@pytest.mark.parametrize("reward", [0.0, -1.0, 0.5])
def test_a_reward_for_a_tag_that_the_prompt_has_already(reward: float) -> None:
    """The cause of a constant 0 or penalty, not of a constant reward."""
    rows = [{"step": step, "rewards/format/mean": reward, "rewards/format/std": 0.0} for step in (1, 2)]
    config = validate({"model": "m", "env": "countdown"})
    (said,) = (m for dogs in [Watchdogs(config, opening="<think>")] for row in rows for m in dogs.observe(row))
    named = "Possible causes: prompts end in <think>, written by the chat template or the data, so a function" in said
    assert named == (reward <= 0)
    (said,) = (m for dogs in [Watchdogs(config)] for row in rows for m in dogs.observe(row))
    assert "prompts end in" not in said


@pytest.mark.parametrize(
    ("end", "opening"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>"),
        ("[THINK]", "[THINK]"),
        ("<think>\n\n</think>\n\n", "</think>"),
        ("<|im_start|>assistant\n", ""),
        ("<|assistant|>", ""),
        ("<\uff5cAssistant\uff5c>", ""),
        ("[/INST]", ""),
        ("is 1 < 2 > 0", ""),
    ],
)
def test_the_tag_in_which_a_prompt_ends(end: str, opening: str) -> None:
    assert PromptExample("a", f"<tag> {end}", 3, None).opening == opening


def test_an_evaluation_that_is_skipped(tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def quietly(self: Session, step: int) -> Evaluation | None:
        return self._evaluate_now(step) if step == 0 else None

    monkeypatch.setattr(Session, "_evaluate", quietly)
    said = run(tiny_config)
    assert said == {2: "no evaluation ran at step 2, where eval_steps=2 schedules one"}


def test_a_learning_rate_that_a_schedule_has_brought_to_0(tiny_config: dict[str, Any]) -> None:
    schedule = {
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {"power": 100, "lr_end": 1e-12},
        "eval_steps": None,
    }
    said = run(tiny_config | schedule)
    ((step, message),) = said.items()
    assert step == 3
    assert re.search(r"the learning rate is \S+ since step 2, of 0.001 at most: lr_scheduler_type=polynomial", message)


def test_a_cosine_may_end_at_0(tiny_config: dict[str, Any]) -> None:
    steps = 5_000
    dogs = Watchdogs(validate(tiny_config | {"lr_scheduler_type": "cosine", "max_steps": steps, "eval_steps": None}))
    rates = [(step, 5e-4 * (1 - math.cos(math.pi * (steps + 1 - step) / steps))) for step in range(1, steps + 1)]
    assert sum(rate <= 1e-9 for _, rate in rates) > 2
    assert [said for step, lr in rates for said in dogs.observe({"step": step, "learning_rate": lr})] == []


def test_what_is_no_failure(tiny_config: dict[str, Any]) -> None:
    """A difference of stale tokens; a warm-up's first step; a learning rate that is meant to be 0."""
    dogs = Watchdogs(validate(tiny_config | {"warmup_steps": 2, "eval_steps": None}))
    rows: list[dict[str, float]] = [
        {"step": 1, GAP: 1e-6, "lag/max": 0, "learning_rate": 0.0, "updated": 1},
        {"step": 2, GAP: 0.3, "lag/max": 1, "learning_rate": 1e-3, "updated": 1},
        {"step": 3, GAP: 5e-5, "lag/max": 0, "learning_rate": 1e-3, "rewards/f/mean": 1.0, "rewards/f/std": 0.0},
        {"step": 4, "rewards/f/mean": 0.5, "rewards/f/std": 0.0},
        {"step": 5, "rewards/f/mean": 0.5, "rewards/f/std": 0.1},
        {"step": 6, "rewards/f/mean": 0.5, "rewards/f/std": 0.0},
    ]
    assert [message for row in rows for message in dogs.observe(row)] == []
    assert [*dogs.observe({"step": 7, "ess_ratio": 0.1})] == []


def test_the_console_is_told_once(tiny_config: dict[str, Any]) -> None:
    dogs = Watchdogs(validate(tiny_config | {"eval_steps": None}))
    ratios = [0.1] * 20 + [0.9] + [0.1] * 20
    said = [m for step, ratio in enumerate(ratios, 1) for m in dogs.observe({"step": step, "ess_ratio": ratio})]
    assert len(said) == 1
    assert "the effective sample size was under 30% of the rollouts" in said[0]


def test_the_first_difference_of_a_resumed_run_is_that_of_its_first_step(tiny_config: dict[str, Any]) -> None:
    dogs = Watchdogs(validate(tiny_config | {"eval_steps": None}))
    assert dogs.probed(9.0) is None
    for row in ({"step": 0.0}, {"step": 1.0, GAP: 0.25}, {"step": 2.0, GAP: 9.0}):
        dogs.recall(row)
    message = dogs.probed(1.5)
    assert message is not None
    assert "1.5 nats on average, 0.25 at the first step" in message


def test_reward_functions_that_are_never_asked() -> None:
    """Environments gave all rewards of a step; some of a step is what several environments do."""
    config = validate({"model": "m", "env": "countdown"})
    some = {"step": 1.0, "rewards/env/mean": 0.5, "rewards/style/mean": 0.25}
    assert list(Watchdogs(config, functions=["style"]).observe(some)) == []
    dogs = Watchdogs(config, functions=["style", "length"])
    (said,) = dogs.observe({"step": 1.0, "rewards/env/mean": 0.5, "rewards/length/mean": 0.25})
    assert said.startswith("reward_funcs: style judged no rollout of step 1: the environment, or the agent, gave")
    assert list(dogs.observe({"step": 2.0, "rewards/env/mean": 0.5})) == []
