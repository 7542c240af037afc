"""Learner and engine compared at the start: what agrees, and what each disagreement is said to come from."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.base.weights import Weights, state_of
from winnow.engine import ModelReference
from winnow.engine.base import SamplingParams
from winnow.engine.local.engine import LocalEngine
from winnow.learner.agreement import BOUNDS, compare, require_agreement
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.rows import Row
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError
from winnow.run import preflight
from winnow.run.preflight import check_agreement
from winnow.study.report import report_data
from winnow.study.warm_start import word_tokenizer
from winnow.types import Group, Rollout, Segment

from .. import parity
from ..parity import parity_reward
from .learner_models import VOCABULARY, WORDS, learner_of, llama, sampled


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer([f"w{i}" for i in range(WORDS)], max_positions=64)


def rollouts(model: Any, tokenizer: Any, **sampling: Any) -> list[Rollout]:
    return sampled(LocalEngine(model, tokenizer, max_length=64), SamplingParams(12, **sampling), n=8)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.9}])
def test_one_policy_agrees(tokenizer: Any, sampling: dict[str, Any]) -> None:
    model = llama()
    found = require_agreement(rollouts(model, tokenizer, **sampling), learner_of(model, **sampling), "float32")
    assert found.max < BOUNDS["float32"]
    assert found.tokens > 20


def test_segments_are_compared_with_their_own_prompts(tokenizer: Any) -> None:
    model = llama()
    first, second, third = rollouts(model, tokenizer)[:3]
    names = ("token_ids", "action_mask", "sampler_logp", "versions")
    whole = {name: np.concatenate([getattr(r, name) for r in (first, second, third)]) for name in names}
    starts = len(first.token_ids), len(first.token_ids) + len(second.token_ids)
    later = [Segment(start, r.prompt_ids) for start, r in zip(starts, (second, third), strict=True)]
    found = require_agreement([replace(first, **whole, later_segments=later)], learner_of(model), "float32")
    assert (found.max < BOUNDS["float32"], found.tokens) == (True, len(whole["token_ids"]))


def test_bfloat16_stays_well_within_its_bound(tokenizer: Any) -> None:
    model = llama()
    half = LearnerOptions(compute_dtype=torch.bfloat16)
    learner = LocalLearner(model, TokenDistribution(VOCABULARY), half)
    found = require_agreement(rollouts(model, tokenizer), learner, "float32")
    assert BOUNDS["float32"] < found.mean < BOUNDS["bfloat16"]


def test_other_weights(tokenizer: Any) -> None:
    before = rollouts(llama(), tokenizer)
    learner = learner_of(llama())
    learner.accumulate([Row(r, 1.0, 1.0) for r in before], LossConfig(policy_loss=Plain()))
    learner.apply(1e-1)
    with pytest.raises(ConfigError, match=r"engine: .* differ by .* nats .* different weights \(a tied head"):
        require_agreement(before, learner, "float32")


def test_log_probabilities_before_the_transform(tokenizer: Any) -> None:
    model, sampling = llama(), {"temperature": 0.6}
    found = rollouts(model, tokenizer, **sampling)
    learner = learner_of(model, **sampling)
    for rollout, logp in zip(found, learner.logp([Row(r, 0.0, 0.0) for r in found], raw=True), strict=True):
        rollout.sampler_logp = logp.numpy()
    with pytest.raises(ConfigError, match="They agree before temperature, top-k and top-p"):
        require_agreement(found, learner, "float32")


def test_noise_in_the_learner(tokenizer: Any) -> None:
    model = llama()
    found = rollouts(model, tokenizer)
    noisy = torch.nn.functional.dropout
    model.model.norm.register_forward_hook(lambda module, args, output: noisy(output, 0.1, training=True))
    with pytest.raises(ConfigError, match="vary from pass to pass: the model has dropout"):
        require_agreement(found, learner_of(model), "float32")


def test_a_cache_that_is_kept_otherwise(tokenizer: Any) -> None:
    """The first token of each rollout is as the learner has it, the others are not."""
    model = llama()
    found = rollouts(model, tokenizer)
    for rollout in found:
        rollout.sampler_logp = rollout.sampler_logp - (rollout.sampler_logp != rollout.sampler_logp[0]).astype("f4")
    with pytest.raises(ConfigError, match="First tokens agree and later ones do not"):
        require_agreement(found, learner_of(model), "float32")


def test_coarser_types_are_named(tokenizer: Any) -> None:
    model = llama()
    found = rollouts(model, tokenizer)
    for rollout in found:
        rollout.sampler_logp = rollout.sampler_logp - 0.15
    with pytest.raises(ConfigError, match="likely cause is rounding"):
        require_agreement(found, learner_of(model), "bfloat16")


def test_nothing_to_compare_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no sampled tokens"):
        compare([], learner_of(llama()))


def with_config(model: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(model, to)
    values = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(values))
    return to


def test_a_run_with_attention_dropout_is_on_policy(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    """In version 0.1 the learner applied attention_dropout, and the engine did not."""
    model = with_config(Path(tiny_config["model"]), tmp_path / "model", attention_dropout=0.5)
    Trainer(config=tiny_config | {"model": str(model), "max_steps": 1}, reward_funcs=parity_reward).train()
    lines = (Path(tiny_config["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    (found,) = (m for m in map(json.loads, lines) if "sampling/kl" in m)
    assert found["sampling/kl"] < 1e-10


def test_a_run_is_refused_before_anything_is_written(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(learner: Any, rows: list[Row], raw: bool = False) -> list[torch.Tensor]:
        return [torch.zeros(int(row.rollout.action_mask.sum())) for row in rows]

    monkeypatch.setattr(LocalLearner, "logp", zeros)
    with pytest.raises(ConfigError, match="engine: its log-probabilities are not the learner's"):
        Trainer(config=tiny_config, reward_funcs=parity_reward)
    assert not Path(tiny_config["output_dir"]).exists()


def test_the_comparison_leaves_random_states_alone(tiny_config: dict[str, Any]) -> None:
    trainer = Trainer(config=tiny_config, reward_funcs=parity_reward)
    assert trainer.engine is not None
    before = torch.get_rng_state()
    check_agreement(trainer.task.train, trainer.sampler.run, trainer.learner, lambda: "float32")
    assert torch.equal(torch.get_rng_state(), before)
    assert (trainer.engine.pending, trainer.engine.version) == (0, 0)


@dataclass(frozen=True)
class Stale:
    """The embedded engine, but whatever it is given after its first weights it only says that it has."""

    def build(self, model: ModelReference, tokenizer: Any) -> LocalEngine:
        engine = LocalEngine(model.load(), tokenizer)
        load, first = engine.load_weights, {}

        def keep(weights: Weights, version: int) -> None:
            load(first.setdefault("state", {k: v.clone() for k, v in state_of(weights).items()}), version)

        engine.load_weights = keep  # type: ignore[method-assign]
        return engine


def test_probes_that_fail_after_the_first_update_are_tried_again(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that is down for a moment does not end the run, and old weights show once it is back."""
    config = {"engine": f"{__name__}:Stale", "learning_rate": 0.03, "warmup_steps": 0, "eval_steps": None}
    trainer = Trainer(config=tiny_config | config, reward_funcs=parity_reward)
    roll_out, tried = trainer.sampler.run, []

    def down_at_first(jobs: Any) -> list[Group]:
        tried.append(jobs)
        groups = roll_out(jobs)
        if len(tried) == 1:
            for rollout in (r for group in groups for r in group.rollouts):
                rollout.action_mask = np.zeros_like(rollout.action_mask)
        return groups

    monkeypatch.setattr(trainer.sampler, "run", down_at_first)
    with pytest.raises(RunStoppedError, match=r"step 2: engine: its log-probabilities are not the learner's"):
        trainer.train()
    assert len(tried) == 2


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("sync", ["in_process", {"name": "processes", "samplers": 1}])
def test_probes_are_in_the_account(tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, sync: Any) -> None:
    """Those before and after the first update, and those of a resume."""
    tokens: list[int] = []
    check = preflight.require_agreement

    def counted(rollouts: Any, *rest: Any) -> Any:
        tokens.append(sum(int(r.action_mask.sum()) for r in rollouts))
        return check(rollouts, *rest)

    monkeypatch.setattr(preflight, "require_agreement", counted)
    config = tiny_config | {"max_steps": 2, "save_steps": 1, "eval_steps": None, "sync": sync}
    if sync != "in_process":
        config |= {"max_lag": 1, "correction": "truncate"}
    run = Path(tiny_config["output_dir"])
    Trainer(config=config | {"reward_funcs": [f"{parity.__file__}:parity_reward"]}).train()
    shutil.rmtree(run / "checkpoints" / "step-000002")
    Trainer.resume(run).train()
    assert len(tokens) == (3 if sync == "in_process" else 4), "with a lag also after the first update of a resume"
    assert min(tokens) > 0
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        found, proof = ledger.totals(), ledger.verify()
    assert proof.ok
    assert found["probe"]["tokens"] == sum(tokens)
    assert found["probe"]["rollouts"] >= len(tokens)
    assert found["probe"]["seconds"] > 0
    assert f"| probe | {found['probe']['rollouts']} | {sum(tokens)} |" in (run / "model" / "README.md").read_text()
    (page,) = report_data([run])["runs"]
    assert {row[0]: row[4] for row in page["totals"]["rows"]}["probe"] == f"{sum(tokens):,}"


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("sync", ["in_process", {"name": "processes", "samplers": 1}])
def test_old_weights_show_after_the_first_update(tiny_config: dict[str, Any], sync: Any) -> None:
    """The step is booked whole, and the run is saved."""
    config = {"engine": f"{__name__}:Stale", "learning_rate": 0.03, "warmup_steps": 0, "eval_steps": None, "sync": sync}
    if sync != "in_process":
        config |= {"max_lag": 1, "correction": "truncate"}
    trainer = Trainer(config=tiny_config | config | {"reward_funcs": [f"{parity.__file__}:parity_reward"]})
    with pytest.raises(RunStoppedError, match=r"step 1: engine: its log-probabilities are not the learner's"):
        trainer.train()
    with Ledger.open(Path(tiny_config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
        assert ledger.totals()["trained"]["visits"] == tiny_config["prompts_per_step"]
