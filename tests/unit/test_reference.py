"""A reference that follows the policy: TRL's formula and its steps, kept by checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.reference import REFERENCE_FILE, frozen_copy
from winnow.learner.step import OptimizerStep
from winnow.methods.advantage.grpo import Grpo
from winnow.methods.correct import NoScale
from winnow.methods.loss import LossConfig
from winnow.run.resolved import Options, step_options

from ..builders.groups import make_group
from .learner_models import VOCABULARY, llama, random_rows

GOOD = {"model": "m", "env": "countdown"}


def learner_of(model: Any, reference: Any = None) -> LocalLearner:
    return LocalLearner(model, TokenDistribution(VOCABULARY), LearnerOptions(), reference or frozen_copy(model))


def moved(learner: LocalLearner, seed: int = 0) -> None:
    learner.accumulate(random_rows(seed=seed), LossConfig(beta=0.1))
    learner.apply(1e-2)


def test_the_mixture_is_trls() -> None:
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    learner = learner_of(llama())
    theirs = frozen_copy(learner.model)
    assert learner.reference is not None
    for alpha in (0.6, 0.25, 1.0):
        moved(learner)
        learner.sync_reference(alpha)
        callbacks.SyncRefModelCallback._sync_target_model(learner.model, theirs, alpha)
        for ours, expected in zip(learner.reference.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(ours, expected)
    rows = random_rows(seed=9)
    for ours, same in zip(learner.reference_logp(rows), learner.logp(rows), strict=True):
        assert torch.equal(ours, same)  # the last alpha was 1


def test_a_resume_has_the_reference_that_was_saved(tmp_path: Path) -> None:
    start = llama()
    learner = learner_of(start)
    moved(learner)
    learner.save(tmp_path)
    assert not (tmp_path / REFERENCE_FILE).exists()  # it is the initial model still
    learner.sync_reference(0.6)
    moved(learner, seed=1)
    learner.save(tmp_path)
    resumed = learner_of(type(start).from_pretrained(tmp_path / "model"), llama())
    resumed.load(tmp_path)
    for again in (resumed, learner):
        again.sync_reference(0.3)
    assert resumed.reference is not None
    assert learner.reference is not None
    for ours, theirs in zip(resumed.reference.parameters(), learner.reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"reference.safetensors: not the reference of this model"):
        learner_of(start, llama(vocab_size=VOCABULARY + 1))._load_reference(tmp_path)


class Counting:
    """A learner that only counts."""

    def __init__(self) -> None:
        self.synced: list[float] = []

    def sync_reference(self, alpha: float) -> None:
        self.synced.append(alpha)


@pytest.mark.parametrize(("every", "at"), [(1, [0, 1, 2, 3, 4, 5]), (3, [2, 5]), (512, [])])
def test_it_follows_at_trls_steps_whether_or_not_there_was_an_update(every: int, at: list[int]) -> None:
    c = validate(
        GOOD | {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": every, "ref_model_mixup_alpha": 0.5}
    )
    learner = Counting()
    step = OptimizerStep(learner, Grpo(), LossConfig(), NoScale().build(), step_options(c, Options.from_config(c)))  # type: ignore[arg-type]
    found = []
    for number in range(6):
        before = len(learner.synced)
        assert step([make_group(0, [1.0, 1.0])], number)["updated"] == 0
        found += [number] * (len(learner.synced) - before)
    assert found == at
    assert set(learner.synced) <= {0.5}


def test_without_a_reference_there_is_nothing_to_move() -> None:
    learner = LocalLearner(llama(), TokenDistribution(VOCABULARY), LearnerOptions())
    with pytest.raises(ValueError, match="no reference model to sync; set beta, without lora"):
        learner.sync_reference(0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sync_ref_model": True}, "sync_ref_model has no effect with beta: 0; remove it or set beta"),
        ({"sync_ref_model": True, "beta": 0.1, "lora": {"r": 4}}, "with lora it is the model without its adapters"),
        ({"beta": 0.1, "ref_model_sync_steps": 4}, "ref_model_sync_steps: 4 has no effect without sync_ref_model"),
        ({"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_without_effect_or_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(GOOD | values)
