"""Task `reasoning_gym`, with the real package in real worker processes."""

from __future__ import annotations

import os

import numpy as np
import pytest

from winnow.env.rewards.rewarder import Rewarder
from winnow.env.rewards.workers import RewardWorkers
from winnow.tasks.reasoning_gym import ReasoningGymConfig, reasoning_gym_reward, score
from winnow.types import Group, Rollout, Visit

from ..builders.rewards import score_all

pytestmark = pytest.mark.slow  # tests/contracts/test_env.py has a fast one


@pytest.fixture(scope="module")
def task():
    return ReasoningGymConfig("chain_sum", {"max_terms": 3}, train_size=20, test_size=10, seed=1).build()


def rewards(prompt, *answers):
    columns = {name: [value] * len(answers) for name, value in prompt.columns.items()}
    return reasoning_gym_reward(completions=list(answers), **columns)


def test_prompts_are_deterministic_and_disjoint(task):
    again = ReasoningGymConfig("chain_sum", {"max_terms": 3}, train_size=20, test_size=10, seed=1).build()
    other = ReasoningGymConfig("chain_sum", {"max_terms": 3}, train_size=20, test_size=10, seed=2).build()
    assert again.train == task.train
    assert again.fingerprint() == task.fingerprint() != other.fingerprint()
    questions = [p.columns["question"] for p in (*task.train, *task.test)]
    assert len(questions) == len(set(questions)) == 30
    assert len({p.id for p in (*task.train, *task.test)}) == 30


def test_reference_answers_score_one_and_others_do_not(task):
    prompt = task.train[7]
    answer = prompt.columns["answer"]
    tagged = [
        [{"role": "assistant", "content": text}]
        for text in (f"<answer>{answer}</answer>", answer, "<answer>x</answer>")
    ]
    assert rewards(prompt, *tagged) == [1.0, 0.0, 0.0]
    Rewarder(task.reward_funcs).check(prompt.columns)


@pytest.mark.slow
def test_verifier_that_executes_model_output_does_so_elsewhere_and_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    task = ReasoningGymConfig("countdown", train_size=2, test_size=1, prompt_format="text").build()
    prompt = task.train[0]
    flag = tmp_path / "flag"
    attack = f"__import__('os').system('echo pid=$PPID token=$HF_TOKEN > {flag}')"
    rollouts = [
        Rollout(i, (1,), np.array([5]), np.ones(1, bool), np.zeros(1, np.float32), np.zeros(1, np.int32), text=text)
        for i, text in enumerate((prompt.columns["answer"], attack))
    ]
    rewarder = Rewarder(task.reward_funcs, timeout_s=20, workers=RewardWorkers(1))
    score_all(rewarder, [Group(Visit(0, 0, prompt), rollouts)])
    rewarder.close()
    assert rollouts[0].reward == 1.0
    assert (rollouts[1].reward or 0.0) < 1.0
    pid, token = flag.read_text().split()
    assert pid != f"pid={os.getpid()}"
    assert token == "token="


def test_entry_that_cannot_be_made_again_is_an_error(task):
    columns = task.train[0].columns
    with pytest.raises(RuntimeError, match="another question"):
        score(columns["source"], "something else", "1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "chain_sums"}, "unknown task 'chain_sums'. Did you mean 'chain_sum'"),
        ({"task": "chain_sum", "options": {"max_trms": 3}}, "max_trms"),
        ({"task": "coin_flip", "options": {"min_trials": 1, "max_trials": 1}, "train_size": 2000}, "only"),
        ({"task": "chain_sum", "options": {"seed": 3}}, "must not set"),
        ({"task": "chain_sum", "train_size": 0}, "train_size"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGymConfig(**options).build()
