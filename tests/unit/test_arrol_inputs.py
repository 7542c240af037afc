"""What ARRoL's predictor is fed, whatever temperature, top-k and top-p the tokens are drawn with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.engine import LocalEngine, SamplingParams
from winnow.env.rewards.rewarder import Rewarder
from winnow.methods.gate.arrol.gate import Arrol, ArrolGate
from winnow.methods.gate.arrol.head import mean_logp
from winnow.methods.gate.arrol.rule import novelty_of
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.types import Group, Job, Visit

from ..builders.arrol import H, built, play, view
from ..builders.toy_rollouts import ToyTask
from ..gates import ask, named


def sampled(model: Path, gate: ArrolGate, **params: Any) -> list[Group]:
    """Four prompts with three siblings each."""
    task, tokenizer = ToyTask(), AutoTokenizer.from_pretrained(model)
    options = RolloutOptions(SamplingParams(9, **params), 32, seed=0)
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(model), tokenizer, slots=8)
    runner = RolloutRunner(engine, task, tokenizer, Rewarder(task.reward_funcs), {"train": options}, named([gate]))
    for number, prompt in enumerate(task.train[:4]):
        runner.launch(Job(Visit(number, 0, prompt), 3))
    groups: list[Group] = []
    while runner.pending:
        groups += runner.poll()
    return groups


@pytest.mark.parametrize("params", [{"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 5}, {"temperature": 1.7}])
def test_the_predictor_sees_what_the_model_thinks_however_it_is_sampled(
    tiny_model: Path, params: dict[str, Any]
) -> None:
    """Its input for the same tokens is that of temperature 1; how much siblings agree is that of the sampler."""
    gate = built(Arrol(at=4))
    groups, model = sampled(tiny_model, gate, **params), AutoModelForCausalLM.from_pretrained(tiny_model)
    rollouts = [r for g in groups for r in g.rollouts if r.decisions]
    assert len(rollouts) >= 5
    for r in rollouts:
        with torch.no_grad():
            logits = model(torch.tensor([[*r.prompt_ids, *r.token_ids.tolist()]])).logits[0].double()
        logp_TV = logits.log_softmax(-1)[len(r.prompt_ids) - 1 : -1]
        logp_T = logp_TV.gather(1, torch.from_numpy(r.token_ids)[:, None])[:, 0].numpy()
        assert r.raw_logp is not None
        np.testing.assert_allclose(r.raw_logp, logp_T, atol=1e-4)
        assert mean_logp(r) == pytest.approx(logp_T.mean(), abs=1e-5)
        evidence = r.decisions[0].verdict.evidence
        assert evidence["logp"] == pytest.approx(logp_T[:4].mean(), abs=1e-4)
        assert evidence["novelty"] == pytest.approx(novelty_of(float(r.sampler_logp[:4].mean()), 4, 3))
        assert not np.allclose(r.sampler_logp, r.raw_logp, atol=1e-3)


def test_untransformed_sampling_reports_the_same_numbers_twice(tiny_model: Path) -> None:
    for r in (r for g in sampled(tiny_model, built(Arrol(at=4))) for r in g.rollouts):
        assert r.raw_logp is not None
        assert r.raw_logp.tobytes() == r.sampler_logp[r.action_mask].tobytes()


def test_the_temperature_moves_novelty_alone() -> None:
    gate = built(Arrol(at=4, cold_start=1), 3)
    play(gate, 2)
    hidden = np.random.default_rng(0).normal(size=H)
    cold, warm = (ask(gate, view(9, 0, 8, hidden, logp=p, model_logp=-0.7)).evidence for p in (-0.2, -0.7))
    assert cold["novelty"] < warm["novelty"]
    assert {k: v for k, v in cold.items() if k not in ("novelty", "hidden")} == {
        k: v for k, v in warm.items() if k not in ("novelty", "hidden")
    }
