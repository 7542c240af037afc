"""Learning rates at the ends and joints of every schedule, and what configuration refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.learner.step import StepOptions, scheduled_lr
from winnow.run.preflight import in_steps

GOOD = {"model": "m", "env": "countdown"}


def rates(**options: Any) -> list[float]:
    """Of every step of a valid configuration."""
    c = validate(GOOD | {"learning_rate": 1.0, "max_steps": 10} | options)
    step_options = StepOptions(
        learning_rate=c.learning_rate,
        lr_scheduler_type=c.lr_scheduler_type,
        warmup_steps=c.warmup,
        lr_end=c.lr_end,
        lr_decay_steps=c.lr_decay_steps,
        lr_scheduler_kwargs=c.lr_scheduler_kwargs,
        max_steps=c.max_steps,
        num_iterations=1,
        max_completion_length=1,
        mask_truncated_completions=False,
        seed=0,
    )
    return [scheduled_lr(step, step_options) for step in range(c.max_steps + 1)]


def test_constant_and_its_warmup() -> None:
    assert rates() == [1.0] * 11
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0] + [1.0] * 7


def test_linear_goes_to_zero_as_in_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    for warmup in (0, 3):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = transformers.get_linear_schedule_with_warmup(optimizer, warmup, 10)
        ours = rates(lr_scheduler_type="linear", warmup_steps=warmup)
        for step in range(11):
            if step >= warmup:  # theirs wastes its first step on a rate of 0
                assert ours[step] == pytest.approx(theirs.get_last_lr()[0], abs=1e-15)
            optimizer.step()
            theirs.step()


def test_cosine_is_that_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    for warmup in (0, 3):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, 10)
        low = transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, 10, min_lr=0.2)
        ours = rates(lr_scheduler_type="cosine", warmup_steps=warmup)
        lowest = rates(lr_scheduler_type="cosine", warmup_steps=warmup, lr_end=0.2)
        for step in range(warmup, 11):
            assert ours[step] == pytest.approx(theirs.lr_lambdas[0](step), abs=1e-15)
            assert lowest[step] == pytest.approx(low.lr_lambdas[0](step), abs=1e-15)


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("cosine", {"num_cycles": 1.5}),
        ("cosine_with_restarts", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("cosine_with_min_lr", {"min_lr": 1e-3}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 0.7}),
        ("polynomial", {}),
        ("polynomial", {"lr_end": 1e-3, "power": 2.0}),
        ("inverse_sqrt", {}),
        ("inverse_sqrt", {"timescale": 5}),
        ("warmup_stable_decay", {"num_decay_steps": 4}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 3])
def test_others_are_those_of_transformers(kind: str, kwargs: dict[str, Any], warmup: int) -> None:
    """Step by step, but for the warm-up, which there wastes its first step on a rate of 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    theirs = get_scheduler(kind, optimizer, warmup, 20, kwargs)
    ours = rates(
        lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs, warmup_steps=warmup, learning_rate=0.01, max_steps=20
    )
    assert len(set(ours)) > 3
    for step in range(21):
        if step >= warmup:
            assert ours[step] == theirs.get_last_lr()[0]
        else:
            assert ours[step] == pytest.approx(0.01 * (step + 1) / warmup)
        optimizer.step()
        theirs.step()


def test_warmup_as_a_share() -> None:
    assert rates(warmup_steps=0.25) == rates(warmup_steps=3)
    assert rates(lr_scheduler_type="constant_with_warmup", warmup_steps=0.4) == rates(warmup_steps=4)


def test_epochs_become_steps_when_the_data_are_known() -> None:
    linear = GOOD | {"lr_scheduler_type": "linear"}
    c = validate(linear | {"num_train_epochs": 1.5, "prompts_per_step": 8, "warmup_steps": 0.5})
    assert (steps := in_steps(c, 90)).max_steps == 17
    assert (steps.num_train_epochs, steps.warmup) == (None, 9)
    reused = validate(GOOD | {"num_train_epochs": 2, "prompts_per_step": 10, "reuse": {"updates": 4}})
    assert in_steps(reused, 90).max_steps == 60, "three groups of a batch are new"
    with pytest.raises(ConfigError, match=r"warmup_steps: must be below max_steps \(150 of 12\)"):
        in_steps(validate(linear | {"num_train_epochs": 1, "warmup_steps": 150}), 384)


def test_linear_is_a_ramp_between_any_two_rates() -> None:
    ramp = rates(lr_scheduler_type="linear", learning_rate=1.3e-5, lr_end=3.4e-5)
    assert ramp == pytest.approx([1.3e-5 + 2.1e-6 * t for t in range(11)], rel=1e-12)
    assert (ramp[0], ramp[10]) == (1.3e-5, 3.4e-5)
    warm = rates(lr_scheduler_type="linear", learning_rate=1.0, lr_end=0.2, warmup_steps=2)
    assert warm == pytest.approx([0.5, 1.0] + [1.0 - 0.1 * t for t in range(9)])


def test_stable_then_decay() -> None:
    got = rates(lr_scheduler_type="warmup_stable_decay", warmup_steps=2, lr_decay_steps=4, lr_end=0.2)
    assert got == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(lr_scheduler_type="warmup_stable_decay", lr_decay_steps=10) == rates(lr_scheduler_type="linear")
    full = rates(lr_scheduler_type="warmup_stable_decay", warmup_steps=6, lr_decay_steps=4)
    assert full == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr_end": 1e-5}, "lr_end has no effect with lr_scheduler_type: constant"),
        ({"lr_decay_steps": 5}, "lr_decay_steps has no effect with lr_scheduler_type: constant"),
        ({"lr_scheduler_type": "linear", "lr_decay_steps": 5}, "lr_decay_steps has no effect"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "needs lr_decay_steps"),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_decay_steps": 60, "warmup_steps": 41},
            r"warmup_steps \(41\) \+ lr_decay_steps \(60\) exceed max_steps \(100\)",
        ),
        ({"lr_scheduler_type": "linear", "lr_end": -1.0}, "lr_end: .*greater than or equal to 0"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type: .*'warmup_stable_decay'"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-8}, r"lr_end \(1e-07\) must be smaller than initial"),
        ({"lr_scheduler_type": "polynomial", "lr_end": 1e-8}, "its end is an option of lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set"),
        ({"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"scale": 2}}, "unexpected keyword .*'scale'"),
        ({"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 0}}, "division by zero"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "has no effect with lr_scheduler_type: constant; remove it"),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 100}, r"warmup_steps: must be below max_steps \(100 of"),
        ({"warmup_steps": 2.5}, "whole number, or a share below 1, not 2.5"),
        ({"num_train_epochs": 2, "max_steps": 7}, "both say how long to train; remove one"),
        ({"num_train_epochs": 0}, "num_train_epochs: .*greater than 0"),
    ],
)
def test_options_without_effect_or_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(GOOD | values)
