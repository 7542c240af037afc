"""Warm start from rows of data: tokenizer, what is taught, pretrained models, what there is nothing to learn from."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow import ConfigError, Trainer
from winnow.env.dataset import DatasetConfig
from winnow.env.prompting import encode_prompt
from winnow.study import warm_start as module
from winnow.study.demonstrations import RowDemonstrations
from winnow.study.warm_start import IGNORED, WarmStartConfig, _backward, _batches, warm_start

from ..builders.tokenizers import chat_tokenizer

TINY = WarmStartConfig(
    max_steps=250,
    batch_size=8,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    warmup_steps=5,
    threads=1,
)
Made = tuple[Path, dict[str, Any]]
ROWS = [{"prompt": f"Say the word after {a}: ", "completion": b} for a, b in ("ab", "bc", "cd", "de")]
CHAT = [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["completion"]} for r in ROWS]


def by_sibling(completions: list[str]) -> list[float]:
    return [float(i) for i in range(len(completions))]


def task(rows: list[dict[str, Any]], **options: Any) -> Any:
    return DatasetConfig(path="rows", **options).with_rows(rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tmp_path_factory.mktemp("warm") / "model"
    return path, warm_start(task(ROWS), path, config=TINY)


def test_a_model_of_ones_own_words_trains(made: Made, tmp_path: Path) -> None:
    path, found = made
    assert (found["demonstrations"], found["steps"]) == (4, 250)
    assert found["loss"] < 0.3
    config = {"output_dir": str(tmp_path / "run"), "max_steps": 1, "prompts_per_step": 5, "max_completion_length": 4}
    rows = [*ROWS, {"prompt": "Say a word that nobody has said: 🙂 Ω\n"}]
    trainer = Trainer(str(path), train_dataset=rows, reward_funcs=by_sibling, config=config)
    trainer.train()
    assert "loss" in json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])


def test_nothing_is_unknown_to_its_tokenizer(made: Made) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    model = AutoModelForCausalLM.from_pretrained(made[0])
    assert len(tokenizer) == model.config.vocab_size == made[1]["vocab_size"]
    for text in ("Say the word after a: b", "🙂 مرحبا\n\t\0 日本語", " 1234 x  y ", "<pad"):
        ids = tokenizer.encode(text)
        assert max(ids) < len(tokenizer)
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len(tokenizer.encode("Say the word after a: ")) < 12
    assert len(tokenizer.encode("1234")) == 4


def test_the_same_seed_makes_the_same_model(made: Made, tmp_path: Path) -> None:
    warm_start(task(ROWS), tmp_path / "m", config=TINY)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "m" / name).read_bytes() == (made[0] / name).read_bytes()


def test_every_demonstration_in_turn() -> None:
    shown = RowDemonstrations("x", task([*ROWS, {"prompt": "none"}]).train)
    pairs = [(p.text, c) for p, c in islice(shown.demonstrations(0), 12)]
    assert len(shown) == 4
    for turn in (pairs[:4], pairs[4:8], pairs[8:]):
        assert sorted(turn) == [(r["prompt"], r["completion"]) for r in ROWS]
    assert pairs[:4] != pairs[4:8]


def test_conversations_are_taught_as_they_are_asked(tmp_path: Path) -> None:
    config = WarmStartConfig(**(vars(TINY) | {"max_steps": 1}))
    warm_start(task(CHAT), tmp_path / "m", config=config)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    data = task(CHAT)
    ids_BT, labels_BT = next(_batches(RowDemonstrations("x", data.train), tokenizer, config))[0]
    for ids, labels in zip(ids_BT, labels_BT, strict=True):
        taught = labels[labels != IGNORED].tolist()
        answer = tokenizer.decode(taught[:-1])
        prompt = next(p for p in data.train if p.columns["answer"] == answer)
        asked = list(encode_prompt(tokenizer, prompt))
        assert taught[-1] == tokenizer.eos_token_id
        assert ids[: len(asked) + len(taught)].tolist() == asked + taught
    assert tokenizer.decode(asked).startswith("<|user|>Say the word after")


@pytest.mark.parametrize(
    ("row", "column", "completion"),
    [
        ({"answer": 16, "other": "no"}, None, "16"),
        ({"answer": "no", "solution": "3 + 13", "ground_truth": "no"}, None, "3 + 13"),
        ({"answer": "no", "shown": "yes"}, "shown", "yes"),
        ({"completion": [{"role": "assistant", "content": "hello"}]}, None, "hello"),
    ],
)
def test_where_completions_are(row: dict[str, Any], column: str | None, completion: str) -> None:
    shown = RowDemonstrations("x", task([{"prompt": "q"} | row]).train, column)
    assert next(shown.demonstrations(0))[1] == completion


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"prompt": "q", "text": "a"}],
            {},
            r"nothing to learn from: .* \(columns: text\); name the",
        ),
        ([{"prompt": "q"}], {}, r"\(columns: none but the prompt\)"),
        (
            [{"prompt": "q", "answer": "a"}],
            {"completion_column": "anwser"},
            "no column 'anwser'.*mean 'answer'",
        ),
        ([{"prompt": "q", "answer": " "}], {}, "column 'answer' is empty in every row"),
        ([{"prompt": "q", "id": 7, "answer": ["a", "b"]}], {}, r"prompt '7': 'answer' must be text, a number, or one"),
        (ROWS, {"vocab_size": 200}, "vocab_size must be at least 258, got 200"),
        (ROWS, {"max_positions": 5}, "a demonstration of .* tokens exceeds max_positions=5"),
        (ROWS, {"model": "nowhere"}, "cannot load the tokenizer of 'nowhere'"),
    ],
)
def test_what_cannot_be_taught(tmp_path: Path, rows: Any, options: dict[str, Any], message: str) -> None:
    base = {"max_steps": 1} if "model" in options else vars(TINY)
    with pytest.raises((ConfigError, ValueError), match=message):
        warm_start(task(rows), tmp_path / "m", config=WarmStartConfig(**(base | options)))
    assert not (tmp_path / "m").exists()


def test_options_without_effect() -> None:
    with pytest.raises(ValueError, match="hidden_size shapes a new model and has no effect with model"):
        WarmStartConfig(model="m", hidden_size=64)
    assert WarmStartConfig().rate == 3e-3
    assert WarmStartConfig(model="m").rate == 2e-5


def test_a_pretrained_model_goes_on_with_its_own_tokenizer(made: Made, tmp_path: Path) -> None:
    config = WarmStartConfig(
        model=str(made[0]), max_steps=150, batch_size=8, learning_rate=3e-3, warmup_steps=5, threads=1
    )
    other = [r | {"completion": "x" + r["completion"]} for r in ROWS]
    found = warm_start(task(other), tmp_path / "m", config=config)
    assert found["vocab_size"] == made[1]["vocab_size"]
    assert found["parameters"] == made[1]["parameters"]
    assert found["loss"] < 0.5
    before, after = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (made[0], tmp_path / "m"))
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    long = [{"prompt": "q" * 600, "answer": "a"}]
    with pytest.raises(ValueError, match="exceeds the model's max_position_embeddings=512"):
        warm_start(task(long), tmp_path / "n", config=config)


def test_parts_and_heads_give_the_same_gradient(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    config, shown = WarmStartConfig(model=str(made[0]), batch_size=8), RowDemonstrations("x", task(ROWS).train)
    grads, parts = [], []
    for tokens, linear in ((10_000, True), (30, True), (30, False)):
        monkeypatch.setattr(module, "PART_TOKENS", tokens)
        model = AutoModelForCausalLM.from_pretrained(made[0]).double()
        batch = next(_batches(shown, tokenizer, config))
        parts.append(len(batch))
        _backward(model, batch, linear=linear)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert parts[0] < parts[1] == parts[2]
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], atol=1e-12, rtol=0)


def test_a_conversation_is_taught_with_the_templates_own_end_of_turn() -> None:
    """And with a template of one's own; a tokenizer that ends texts by itself adds nothing to a prompt."""
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", pair="$A $B", special_tokens=[("<|endoftext|>", 0)]
    )
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "solution": "you"}, {"prompt": "hi", "solution": "you"}]
    config = WarmStartConfig(batch_size=2)
    (batch,) = islice(_batches(RowDemonstrations("x", task(rows).train), tokenizer, config), 1)
    texts = {tokenizer.decode([i for i in row.tolist() if i]) for ids, _ in batch for row in ids}
    ends = {tokenizer.decode(row[row != IGNORED]) for _, labels in batch for row in labels}
    assert texts == {"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyou<|im_end|>", "hiyou"}
    assert ends == {"you<|im_end|>", "you<|endoftext|>"}


def test_a_warm_start_with_a_template_of_ones_own(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "solution": str(i)} for i in range(4)]
    template = "{% for m in messages %}Q: {{ m.content }}\n{% endfor %}A: "
    config = replace(TINY, max_steps=1, chat_template=template)
    warm_start(task(rows), tmp_path / "m", config=config)
    assert AutoTokenizer.from_pretrained(tmp_path / "m").chat_template == template
    with pytest.raises(ConfigError, match="warm start: chat_template: no such file"):
        warm_start(task(rows), tmp_path / "n", config=replace(TINY, chat_template="no/such.jinja"))
