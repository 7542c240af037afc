"""Ends of completions: tokens without an embedding are refused, and a saved policy ends where its rollouts did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaForSequenceClassification

from winnow import ConfigError, RewardModel, Trainer
from winnow.engine.facts import Facts, end_where_rollouts_do
from winnow.engine.saving import recast
from winnow.study.warm_start import WarmStartConfig, warm_start

from ..builders.datasets import build_rows
from ..builders.tokenizers import CHATML, chat_model, chat_tokenizer

__all__ = ["chat_model"]

ROWS = [{"prompt": [{"role": "user", "content": f"say {i}"}], "answer": "x"} for i in range(4)]
EOS, TURN = 0, 2
"""Ids of `<|endoftext|>`, the tokenizer's end, and of `<|im_end|>`, the template's."""


def right(completions, **columns):
    return [float(len(str(each)) % 2) for each in completions]


def trainer(output: Path, model: Any, **more: Any) -> Trainer:
    objects = {key: more.pop(key) for key in ("processing_class",) if key in more}
    sizes = {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 2, "threads": 1}
    config = sizes | {"output_dir": str(output), "save_steps": 1} | more
    return Trainer(model=model, train_dataset=ROWS, reward_funcs=right, config=config, **objects)


def ends_in(directory: Path) -> Any:
    return json.loads((directory / "generation_config.json").read_text())["eos_token_id"]


def with_token(directory: Path, token: str, **more: Any) -> Any:
    """Add a token to a saved tokenizer, without an embedding for it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    for key, value in more.items():
        setattr(tokenizer, key, value)
    tokenizer.save_pretrained(directory)
    return tokenizer


# ---- tokens without an embedding


@pytest.mark.parametrize("lora", [None, {"r": 2}])
@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"eos_token": "<end>"}, "the end of sequence '<end>'"),
        ({"chat_template": CHATML.replace("<|im_end|>", "<end>")}, "a token '<end>'"),
        ({}, "a token '<end>'"),
    ],
)
def test_a_token_without_an_embedding_is_refused(tmp_path, chat_model, more, what, lora):
    """By name and as objects; with a key of the remedy that works."""
    tokenizer = with_token(chat_model, "<end>", **more)
    message = (
        rf"model: the tokenizer has 260 tokens, '\S+' 259 embeddings: {what} \(id 259\) has none. Call model.resize"
    )
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path / "a", str(chat_model), lora=lora)
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path / "b", model, processing_class=tokenizer, lora=lora)
    model.resize_token_embeddings(260)
    trainer(tmp_path / "c", model, processing_class=tokenizer, lora=lora)


def test_a_head_that_is_smaller_than_the_embedding_is_refused(tmp_path, chat_model):
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    model.config.tie_word_embeddings = False
    model.lm_head = torch.nn.Linear(32, 258, bias=False)
    with pytest.raises(ConfigError, match=r"258 embeddings: a token '.+' \(id 258\) has none"):
        trainer(tmp_path / "a", model, processing_class=chat_tokenizer())


def test_tokens_of_pictures_need_no_embedding(tmp_path, chat_model):
    """Gemma 3 1B has one."""
    with_token(chat_model, "<image_soft_token>")
    trainer(tmp_path / "a", str(chat_model))


def test_a_warm_start_and_a_reward_model_refuse_them(tmp_path, chat_model):
    tokenizer = with_token(chat_model, "<end>")
    with pytest.raises(ConfigError, match=r"'<end>' \(id 259\) has none. Call model.resize_token_embeddings"):
        warm_start(build_rows(ROWS), tmp_path / "warm", config=WarmStartConfig(model=str(chat_model), max_steps=1))
    judge = LlamaForSequenceClassification(AutoConfig.from_pretrained(chat_model, num_labels=1))
    with pytest.raises(ConfigError, match=r"reward_funcs: '\S+' has 259 embeddings, and none for '<end>' \(id 259\)"):
        RewardModel(judge, tokenizer)


# ---- ends of the saved policy


def test_a_saved_policy_ends_where_its_rollouts_did(tmp_path, chat_model):
    """Its checkpoint, the finished model, and a model saved from a checkpoint in another dtype."""
    assert ends_in(chat_model) == EOS
    trainer(tmp_path / "run", str(chat_model)).train()
    saved = tmp_path / "run" / "checkpoints" / "step-000001" / "model"
    recast(saved, tmp_path / "half", {"*": "bfloat16"})
    for directory in (saved, tmp_path / "run" / "model", tmp_path / "half"):
        assert ends_in(directory) == [EOS, TURN]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert Facts.from_model(again, chat_tokenizer()).eos_ids == {EOS, TURN}
    assert Facts.from_model(again, chat_tokenizer(template=None)).eos_ids == {EOS, TURN}


def test_a_policy_of_adapters_is_saved_with_them_merged(tmp_path, chat_model):
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    trainer(tmp_path / "run", model, processing_class=chat_tokenizer(), lora={"r": 2}).train()
    assert ends_in(tmp_path / "run" / "model") == [EOS, TURN]


def test_a_warm_start_is_saved_with_the_end_it_taught(tmp_path, chat_model):
    warm_start(build_rows(ROWS), tmp_path / "warm", config=WarmStartConfig(model=str(chat_model), max_steps=1))
    assert ends_in(tmp_path / "warm") == [EOS, TURN]


def test_ends_that_are_complete_stay_as_they_are(chat_model):
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    model.generation_config.eos_token_id = [TURN, 7, EOS]
    with pytest.warns(UserWarning, match="eos_token_id 7 is '.+', no special token, and completions end there"):
        assert end_where_rollouts_do(model, chat_tokenizer()) == [EOS, TURN, 7]
    assert model.generation_config.eos_token_id == [TURN, 7, EOS]


def test_an_end_that_cannot_be_sampled_is_left_out_with_a_warning():
    """The default of a configuration made from scratch."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=259, n_embd=8, n_layer=1, n_head=1))
    with pytest.warns(UserWarning, match="eos_token_id 50256 is none of the 259 tokens that can be sampled"):
        end_where_rollouts_do(model, chat_tokenizer())
    assert model.generation_config.eos_token_id == [EOS, TURN]
