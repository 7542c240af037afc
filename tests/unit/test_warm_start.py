"""Warm start: tokenizer, model directory, what the loss counts, determinism."""

from __future__ import annotations

import hashlib
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.study.warm_start import (
    IGNORED,
    WarmStartConfig,
    _backward,
    _batches,
    _loss,
    _lr_share,
    small_model,
    warm_start,
    word_tokenizer,
)
from winnow.tasks.countdown import CountdownConfig

TINY = WarmStartConfig(
    max_steps=3, batch_size=4, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, threads=1
)


@pytest.fixture(scope="module")
def task():
    return CountdownConfig(train_size=20, test_size=5).build()


@pytest.fixture(scope="module")
def saved(task, tmp_path_factory):
    path = tmp_path_factory.mktemp("warm") / "model"
    return path, warm_start(task, path, config=TINY)


def test_directory_loads_with_the_auto_classes(saved, task):
    path, summary = saved
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    assert len(tokenizer) == tokenizer.vocab_size == model.config.vocab_size == summary["vocab_size"]
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert summary["parameters"] == model.num_parameters()
    for prompt, completion in islice(task.demonstrations(1), 200):
        text = f"{prompt} {completion}"
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.split())
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    enc = tokenizer([task.train[0].text], return_tensors="pt")
    out = model.generate(**enc, max_new_tokens=2)
    assert out.shape[1] <= enc["input_ids"].shape[1] + 2


def test_unknown_words_are_errors():
    tokenizer = word_tokenizer(["a", "b", "a"], 16)
    assert len(tokenizer) == 4
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("a c")
    with pytest.raises(ValueError, match="blanks"):
        word_tokenizer(["a b"], 16)


def test_same_seed_same_weights_and_torch_state_untouched(task, saved, tmp_path):
    def digest(path):
        return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()

    before = torch.get_rng_state(), torch.get_float32_matmul_precision(), torch.get_num_threads()
    warm_start(task, tmp_path / "same", config=TINY)
    warm_start(task, tmp_path / "other", config=WarmStartConfig(**(vars(TINY) | {"seed": 1})))
    after = torch.get_rng_state(), torch.get_float32_matmul_precision(), torch.get_num_threads()
    assert digest(tmp_path / "same") == digest(saved[0]) != digest(tmp_path / "other")
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


class Uneven:
    """Demonstrations of different lengths."""

    name = "uneven"

    def __init__(self, pairs=(("a", "b c"), ("a b c", "d"))):
        self.pairs = pairs

    def demonstrations(self, seed):
        while True:
            yield from self.pairs

    def vocabulary(self):
        return list("abcd")


def test_loss_counts_completion_and_eos_only():
    config = WarmStartConfig(batch_size=2, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2)
    tokenizer = word_tokenizer(Uneven().vocabulary(), 16)
    ids_BT, labels_BT = next(_batches(Uneven(), tokenizer, config))[0]
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    a, b, c, d = tokenizer.convert_tokens_to_ids(list("abcd"))
    assert ids_BT.tolist() == [[a, b, c, eos, pad], [a, b, c, d, eos]]
    assert labels_BT.tolist() == [[IGNORED, b, c, eos, IGNORED], [IGNORED] * 3 + [d, eos]]
    torch.manual_seed(0)
    model = small_model(tokenizer, config).double()
    terms = []
    for row, start, stop in ((0, 1, 4), (1, 3, 5)):
        logp_TV = model(ids_BT[row : row + 1, :stop]).logits[0].log_softmax(-1)
        terms += [-logp_TV[t - 1, ids_BT[row, t]] for t in range(start, stop)]
    assert _loss(model, ids_BT, labels_BT).item() == pytest.approx(torch.stack(terms).mean().item(), abs=1e-9)


class TwoTurns:
    """Two actions with an observation between them."""

    def __init__(self, completion):
        self.completion = completion

    def demonstrations(self, seed):
        while True:
            yield "a b", self.completion

    def vocabulary(self):
        return list("abcdef")


