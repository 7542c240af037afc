"""Starts that fail for a reason that is easy to misname: each says what is wrong, where, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from winnow.record.records import read_metrics

from ..builders.commands import REWARD, winnow

GEMMA = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def saved(directory: Path, model: Any, template: str | None = None) -> Path:
    """Model with a tokenizer that knows single digits, no more: anything else raises, as it has no unknown token."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **{str(i): i + 2 for i in range(10)}}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = template
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def recipe(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": str(i), "numbers": [i]}) + "\n" for i in range(9))
    )
    model = saved(tmp_path / "model", transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))
    values = tiny_config | {
        "model": str(model),
        "env": {"name": "dataset", "path": str(tmp_path / "rows.jsonl")},
        "reward_funcs": [f"{tmp_path / 'reward.py'}:words"],
        "output_dir": str(tmp_path / "run"),
        "max_steps": 1,
        "eval_steps": None,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def refused(*arguments: str | Path) -> str:
    told = winnow("train", *arguments)
    assert told.exit_code == 1, told.output
    assert "Traceback" not in told.output
    return " ".join(told.output.split())


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_a_text_that_the_tokenizer_does_not_know(recipe: Path, tmp_path: Path, dry: tuple[str, ...]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Zebra {i}", "numbers": [i]}) + "\n" for i in range(9)))
    assert "the tokenizer cannot encode its text: WordLevel error: Missing [UNK] token" in refused(recipe, *dry)
    assert not (tmp_path / "run").exists()


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize(
    ("template", "words"),
    [
        (GEMMA, "the chat template refuses its messages: System role not supported"),
        ("{{ nothing.at.all }}", "the chat template refuses its messages: 'nothing' is undefined"),
        ("{% for m in %}", "the chat template refuses its messages: Expected an expression"),
    ],
)
def test_a_template_that_raises(recipe: Path, tmp_path: Path, template: str, words: str) -> None:
    saved(tmp_path / "model", transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), template)
    said = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": said, "numbers": [1]}) + "\n")
    assert words in refused(recipe, "--dry-run")
    assert words in refused(recipe)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "engine={name: local, slots: 100000000}",
            "slots: Input should be less than or equal to 65536 (got 100000000)",
        ),
        ("stop=['']", "stop.0: String should have at least 1 character"),
        ("temperature=1e-9", "temperature: Input should be greater than or equal to 0.0001"),
        ("eval_temperature=1e-9", "eval_temperature: Value error, must be 0 (greedy) or at least 0.0001"),
        ("max_completion_length=100000000", "max_completion_length: 100000000, but the engine takes 64 tokens"),
    ],
)
def test_a_value_is_blamed_and_no_prompt(recipe: Path, override: str, words: str) -> None:
    said = refused(recipe, override, "--dry-run")
    assert words in said
    assert "max_tokens" not in said


def mixtures() -> dict[str, Any]:
    """Models whose experts are single tensors, to be built when a test wants one."""
    t = transformers
    deepseek = EXPERTS | LATENT | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return {
        "qwen3": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, head_dim=8)),
        "deepseek": lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**SIZES, **deepseek, n_shared_experts=1)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    }


@pytest.mark.parametrize("mixture", ["qwen3", "deepseek", "mixtral"])
def test_adapters_on_fused_experts(recipe: Path, tmp_path: Path, mixture: str) -> None:
    saved(tmp_path / "model", mixtures()[mixture]())
    said = refused(recipe, "lora={r: 2}", "--dry-run")
    assert "lora: target_modules:" in said
    assert "keeps its experts as single tensors (model.layers." in said
    layer = "kv_b_proj" if mixture == "deepseek" else "q_proj"
    assert layer in said.partition("name its layers")[2]
    told = winnow("train", recipe, f"lora={{r: 2, target_modules: [{layer}]}}")
    assert told.exit_code == 0, told.output


def test_a_model_that_is_nowhere(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question to the hub decides whether its client, which tries for a minute, is used at all."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the port "discard", where nothing listens
    said = refused(recipe, f"model={tmp_path.name}/absent", "--dry-run")
    assert "no such directory, and the hub cannot be reached" in said


def test_brackets_in_the_name_of_a_directory(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = winnow("train", recipe, "output_dir=runs/[/m]")
    assert told.exit_code == 0, told.output
    assert "runs/[/m]" in told.output
    for command in ("verify", "report"):
        done = winnow(command, "runs/[/m]")
        assert done.exit_code == 0, done.output


def test_a_bad_byte_in_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": \xff}\n{"step": 2}\n')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:2: damaged .*left out"):
        assert list(read_metrics(tmp_path)) == [{"step": 0}, {"step": 2}]
