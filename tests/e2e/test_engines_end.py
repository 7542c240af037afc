"""An engine that holds more than this process's memory, as vLLM does, is closed with the run that built it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from winnow import ConfigError, Trainer
from winnow.config import validate
from winnow.engine.local.engine import LocalEngine
from winnow.env.prompting import encode_prompt
from winnow.integrations import trl_engine
from winnow.integrations.trl_engine import EngineInTrl, TrlModel, longest_sequence
from winnow.run.resolved import Options
from winnow.run.standalone import evaluate_model
from winnow.tasks.countdown import Countdown, CountdownConfig
from winnow.types import Prompt

from .. import parity

REWARDS = {"reward_funcs": [f"{parity.__file__}:parity_reward"]}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Engines of this test that were closed; the embedded one has nothing to close by itself."""
    found: list[Any] = []
    monkeypatch.setattr(LocalEngine, "close", lambda self: found.append(self), raising=False)
    return found


def test_a_run_its_resume_and_an_evaluation_close_theirs(tiny_config: dict[str, Any], closed: list[Any]) -> None:
    trainer = Trainer(config=tiny_config | REWARDS | {"max_steps": 1})
    trainer.train()
    assert closed == [trainer.engine]
    with pytest.raises(ConfigError, match=r"evaluate: what samples has ended with the run; run `winnow eval .*run`"):
        trainer.evaluate()
    resumed = Trainer.resume(tiny_config["output_dir"], {"max_steps": 2})
    resumed.train()
    assert closed == [trainer.engine, resumed.engine]
    evaluate_model(tiny_config["output_dir"], {})
    assert len(closed) == 3


def test_inside_trl_it_ends_with_the_training_and_a_resume_has_another(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset

    from winnow.integrations.trl import WinnowGRPOTrainer

    from ..builders.trl_runs import parity as reward
    from ..builders.trl_runs import settings

    closed: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEngine, "close", lambda self: closed.append(self), raising=False)
        rows = Dataset.from_list([{"prompt": f"{1 + i % 6} {1 + i // 6} 2", "row": i} for i in range(24)])
        args = settings(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
        given = {"model": str(tiny_model), "reward_funcs": reward, "train_dataset": rows, "args": args}
        trainer = WinnowGRPOTrainer(**given, engine="local")
        trainer.train()
        assert len(closed) == 1
        args.max_steps = 3
        trainer.train(resume_from_checkpoint=True)
        assert len(closed) == 2
        assert closed[0] is not closed[1]
    assert trainer.state.global_step == 3


class Asking(Countdown):
    """An environment that asks more than its prompts."""

    def make_env(self, prompt: Prompt) -> Any:
        return object()


def test_inside_trl_vllm_gets_the_longest_prompt_and_completion(tiny_model: Path) -> None:
    """Or TRL's own limit; None, which is what memory has room for, where an environment decides."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    trainer = SimpleNamespace(args=SimpleNamespace(vllm_max_model_length=None))
    task = CountdownConfig(train_size=32, test_size=4).build()
    c = validate({"model": "m", "env": "countdown", "max_completion_length": 24})
    longest = max(len(encode_prompt(tokenizer, prompt)) for prompt in task.train)
    assert longest_sequence(trainer, c, task, tokenizer) == longest + 24
    asking = Asking.__new__(Asking)
    vars(asking).update(vars(task))
    assert longest_sequence(trainer, c, asking, tokenizer) is None
    trainer.args.vllm_max_model_length = 99
    assert longest_sequence(trainer, c, asking, tokenizer) == 99


@pytest.mark.parametrize(("engine", "copied"), [("vllm", False), ("local", True)])
def test_inside_trl_only_the_embedded_engine_copies_a_model_with_adapters(
    monkeypatch: pytest.MonkeyPatch, engine: str, copied: bool
) -> None:
    """vLLM reads the files of the model that they are on."""
    given: list[Any] = []
    monkeypatch.setattr(trl_engine, "RolloutRunner", lambda *parts: None)
    monkeypatch.setattr(trl_engine, "rollout_options", lambda c: None)
    monkeypatch.setattr(TrlModel, "merged", lambda self: "a copy")
    model = SimpleNamespace(config=SimpleNamespace(name_or_path="models/base"))
    trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model))
    made = EngineInTrl.__new__(EngineInTrl)
    config = validate({"model": "m", "env": "countdown", "engine": engine})
    options = SimpleNamespace(build=lambda reference, tokenizer: given.append(reference))
    vars(made).update(model=TrlModel(trainer), _config=config, _options=options, _device=torch.device("cpu"))
    vars(made).update(_tokenizer=None, _task=None)
    made._open([])
    assert (given[0].loaded, given[0].source) == (("a copy", "") if copied else (None, "models/base"))


def test_inside_trl_cudnn_plans_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare() -> None:
        raise InterruptedError

    monkeypatch.setattr(trl_engine, "prepare_cuda", prepare)
    monkeypatch.setattr(trl_engine, "check_engine", lambda trainer: None)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cuda")))
    c = validate({"model": "m", "env": "countdown"})
    with pytest.raises(InterruptedError):
        EngineInTrl(trainer, c, Options.from_config(c), CountdownConfig(train_size=8, test_size=4).build(), ())
