"""The types in which models are saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.engine.loading import load_causal_lm, load_tokenizer
from winnow.run.standalone import evaluate_model
from winnow.study.warm_start import WarmStartConfig, warm_start
from winnow.tasks.countdown import CountdownConfig

from ..builders.adapters import (
    CPU,
    REWARDS,
    adapter,  # noqa: F401
    changed,
)


class TestSavedTypes:
    """The saved model has the types of the model that was given; checkpoints stay float32."""

    @pytest.fixture
    def half(self, tiny_model: Path, tmp_path: Path) -> Path:
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
        load_tokenizer(tiny_model).save_pretrained(tmp_path / "half")
        return tmp_path / "half"

    @pytest.fixture
    def config(self, tiny_config: dict[str, Any]) -> dict[str, Any]:
        engine = {"name": "local", "dtype": "bfloat16"}
        return tiny_config | {"max_steps": 2, "eval_steps": None, "reward_funcs": REWARDS, "engine": engine}

    def types(self, directory: Path) -> tuple[set[torch.dtype], str]:
        """Of the weights, and in config.json."""
        state = load_file(directory / "model.safetensors")
        return {tensor.dtype for tensor in state.values()}, json.loads((directory / "config.json").read_text())["dtype"]

    @pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["full", "lora"])
    def test_a_bfloat16_model_is_saved_in_bfloat16(
        self, half: Path, config: dict[str, Any], tmp_path: Path, lora: Any
    ) -> None:
        trainer = Trainer(config=config | {"model": str(half), "lora": lora})
        assert trainer.config.save_dtype == "bfloat16"
        with trainer:
            trainer.step()
            trainer.save_model(tmp_path / "now")
            trainer.step()
        run = tmp_path / "run"
        assert self.types(run / "model") == self.types(tmp_path / "now") == ({torch.bfloat16}, "bfloat16")
        saved = run / "checkpoints" / "step-000002" / "model"
        name = "model.safetensors" if lora is None else "adapter_model.safetensors"
        state = load_file(saved / name)
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
        if lora is None:
            end = load_file(run / "model" / name)
            assert all(torch.equal(tensor, state[n].bfloat16()) for n, tensor in end.items())
        assert Trainer.resume(run).config.save_dtype == "bfloat16"
        Trainer.resume(run, {"save_dtype": "float32"}).finish()
        assert self.types(run / "model") == ({torch.float32}, "float32")

    def test_what_was_sampled_in_float32_is_saved_in_it(
        self, half: Path, config: dict[str, Any], tmp_path: Path
    ) -> None:
        """Rounded to bfloat16 a model loses what a few steps have changed, and is not the one that was evaluated."""
        Trainer(config=config | {"model": str(half), "engine": "local"}).train()
        run = tmp_path / "run"
        assert self.types(run / "model") == ({torch.float32}, "float32")
        saved = load_file(run / "checkpoints" / "step-000002" / "model" / "model.safetensors")
        assert all(torch.equal(t, saved[name]) for name, t in load_file(run / "model" / "model.safetensors").items())
        given = Trainer(
            config=config
            | {"model": str(half), "engine": "local", "save_dtype": "bfloat16"}
            | {"output_dir": str(tmp_path / "other")}
        )
        assert given.config.save_dtype == "bfloat16"
        given.close()

    def test_every_parameter_keeps_its_own_type_and_patterns_choose(
        self, half: Path, config: dict[str, Any], tmp_path: Path
    ) -> None:
        file = half / "model.safetensors"
        state = {n: t.float() if "norm" in n else t for n, t in load_file(file).items()}
        save_file(state, file, metadata={"format": "pt"})
        for key, expected in (
            ({}, {n: t.dtype for n, t in state.items()}),
            (
                {"save_dtype": {"*": "float16", "*.mlp.*": "float32"}},
                {n: torch.float32 if ".mlp." in n else torch.float16 for n in state},
            ),
        ):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            Trainer(config=config | {"model": str(half)} | key).train()
            end = load_file(tmp_path / "run" / "model" / "model.safetensors")
            assert {n: t.dtype for n, t in end.items()} == expected

    def test_a_pattern_that_matches_no_tensor_is_refused(self, half: Path, config: dict[str, Any]) -> None:
        changes = {"model": str(half), "save_dtype": {"*": "bfloat16", "*.norms.*": "float32"}}
        with pytest.raises(ConfigError, match=r"save_dtype: no tensor of the model is called '\*.norms.\*'. One is"):
            Trainer(config=config | changes)

    def test_tensors_of_the_files_that_the_model_lacks_have_no_type(
        self, half: Path, config: dict[str, Any], tmp_path: Path
    ) -> None:
        """As in older files of Llama; the run's model can be evaluated."""
        file = half / "model.safetensors"
        stray = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        save_file(load_file(file) | stray, file, metadata={"format": "pt"})
        trainer = Trainer(config=config | {"model": str(half)})
        assert trainer.config.save_dtype == "bfloat16"
        trainer.train()
        assert evaluate_model(str(tmp_path / "run"), {"eval_prompts": 2, "eval_generations": 1})["prompts"] == 2

    def test_an_object_is_trained_in_float32_and_saved_as_it_was_given(
        self, half: Path, config: dict[str, Any], tmp_path: Path
    ) -> None:
        """A learning rate of 1e-6 moves no bfloat16 weight."""
        model = AutoModelForCausalLM.from_pretrained(half, dtype=torch.bfloat16)
        trainer = Trainer(model=model, config=config, processing_class=load_tokenizer(half))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        trainer.train()
        assert self.types(tmp_path / "run" / "model") == ({torch.bfloat16}, "bfloat16")
        again = Trainer.resume(tmp_path / "run", model=model, processing_class=load_tokenizer(half))
        assert again.config.save_dtype == "bfloat16"
        again.close()

    def test_what_float16_cannot_hold_is_refused_and_nothing_is_lost(
        self, tiny_model: Path, config: dict[str, Any], tmp_path: Path
    ) -> None:
        large = load_causal_lm(tiny_model, CPU)
        with torch.no_grad():
            large.model.norm.weight.fill_(1e5)
            large.model.embed_tokens.weight.mul_(1e-5)
        large.save_pretrained(tmp_path / "large")
        load_tokenizer(tiny_model).save_pretrained(tmp_path / "large")
        settings = config | {"model": str(tmp_path / "large"), "save_dtype": "float16", "learning_rate": 0.0}
        with pytest.raises(ConfigError, match=r"save_dtype: float16 cannot hold model.norm.weight \(up to 1e\+05\)"):
            Trainer(config=settings).train()
        Trainer.resume(tmp_path / "run", {"save_dtype": "bfloat16"}).train()
        assert self.types(tmp_path / "run" / "model") == ({torch.bfloat16}, "bfloat16")

    def test_uploads_of_checkpoints_have_it_too(
        self, half: Path, adapter: Path, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = {}

        class Api:
            def __init__(self, **_: Any) -> None: ...

            def create_repo(self, name: str, **_: Any) -> Any:
                return SimpleNamespace(repo_id=name)

            def upload_folder(self, folder_path: Path, commit_message: str, **_: Any) -> Any:
                for file in folder_path.glob("*.safetensors"):
                    found[commit_message.split()[0], file.name] = {t.dtype for t in load_file(file).values()}
                return SimpleNamespace(commit_url="")

        monkeypatch.setattr("huggingface_hub.HfApi", Api)
        monkeypatch.setenv("HF_TOKEN", "none")
        push = {"push_to_hub": True, "hub_strategy": "every_save", "hub_model_id": "me/x", "max_steps": 1}
        Trainer(config=config | push | {"model": str(half)}).train()
        assert found == {
            ("Step", "model.safetensors"): {torch.bfloat16},
            ("Upload", "model.safetensors"): {torch.bfloat16},
        }
        found.clear()
        lora = {"model": str(adapter), "lora": {"resume": True}, "output_dir": str(tmp_path / "lora")}
        tensors = {n: t.half() for n, t in load_file(adapter / "adapter_model.safetensors").items()}
        save_file(tensors, adapter / "adapter_model.safetensors")
        changed(adapter, base_model_name_or_path=str(half))
        Trainer(config=config | push | lora).train()
        assert found == {
            ("Step", "adapter_model.safetensors"): {torch.float16},
            ("Upload", "model.safetensors"): {torch.bfloat16},
        }

    def test_a_warm_start_keeps_it(self, half: Path, tmp_path: Path) -> None:
        task = CountdownConfig(train_size=8, test_size=4).build()
        config = WarmStartConfig(model=str(half), max_steps=1, batch_size=2, warmup_steps=0, threads=1)
        warm_start(task, tmp_path / "taught", config=config)
        assert self.types(tmp_path / "taught") == ({torch.bfloat16}, "bfloat16")