def test_of_many_turns_actions_are_taught_and_observations_are_not():
    task = TwoTurns(["c", "d e", "f a"])
    tokenizer = word_tokenizer(task.vocabulary(), 16)
    ids_BT, labels_BT = next(_batches(task, tokenizer, TINY))[0]
    assert tokenizer.decode(ids_BT[0]) == "a b c <eos> d e f a <eos>"
    eos, (c, f, a) = tokenizer.eos_token_id, tokenizer.encode("c f a")
    assert labels_BT[0].tolist() == [IGNORED, IGNORED, c, eos, IGNORED, IGNORED, f, a, eos]


class Ragged:
    """Completions of 2 and of 60 words."""

    def demonstrations(self, seed):
        while True:
            yield "a", "b c"
            yield "a b", " ".join("bcd" * 20)

    def vocabulary(self):
        return list("abcd")


def test_rows_of_very_different_lengths_are_not_padded_to_each_other_and_count_the_same():
    config = WarmStartConfig(batch_size=4, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2)
    tokenizer = word_tokenizer(Ragged().vocabulary(), 128)
    batch = next(_batches(Ragged(), tokenizer, config))
    assert [tuple(ids_BT.shape) for ids_BT, _ in batch] == [(2, 4), (2, 63)]
    torch.manual_seed(0)
    model = small_model(tokenizer, config).double()
    mean = _backward(model, batch)
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    terms = torch.cat(
        [
            torch.nn.functional.cross_entropy(
                model(ids_BT[:, :-1]).logits.flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="none"
            )[labels_BT[:, 1:].flatten() != IGNORED]
            for ids_BT, labels_BT in batch
        ]
    )
    assert len(terms) == 2 * 3 + 2 * 61
    terms.mean().backward()
    assert mean == pytest.approx(terms.mean().item(), abs=1e-12)
    for a, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, atol=1e-12, rtol=0)


def test_a_demonstration_must_end_with_an_action():
    task = TwoTurns(["c", "d e"])
    with pytest.raises(ValueError, match=r"ends with an action.*got one of 2"):
        next(_batches(task, word_tokenizer(task.vocabulary(), 16), TINY))


def test_learning_rate_rises_then_decays_to_its_share():
    config = WarmStartConfig(max_steps=100, warmup_steps=10)
    shares = [_lr_share(step, config) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == shares[10] == 1.0
    assert shares[55] == pytest.approx(1 - 0.95 / 2)
    assert shares[100] == pytest.approx(0.05)


def test_it_learns(tmp_path):
    pairs = ((("a", "b c")), ("b", "d"))
    config = WarmStartConfig(
        max_steps=150, batch_size=8, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, warmup_steps=5
    )
    assert warm_start(Uneven(pairs), tmp_path / "m", config=config)["loss"] < 0.1


def test_what_cannot_work_is_refused(task, tmp_path):
    class NoDemonstrations:
        name = "plain"

    with pytest.raises(TypeError, match="'plain' has no demonstrations"):
        warm_start(NoDemonstrations(), tmp_path / "m", config=TINY)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        warm_start(task, tmp_path / "full", config=TINY)
    with pytest.raises(ValueError, match="max_positions=8"):
        warm_start(task, tmp_path / "m", config=WarmStartConfig(**(vars(TINY) | {"max_positions": 8})))
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        warm_start(
            task, tmp_path / "m", config=WarmStartConfig(**(vars(TINY) | {"learning_rate": 1e30, "max_steps": 20}))
        )
    assert not (tmp_path / "m").exists()
    for options in ({"num_heads": 3}, {"num_kv_heads": 3}, {"max_steps": 0}, {"learning_rate": 0.0}):
        with pytest.raises(ValueError, match="warm start"):
            WarmStartConfig(**options)
