"""Reward models: what they are given, scores against one text at a time, failures, what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
)

from winnow import ConfigError, RewardModel, Trainer
from winnow.config import validate
from winnow.env.rewards import reward_model
from winnow.env.rewards.rewarder import Rewarder
from winnow.types import Fate

from ..builders.judges import LONGEST, write
from ..builders.rewards import group, scored
from ..builders.runs import metrics_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("models") / "judge")


def plain(model: RewardModel, text: str) -> float:
    """The score of one text alone, without padding or mask."""
    ids = model.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        return model.model(input_ids=ids).logits[0, 0].item()


TEXTS = [" 1 2 3", " 4", " 5 6 7 8 9 10 11", "", " 12 13"]


@pytest.mark.parametrize("at_once", [1, 20, 10_000])
def test_scores_are_those_of_one_text_at_a_time(saved, monkeypatch, at_once):
    monkeypatch.setattr(reward_model, "TOKENS_AT_ONCE", at_once)
    model = RewardModel(saved)
    expected = [plain(model, "why?" + text) for text in TEXTS]
    assert len(set(expected)) == len(TEXTS)
    assert model(prompts=["why?"] * 5, completions=TEXTS) == pytest.approx(expected, abs=1e-6)
    assert model.model.dtype == torch.float32
    assert not any(p.requires_grad for p in model.model.parameters())


def test_a_run_calls_it_by_name_or_as_an_object(saved):
    """Under its own name, weighted with others; messages go through its own chat template."""
    model = RewardModel(saved)
    for spec in (saved, model, model.model):
        g, chat = group(" 1 2", " 3"), group("1 2", "3", number=1, chat=True)
        rewarder = scored([spec, lambda completions: [1.0] * len(completions)], g, chat, weights=[2.0, 1.0])
        assert rewarder.names == ["judge", "<lambda>"]
        for i, text in enumerate(("1 2", "3")):
            said = plain(model, f"why? {text}"), plain(model, f"user : why? assistant : {text} ")
            assert g.rollouts[i].reward == pytest.approx(1 + 2 * said[0], abs=1e-5)
            assert chat.rollouts[i].reward == pytest.approx(1 + 2 * said[1], abs=1e-5)


def test_a_text_that_it_cannot_score_fails_alone(saved):
    g = group(" 1 2", " 3" * LONGEST)
    scored(saved, g)
    assert g.rollouts[0].reward is not None
    assert (g.rollouts[1].fate, g.rollouts[1].reward) == (Fate.FAILED, None)
    assert "reward judge: ValueError: a text of 41 tokens, and the model takes 1 to 40" in g.rollouts[1].reason


def test_weights_that_are_not_finite_are_no_reward(saved):
    model = RewardModel(saved)
    torch.nn.init.constant_(model.model.score.weight, float("nan"))
    g = group(" 1 2", " 3")
    scored(model, g)
    assert [(r.fate, r.reward) for r in g.rollouts] == [(Fate.FAILED, None)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": 3}, r"judge' \(LlamaForSequenceClassification\) has num_labels=3; a reward model is"),
        ({"kind": LlamaForCausalLM, "labels": 2}, r"\(LlamaForCausalLM\) has num_labels=2"),
        ({"kind": LlamaForCausalLM}, r"judge' lacks weights of a reward model, which would be random: score.weight"),
    ],
)
def test_what_is_no_reward_model(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        Rewarder(write(tmp_path / "judge", **options))


def test_names_that_lead_nowhere(saved, tmp_path):
    with pytest.raises(ConfigError, match=r"model of 'nobody/judge' \(no such directory, and not found as"):
        Rewarder("nobody/judge")
    with pytest.raises(ConfigError, match=r"unknown name 'juge'.*reward models as a directory or 'owner/model'"):
        Rewarder("juge")
    with pytest.raises(ConfigError, match=r"unknown name 'my/reward.py'.* 'path/to/file.py:function'"):
        Rewarder("my/reward.py")
    model = RewardModel(saved).model
    model.name_or_path = ""
    with pytest.raises(ConfigError, match=r"give a loaded reward model as RewardModel\(model, its tokenizer\)"):
        Rewarder(model)
    silent = write(tmp_path / "silent", template=None)
    Rewarder(silent).check([])
    with pytest.raises(ConfigError, match="the tokenizer of 'silent' has no chat template"):
        Rewarder(silent).check([], conversational=True)


def test_one_name_needs_no_list():
    for given in ("math", ["math"]):
        assert validate({"model": "m", "env": "countdown", "reward_funcs": given}).reward_funcs == ["math"]


def test_a_run_with_it_is_resumed_with_the_same_weights_only(saved, tiny_config, tmp_path):
    """Evaluations go by it, too."""
    config = tiny_config | {"reward_funcs": saved, "max_steps": 2, "save_steps": 1, "success_reward": -10.0}
    last = Trainer(config=config).train()
    lines = metrics_of(tmp_path / "run")
    rewards = [m["reward"] for m in lines if "reward" in m]
    assert len(rewards) == 2
    assert all(0 < abs(r) < 10 for r in rewards)
    assert last["eval/pass@1"] == 1  # any score is over success_reward
    Trainer.resume(tmp_path / "run", {"max_steps": 3}).train()
    other = RewardModel(saved)
    other.model.score.weight.mul_(2)
    with pytest.raises(ConfigError, match="the reward functions is not the one this run was saved with"):
        Trainer.resume(tmp_path / "run", {"max_steps": 4}, reward_funcs=other).train()


def test_a_begun_turn_and_its_completion_are_one(saved) -> None:
    model = RewardModel(saved)
    prompt = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "1 2 "}]
    whole = [[{"role": "user", "content": "why?"}], [{"role": "assistant", "content": "1 2 3"}]]
    (begun,) = model([prompt], [[{"role": "assistant", "content": "3"}]])
    assert begun == model([whole[0]], [whole[1]])[0]


def test_a_begun_turn_of_parts_and_its_completion_are_one(saved) -> None:
    model = RewardModel(saved)
    model.tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }} {% endfor %}{% endfor %}"
    )
    why, begun, more = ({"type": "text", "text": text} for text in ("why?", "1 2", "3"))
    prompt = [{"role": "user", "content": [why]}, {"role": "assistant", "content": [begun]}]
    whole = [{"role": "assistant", "content": [begun, more]}]
    assert model([prompt], [[{"role": "assistant", "content": "3"}]]) == model([prompt[:1]], [whole])


def test_a_template_that_wants_objects_scores_malformed_calls_too(saved):
    """They are the policy's mistakes, not a failure of the judge."""
    model = RewardModel(saved)
    model.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} : {{ m.content }} {% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments | items %}{{ key }} {{ value }} {% endfor %}{% endfor %}{% endfor %}"
    )
    calls = [
        [{"type": "function", "function": {"name": "f", "arguments": a}}] for a in ({"x": 1}, '{"x": 1}', "1", [1])
    ]
    completions = [[{"role": "assistant", "content": "3", "tool_calls": made}] for made in calls]
    scores = model(prompts=[[{"role": "user", "content": "why?"}]] * 4, completions=completions)
    assert all(isinstance(score, float) for score in scores)
    assert scores[0] == pytest.approx(scores[1])


def test_a_run_whose_samplers_score_does_not_hold_it(saved, tiny_config):
    """It is checked here, with the same digest, and loaded in each sampler alone."""
    digests = []
    for sync in ("in_process", "processes"):
        trainer = Trainer(config=tiny_config | {"reward_funcs": [saved], "sync": sync})
        (function,) = trainer._parts.rewarder._functions
        assert (function.model.model is None) == (sync == "processes")
        digests.append(trainer._parts.fingerprints["reward functions"])
        trainer.close()
    assert digests[0] == digests[1]
