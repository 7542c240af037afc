"""A LoRA adapter as the model to begin with: merged exactly, trained on, or refused by file, key and remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.engine import LocalEngine
from winnow.engine.initial_model import InitialModel
from winnow.engine.loading import load_causal_lm, load_tokenizer
from winnow.run.standalone import evaluate_model

from ..builders.adapters import (
    CPU,
    REWARDS,
    adapted,
    adapter,  # noqa: F401
    changed,
    logits,
)


@pytest.fixture(params=["tied", "untied"])
def base(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    """Models whose head is and is not the embedding."""
    if request.param == "tied":
        return tiny_model
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, **sizes)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"r": 64, "use_rslora": True},
        {"use_dora": True},
        {"lora_dropout": 0.5, "bias": "lora_only"},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"trainable_token_indices": [3, 4]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
    ids=str,
)
def test_a_merged_adapter_is_the_policy_that_it_was(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    model = adapted(base, tmp_path / "adapter", **options)
    whole = load_causal_lm(tmp_path / "adapter", CPU)
    torch.testing.assert_close(logits(whole), logits(model), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(whole), logits(load_causal_lm(base, CPU)), atol=1e-3)
    assert all(p.requires_grad for p in whole.parameters())
    assert not hasattr(whole, "peft_config")
    whole.save_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits(load_causal_lm(tmp_path / "whole", CPU)), logits(model), atol=1e-4, rtol=1e-4)


def test_added_tokens_come_with_the_adapter(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    base.resize_token_embeddings(len(tokenizer))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")).eval()
    model.save_pretrained(tmp_path / "adapter")
    assert len(load_tokenizer(tmp_path / "adapter")) == len(tokenizer) - 2  # the base's
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert len(load_tokenizer(tmp_path / "adapter")) == len(tokenizer)
    whole = load_causal_lm(tmp_path / "adapter", CPU)
    assert whole.get_input_embeddings().num_embeddings == len(tokenizer)
    torch.testing.assert_close(logits(whole), logits(model))


def test_tokens_without_embeddings_are_refused(adapter: Path, tiny_model: Path, tiny_config: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens([f"new{i}" for i in range(100)])
    tokenizer.save_pretrained(adapter)
    with pytest.raises(ConfigError, match=r"the tokenizer of .* has \d+ tokens, the base \d+ embeddings"):
        Trainer(config=tiny_config | {"model": str(adapter)})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task_type": "SEQ_CLS"}, "task_type: SEQ_CLS; the adapter of a CAUSAL_LM is needed"),
        ({"peft_type": "IA3"}, "peft_type: IA3; only LORA"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path: names no base model"),
        ({"base_model_name_or_path": "gone/base"}, "base_model_name_or_path: 'gone/base' is no directory with a model"),
        ({"base_model_name_or_path": "."}, "'.' is the adapter's own directory"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa changed the base model"),
        ({"revision": "abc"}, "revision: abc of the base"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication: .* is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: .* is not supported"),
        ({"lora_bias": True}, "lora_bias: True is not supported"),
        ({"r": 10**9}, "rank 1000000000 is not that of the weights"),
        ({"r": "4"}, "r: 4, rank_pattern: .*: ranks are integers; restore the file"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern: .*q_proj.*: ranks are integers"),
        ({"rank_pattern": {"q_proj": None}}, "rank_pattern: .*None.*: ranks are integers"),
        ({"r": 5}, "does not fit"),
        ({"target_modules": ["nothing"]}, "does not fit .*[Tt]arget modules"),
        ({"target_modules": ["q_proj"]}, "differs; restore the file"),
        ({"target_modules": 5}, "target_modules: expected a name or a list of names, not 5; restore the file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_used_is_refused_with_key_and_file(adapter: Path, settings: dict[str, Any], said: str) -> None:
    changed(adapter, **settings)
    with pytest.raises(ConfigError, match=f"^model: .*adapter.*{said}"):
        load_causal_lm(adapter, CPU)


def test_weights_are_safetensors_whole_and_finite(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    state = load_file(file)
    save_file({n: torch.full_like(t, torch.nan) for n, t in state.items()}, file)
    with pytest.raises(ConfigError, match="is not finite"):
        load_causal_lm(adapter, CPU)
    file.write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors: cannot be read"):
        load_causal_lm(adapter, CPU)
    file.unlink()
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors"):
        load_causal_lm(adapter, CPU)
    torch.save(state, adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"only adapter_model\.bin, a pickle, which is not read; save it again"):
        load_causal_lm(adapter, CPU)


def test_whole_weights_next_to_an_adapter_are_not_its_base(adapter: Path, tiny_model: Path) -> None:
    """They may be what it was merged into, and merging would apply it twice."""
    before = logits(load_causal_lm(adapter, CPU))
    load_causal_lm(adapter, CPU).save_pretrained(adapter)
    assert (adapter / "model.safetensors").exists()
    assert torch.equal(logits(load_causal_lm(adapter, CPU)), before)


def test_where_a_base_is_found(adapter: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(load_causal_lm(adapter, CPU))
    shutil.copytree(tiny_model, adapter / "base")
    changed(adapter, base_model_name_or_path="./base")
    assert torch.equal(logits(load_causal_lm(adapter, CPU)), expected)
    monkeypatch.chdir(tiny_model.parent)
    changed(adapter, base_model_name_or_path=tiny_model.name)
    assert torch.equal(logits(load_causal_lm(adapter, CPU)), expected)


def test_adapters_over_adapters(adapter: Path, tmp_path: Path) -> None:
    middle = load_causal_lm(adapter, CPU)
    model = peft.get_peft_model(middle, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.eval().save_pretrained(tmp_path / "upper")
    torch.testing.assert_close(logits(load_causal_lm(tmp_path / "upper", CPU)), logits(model))
    changed(adapter, base_model_name_or_path=str(tmp_path / "upper"))
    with pytest.raises(ConfigError, match="base_model_name_or_path: is an adapter over this one"):
        load_causal_lm(adapter, CPU)


@pytest.mark.parametrize("place", ["base", "model"])
def test_quantized_models_are_refused(adapter: Path, tiny_model: Path, tmp_path: Path, place: str) -> None:
    shutil.copytree(tiny_model, tmp_path / "quantized")
    file = tmp_path / "quantized" / "config.json"
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))
    changed(adapter, base_model_name_or_path=str(tmp_path / "quantized"))
    with pytest.raises(
        ConfigError, match=r"is quantized \(bitsandbytes\) .* as base_model_name_or_path in its adapter"
    ):
        load_causal_lm(adapter if place == "base" else tmp_path / "quantized", CPU)


class TestObjects:
    def test_a_peft_model_is_taken_apart(self, adapter: Path, tiny_model: Path, tiny_config: dict[str, Any]) -> None:
        expected = logits(load_causal_lm(adapter, CPU))
        for name, trainable in (("default", False), ("sft", True)):
            model = AutoModelForCausalLM.from_pretrained(tiny_model)
            model = peft.PeftModel.from_pretrained(model, adapter, adapter_name=name, is_trainable=trainable)
            whole, rest = InitialModel.from_config(validate(tiny_config), model).load()
            torch.testing.assert_close(logits(whole.eval()), expected)
            assert rest is None
            assert all(p.requires_grad for p in whole.parameters())

    def test_adapters_that_transformers_has_loaded_and_merged_layers(
        self, adapter: Path, tiny_config: dict[str, Any]
    ) -> None:
        expected, c = logits(load_causal_lm(adapter, CPU)), validate(tiny_config)
        model = AutoModelForCausalLM.from_pretrained(adapter)
        torch.testing.assert_close(logits(InitialModel.from_config(c, model).load()[0]), expected)
        model = AutoModelForCausalLM.from_pretrained(adapter)
        wrapped = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_config["model"]), adapter)
        wrapped.merge_adapter()
        torch.testing.assert_close(
            logits(InitialModel.from_config(c, wrapped).load()[0]), expected, atol=1e-5, rtol=1e-4
        )

    def test_several_adapters_are_refused(self, adapter: Path, tiny_config: dict[str, Any]) -> None:
        model = AutoModelForCausalLM.from_pretrained(tiny_config["model"])
        model = peft.PeftModel.from_pretrained(model, adapter)
        model.load_adapter(adapter, "other")
        with pytest.raises(ConfigError, match=r"model: the PeftModel\w* has 2 adapters \(default, other\)"):
            Trainer(model=model, config=tiny_config, processing_class=load_tokenizer(tiny_config["model"]))

    def test_weights_that_cannot_be_trained_are_refused(self, adapter: Path, tiny_config: dict[str, Any]) -> None:
        """Before its adapters are taken off."""
        c, tokenizer = validate(tiny_config), load_tokenizer(tiny_config["model"])
        model = AutoModelForCausalLM.from_pretrained(tiny_config["model"])
        wrapped = peft.PeftModel.from_pretrained(model, adapter)
        model.config.quantization_config = {"quant_method": "bitsandbytes"}
        for given in (model, wrapped):
            with pytest.raises(ConfigError, match=r"is quantized \(bitsandbytes\) .* load it without quanti"):
                InitialModel.from_config(c, given)
        with pytest.raises(ValueError, match=r"is quantized \(bitsandbytes\)"):
            LocalEngine(model, tokenizer)
        model.config.quantization_config = None
        model.model.layers[0]._hf_hook = object()  # as accelerate leaves it
        with pytest.raises(ConfigError, match="load it without device_map"):
            InitialModel.from_config(c, wrapped)
        assert any("lora_A" in name for name, _ in wrapped.named_modules())

    def test_attention_that_takes_no_masks_is_replaced(self, tiny_config: dict[str, Any]) -> None:
        model = AutoModelForCausalLM.from_pretrained(tiny_config["model"])
        model.config._attn_implementation = "flash_attention_2"
        with pytest.warns(UserWarning, match="attn_implementation: flash_attention_2 .* sdpa is used"):
            InitialModel.from_config(validate(tiny_config), model)
        assert model.config._attn_implementation == "sdpa"


class TestResumed:
    """`lora: {resume: true}`: the adapter itself is trained on."""

    @pytest.mark.parametrize(
        ("lora", "said"),
        [
            ({"r": 16}, r"lora.r: 16 differs from the adapter's 4 \("),
            ({"alpha": 32}, r"lora.alpha: 32 differs from the adapter's 8 \("),
            ({"target_modules": ["q_proj"]}, r"lora.target_modules: \['q_proj'\] differs from the adapter's"),
        ],
        ids=["r", "alpha", "targets"],
    )
    def test_values_of_another_adapter_are_refused(
        self, adapter: Path, tiny_config: dict[str, Any], lora: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(ConfigError, match=said):
            Trainer(config=tiny_config | {"model": str(adapter), "lora": {"resume": True} | lora})

    def test_what_can_only_be_merged_and_what_is_no_adapter(
        self, tiny_model: Path, tmp_path: Path, tiny_config: dict[str, Any]
    ) -> None:
        resumed = tiny_config | {"lora": {"resume": True}}
        with pytest.raises(ConfigError, match=r"lora.resume: .* is not a LoRA adapter .*; remove resume"):
            Trainer(config=resumed)
        for name, options in (("use_dora", {"use_dora": True}), ("modules_to_save", {"modules_to_save": ["lm_head"]})):
            adapted(tiny_model, tmp_path / name, **options)
            with pytest.raises(ConfigError, match=f"lora.resume: an adapter with {name}: .* leave `lora` out to merge"):
                Trainer(config=resumed | {"model": str(tmp_path / name)})
        with pytest.raises(ConfigError, match="r: may be null only with resume: true"):
            validate(tiny_config | {"lora": {"r": None}})

    @pytest.mark.parametrize("targets", [5, [1, "a"]], ids=str)
    def test_target_modules_that_are_no_names_are_refused(
        self, adapter: Path, tiny_config: dict[str, Any], targets: Any
    ) -> None:
        changed(adapter, target_modules=targets)
        with pytest.raises(ConfigError, match=r"adapter_config\.json: target_modules: expected a name or a list"):
            Trainer(config=tiny_config | {"model": str(adapter), "lora": {"resume": True}})

    def test_a_file_without_weights_is_refused_by_name(self, adapter: Path, tiny_config: dict[str, Any]) -> None:
        save_file({}, adapter / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=r"adapter_config\.json: rank 4 is not that of the weights"):
            Trainer(config=tiny_config | {"model": str(adapter), "lora": {"resume": True}})

    @pytest.mark.parametrize("given", ["directory", "object"])
    def test_it_begins_where_the_adapter_was_and_the_reference_is_that(
        self, adapter: Path, tiny_config: dict[str, Any], given: str
    ) -> None:
        settings = tiny_config | {"lora": {"resume": True}, "beta": 0.1, "max_steps": 2, "eval_steps": None}
        settings |= {"reward_funcs": REWARDS}
        model: Any = str(adapter)
        if given == "object":
            model = AutoModelForCausalLM.from_pretrained(tiny_config["model"])
            model = peft.PeftModel.from_pretrained(model, adapter)
        trainer = Trainer(model=model, config=settings, processing_class=load_tokenizer(tiny_config["model"]))
        assert trainer.config.lora is not None
        assert (trainer.config.lora.r, trainer.config.lora.alpha) == (4, 8)
        policy: Any = trainer.learner
        torch.testing.assert_close(logits(policy._causal_lm), logits(load_causal_lm(adapter, CPU)))
        assert {n.split(".")[-3] for n in policy._params} == {"lora_A", "lora_B"}
        with trainer:
            first, second = trainer.step(), trainer.step()
        assert first["kl"] == 0.0
        assert 0 < second["kl"] < 1

    def test_dropout_is_the_adapters_unless_it_is_given(
        self, tiny_model: Path, tmp_path: Path, tiny_config: dict[str, Any]
    ) -> None:
        adapted(tiny_model, tmp_path / "noisy", lora_dropout=0.25)
        for lora, expected in (({}, 0.25), ({"dropout": 0.0}, 0.0)):
            settings = tiny_config | {"model": str(tmp_path / "noisy"), "lora": {"resume": True} | lora}
            with Trainer(config=settings) as trainer:
                model: Any = trainer.learner.model  # type: ignore[attr-defined]
                rates = {m.p for n, m in model.named_modules() if ".lora_dropout." in n and hasattr(m, "p")}
                assert (rates or {0.0}) == {expected}

    def test_an_engine_that_takes_adapters_alone_must_know_what_they_are(
        self, tiny_model: Path, tmp_path: Path, tiny_config: dict[str, Any]
    ) -> None:
        adapted(tiny_model, tmp_path / "adapter", use_rslora=True)
        settings = {"lora": {"resume": True, "merge": False}, "engine": "vllm", "model": str(tmp_path / "adapter")}
        with pytest.raises(ConfigError, match=r"this one has use_rslora .* set lora\.merge: true"):
            Trainer(config=tiny_config | settings)


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("lora", [None, {"resume": True}, {"r": 2}], ids=["merged", "resumed", "fresh"])
@pytest.mark.parametrize("sync", ["in_process", "processes"])
def test_runs_from_an_adapter_go_on_exactly_and_end_as_whole_models(
    adapter: Path, tiny_config: dict[str, Any], lora: Any, sync: str, tmp_path: Path
) -> None:
    settings = tiny_config | {"model": str(adapter), "lora": lora, "eval_steps": None, "max_steps": 3, "beta": 0.05}
    settings |= {"reward_funcs": REWARDS}
    if sync == "processes":
        settings |= {"sync": {"name": "processes", "samplers": 1}, "max_lag": 1, "correction": "truncate"}
    ends = {}
    for name, steps in (("through", [3]), ("stopped", [2, 3])):
        settings["output_dir"] = str(tmp_path / name)
        for number in steps:
            fresh = number == steps[0]
            trainer = Trainer(config=settings) if fresh else Trainer.resume(tmp_path / name)
            if number == 2:
                with trainer:
                    trainer.step(), trainer.step()
                found = evaluate_model(str(tmp_path / name), {"eval_prompts": 2, "eval_generations": 2})
                assert found["model"].endswith("model")
            else:
                trainer.train()
        ends[name] = load_file(tmp_path / name / "model" / "model.safetensors")
        if sync == "processes":
            break
    first = ends["through"]
    if sync == "in_process":
        assert all(torch.equal(tensor, ends["stopped"][n]) for n, tensor in first.items())
    before = load_causal_lm(adapter, CPU).state_dict()
    assert first.keys() <= before.keys()
    assert any(not torch.equal(before[n], t) for n, t in first.items())
    assert max(float((before[n] - t).abs().max()) for n, t in first.items()) < 0.1
