"""Models as they are published: configs that cannot be saved, types, position embeddings, adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from winnow import ConfigError, Trainer
from winnow.config import validate
from winnow.engine import LocalEngine
from winnow.engine.initial_model import InitialModel
from winnow.engine.saving import types_of
from winnow.engine.stops import MOST_SETS, StopTable

from ..builders.resolving import resolved
from ..builders.tokenizers import chat_model, chat_tokenizer

__all__ = ["chat_model"]

EOS, TURN = 0, 2
ROWS = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(4)]


def trainer(output: Path, model: str, lora: Any = None) -> Trainer:
    sizes = {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 2, "threads": 1}
    config = sizes | {"output_dir": str(output), "save_steps": 1, "lora": lora}
    return Trainer(model=model, train_dataset=ROWS, reward_funcs=even, config=config)


def even(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(str(each)) % 2) for each in completions]


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_flags_of_sampling_end_no_run_at_its_first_save(tmp_path: Path, chat_model: Path, lora: Any) -> None:
    """transformers reads such a file, and refuses to write it once anything has changed."""
    file = chat_model / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": EOS, "temperature": 0.6, "top_p": 0.9}))
    trainer(tmp_path / "run", str(chat_model), lora=lora).train()
    saved = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [EOS, TURN]
    assert (saved["do_sample"], saved["temperature"], saved["top_p"]) == (True, 0.6, 0.9)


def test_what_cannot_be_saved_is_refused_at_the_start(tmp_path: Path, chat_model: Path) -> None:
    (chat_model / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "length_penalty": 0.5}))
    with pytest.raises(ConfigError, match="model: its generation_config cannot be saved"):
        trainer(tmp_path / "run", str(chat_model))


def test_a_switch_of_position_embeddings_is_not_reached() -> None:
    """longrope: the longest sequence of a pass decides about all of them."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 8, "rope_theta": 10_000.0, **factors}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    tokenizer = chat_tokenizer()
    c = Phi3Config(
        vocab_size=len(tokenizer), max_position_embeddings=64, original_max_position_embeddings=8, rope_parameters=rope,
        pad_token_id=0, eos_token_id=0, bos_token_id=0, **sizes,
    )  # fmt: skip
    model = Phi3ForCausalLM(c)
    with pytest.raises(ValueError, match=r"over 8 tokens \(longrope\).* max_length .* to at most 8; it is 32"):
        LocalEngine(model, tokenizer, max_length=32)
    LocalEngine(model, tokenizer, max_length=8)


def test_an_object_with_tuned_tokens_is_taken_apart(tiny_model: Path, tiny_config: dict[str, Any]) -> None:
    """Its wrapper holds layers of adapters, which go with it."""
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 4], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), options)
    base, adapter = InitialModel.from_config(validate(tiny_config | {"lora": {"resume": True}}), model).load()
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert adapter is not None
    assert base.state_dict().keys() == plain.state_dict().keys()
    ids = torch.arange(8)[None]
    torch.testing.assert_close(base(ids).logits, plain(ids).logits)


def test_the_type_of_a_model_whose_weights_are_not_there_yet(tmp_path: Path) -> None:
    """Of a hub the config comes first."""
    parts = {"model_type": "gemma3", "text_config": {"dtype": "bfloat16"}}
    for content in ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, parts):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | content))
        assert types_of(tmp_path) == {"*": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float8_e4m3fn"}))
    assert types_of(tmp_path) == {}


def test_vllm_computes_an_object_in_its_own_type() -> None:
    def config(engine: Any) -> Any:
        return validate({"model": "given", "env": "countdown", "threads": 1, "engine": engine})

    def large() -> LlamaForCausalLM:
        with torch.device("meta"):
            return LlamaForCausalLM(LlamaConfig(vocab_size=32_000, hidden_size=512, num_hidden_layers=2))

    for dtype, own in ((torch.bfloat16, "bfloat16"), (torch.float32, None)):
        start = InitialModel(source="given", model=large().to(dtype))
        assert resolved(config("vllm"), start).engine.dtype == own
    start = InitialModel(source="given", model=large().to(torch.bfloat16))
    assert resolved(config({"name": "vllm", "dtype": "float32"}), start).engine.dtype == "float32"


def test_stop_strings_of_requests_are_forgotten() -> None:
    table = StopTable(chat_tokenizer(), 259, frozenset({0}))
    for number in range(3 * MOST_SETS):
        table.forget()
        table.add((f"stop {number}",))
    assert len(table.alert) <= MOST_SETS + 2
    assert table.add((f"stop {3 * MOST_SETS - 1}",)) == len(table.alert) - 1
