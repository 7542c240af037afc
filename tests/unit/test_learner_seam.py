"""The learner as others see it: rows in, weights out, whatever it does with micro-batches inside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import winnow
from winnow.base.errors import ConfigError
from winnow.base.weights import StateWeights, state_of
from winnow.config import validate
from winnow.engine.facts import Facts
from winnow.learner.base import Policy, Stats
from winnow.learner.batch import collate, micro_batches
from winnow.methods.correct.truncate import Truncate
from winnow.methods.loss import LossConfig
from winnow.run.resolved import Options

from .engine_models import word_tokenizer
from .learner_models import assert_equal, learner_of, llama, naive_logp, random_rows


@pytest.mark.parametrize("tokens", [1, 30, 10_000])
def test_rows_are_cut_into_micro_batches_inside_and_later_iterations_refer_to_the_first(tokens: int) -> None:
    rows, loss = random_rows(n=9), LossConfig(correction=Truncate(level="token", high=2.0))
    ours, theirs = llama().double(), llama().double()
    learner, by_hand = learner_of(ours, tokens=tokens), learner_of(theirs)
    batches = micro_batches(rows, learner._limits, pad_id=0)
    for iteration in range(3):
        stats, expected = learner.accumulate(rows, loss, iteration), Stats()
        for batch in batches:
            by_hand.forward_backward(batch, loss, expected)
        assert stats.sums == expected.sums
        assert learner.apply(1e-2) == by_hand.apply(1e-2)
    assert_equal(list(ours.parameters()), list(theirs.parameters()), tolerance=0)


def test_log_probabilities_of_rows_come_in_their_order() -> None:
    rows, model = random_rows(n=9), llama().double()
    rows = [*rows, rows[2]]
    learner = learner_of(model, tokens=30, temperature=0.5)
    batch = collate(rows, pad_id=0)
    raw, mask = naive_logp(model, batch), batch.mask_BT[:, 1:]
    for found, logp_T, mask_T in zip(learner.logp(rows, raw=True), raw, mask, strict=True):
        torch.testing.assert_close(found, logp_T[mask_T])
    transformed = learner.batch_logp(batch)
    assert not torch.allclose(transformed, raw)
    for found, logp_T, mask_T in zip(learner.logp(rows), transformed, mask, strict=True):
        torch.testing.assert_close(found, logp_T[mask_T])


def test_weights_say_what_comes_before_it_comes() -> None:
    model = llama()
    source = learner_of(model).weights()
    assert list(source.specs) == [name for name, _ in source.items()] == list(model.state_dict())
    for name, tensor in source.items():
        assert (source.specs[name].shape, source.specs[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert source.state_dict()[name].data_ptr() == model.state_dict()[name].data_ptr(), "not copied"
    plain = {"a": torch.zeros(2)}
    assert state_of(plain) is plain
    assert state_of(StateWeights(plain)) is plain


@pytest.mark.parametrize("adapted", [False, True])
def test_what_a_model_ties_is_published_once_and_saved_whole(adapted: bool, tmp_path: Path) -> None:
    model: Any = llama(tie_word_embeddings=True)
    embeddings = model.get_input_embeddings().weight
    facts = Facts.from_model(model, word_tokenizer(model.config.vocab_size))
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    learner = learner_of(model)
    assert "lm_head.weight" not in learner.weights().specs
    found = facts.check_state(learner.weights().state_dict())
    assert found["lm_head.weight"].data_ptr() == embeddings.data_ptr()
    learner.export(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(saved.get_output_embeddings().weight, embeddings)


def test_sizes_count_what_is_trained() -> None:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    total = sum(p.numel() for p in model.parameters())
    sizes = learner_of(model).sizes
    assert (sizes.total, sizes.trained) == (total, total - model.model.embed_tokens.weight.numel())


def test_a_vocabulary_with_gaps_reaches_to_its_last_id() -> None:
    """What the engine samples has a probability in the learner."""
    model, tokenizer = llama(), word_tokenizer(20)
    words = {word: i if i < 10 else i + 5 for word, i in tokenizer.get_vocab().items()}
    gaps = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token=next(iter(words)))))
    assert (len(gaps), max(words.values())) == (20, 24)
    policy = Policy(model, gaps, None)
    assert policy.n_tokens == Facts.from_model(model, gaps).vocab_size == 25


@pytest.mark.parametrize("spec", ["lokal", {"name": "local", "ranks": 2}])
def test_a_learner_is_chosen_by_name(spec: Any) -> None:
    c = validate({"model": "m", "env": "countdown", "learner": spec})
    with pytest.raises(ConfigError, match=r"Did you mean 'local'|unknown option 'ranks'"):
        Options.from_config(c)


def test_nobody_outside_touches_the_model_of_a_learner() -> None:
    source = Path(winnow.__file__).parent
    for path in source.rglob("*.py"):
        if "learner" not in path.relative_to(source).parts:
            assert not re.search(r"learner\.(model|_\w+)\b", path.read_text(encoding="utf-8")), path
