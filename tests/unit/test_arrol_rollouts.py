"""ARRoL's gate through the runner, on a real engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.engine import LocalEngine, SamplingParams
from winnow.env.rewards.rewarder import Rewarder
from winnow.methods.gate.arrol.gate import Arrol, ArrolGate
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.types import Fate, Group, Job, Visit

from ..builders.arrol import built
from ..builders.toy_rollouts import ToyTask
from ..gates import named


def test_survivors_have_the_tokens_that_they_have_without_pruning(tiny_model: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    task = ToyTask()

    def run(gates: list[ArrolGate], *, fixed: bool) -> list[Group]:
        engine = LocalEngine(*policy, slots=6, fixed_slots=fixed)
        options = RolloutOptions(SamplingParams(12), 32, seed=0)
        runner = RolloutRunner(engine, task, policy[1], Rewarder(task.reward_funcs), {"train": options}, named(gates))
        for number, prompt in enumerate(task.train[:6]):
            runner.launch(Job(Visit(number, 0, prompt), 4))
        groups: list[Group] = []
        while runner.pending:
            groups += runner.poll()
        for gate in gates:
            for group in groups:
                gate.observe_group(group)
        return groups

    for fixed in (False, True):
        gate = built(Arrol(at=3, cold_start=1))
        for _ in range(2):
            groups = run([gate], fixed=fixed)
            gate.end_step()
        free = run([], fixed=fixed)
        pruned = [r for g in groups for r in g.rollouts if r.fate == Fate.PRUNED]
        assert pruned
        assert all(len(r.token_ids) == 3 and r.reward is None and r.survival_p < 1 for r in pruned)
        for a, b in zip(groups, free, strict=True):
            for x, y in zip(a.rollouts, b.rollouts, strict=True):
                np.testing.assert_array_equal(x.token_ids, y.token_ids[: len(x.token_ids)])
                if x.fate is None:
                    assert len(x.token_ids) == len(y.token_ids)
                    if fixed:
                        np.testing.assert_array_equal(x.sampler_logp, y.sampler_logp)


def test_last_hidden_states_are_those_of_a_forward_pass(tiny_model: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    task = ToyTask()
    report = frozenset({"last_hidden"})
    options = RolloutOptions(SamplingParams(9, temperature=0.7, top_k=5), 32, seed=0, report=report)
    runner = RolloutRunner(
        LocalEngine(model, tokenizer, slots=4), task, tokenizer, Rewarder(task.reward_funcs), {"train": options}
    )
    runner.launch(Job(Visit(0, 0, task.train[0]), 3))
    groups: list[Group] = []
    while runner.pending:
        groups += runner.poll()
    for r in groups[0].rollouts:
        ids = torch.tensor([[*r.prompt_ids, *r.token_ids.tolist()]])
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        assert r.last_hidden is not None
        np.testing.assert_allclose(r.last_hidden, out.hidden_states[-1][0, -2], rtol=1e-3, atol=1e-4)
