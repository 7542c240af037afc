"""Optimizers by name: the same as the class they stand for, states of fewer bits where rounding does not show, and
resumed bit by bit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.optimization import Adafactor

from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.config.settings_yaml import load_yaml
from winnow.learner.fsdp.learner import Fsdp
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.optimizer import make_optimizer
from winnow.methods.loss import LossConfig
from winnow.run.resolved import Options, learner_context

from .learner_models import random_rows

LOW_BIT = ["adamw_torch_8bit", "adamw_torch_4bit"]
V = 64


@pytest.fixture
def eager() -> Iterator[None]:
    """torchao compiles its step for each shape, which takes minutes and changes nothing of what is tested here."""
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


EVERY = [
    ("adamw_torch", {}),
    ("adamw_torch", {"amsgrad": True}),
    ("adamw_torch_fused", {}),
    *[(name, {}) for name in LOW_BIT],
    ("adafactor", {}),
    ("adafactor", {"beta1": 0.9, "scale_parameter": True}),
    ("muon", {}),
    ("muon", {"momentum": 0.9, "adjust_lr_fn": "original"}),
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
]


def learner_of(model: Any, optim: str, **args: Any) -> LocalLearner:
    return LocalLearner(model, TokenDistribution(V), LearnerOptions(optim=optim, weight_decay=0.1, optim_args=args))


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, bos_token_id=None, eos_token_id=None, **sizes))


def steps(learner: LocalLearner, n: int, lr: float = 1e-3) -> torch.Tensor:
    """All weights after n updates on the same rows."""
    rows = random_rows(n=6)
    for _ in range(n):
        learner.accumulate(rows, LossConfig())
        learner.apply(lr)
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


def state_bytes(learner: LocalLearner) -> int:
    states = [value for state in learner.optimizer.state.values() for value in state.values()]
    parts = [[getattr(s, part) for part in getattr(s, "tensor_attrs", [])] or [s] for s in states]
    return sum(tensor.nbytes for tensors in parts for tensor in tensors)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("optim", "share", "off"), [(LOW_BIT[0], 0.32, 0.02), (LOW_BIT[1], 0.2, 0.3)])
def test_the_first_step_is_adamws_and_later_ones_nearly(
    model: LlamaForCausalLM, optim: str, share: float, off: float
) -> None:
    whole, low = (learner_of(copy.deepcopy(model), name) for name in ("adamw_torch_fused", optim))
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(steps(low, 1), steps(whole, 1))
    assert state_bytes(low) < share * state_bytes(whole)
    expected, found = steps(whole, 4), steps(low, 4)
    difference = float((found - expected).norm() / (expected - start).norm())
    assert 0 < difference < off


@pytest.mark.cases(one_in=3)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("optim", "args"), EVERY)
def test_a_resume_is_exact(model: LlamaForCausalLM, optim: str, args: dict[str, Any], tmp_path: Path) -> None:
    learner = learner_of(model, optim, **args)
    steps(learner, 2)
    learner.save(tmp_path)
    resumed = learner_of(LlamaForCausalLM.from_pretrained(tmp_path / "model"), optim, **args)
    resumed.load(tmp_path)
    if optim != "adafactor":  # numbers among its states
        assert state_bytes(resumed) == state_bytes(learner)
    before = torch.cat([p.detach().flatten() for p in resumed.model.parameters()])
    after = steps(resumed, 2, lr=5e-4)
    assert torch.equal(after, steps(learner, 2, lr=5e-4))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "muon"])
def test_a_parameter_that_had_no_gradient_resumes_without_a_state(
    model: LlamaForCausalLM, optim: str, tmp_path: Path
) -> None:
    """As those of a model's tower for pictures, which rollouts of text never run."""
    model.model.tower = tower = torch.nn.Linear(V, V)
    learner = learner_of(model, optim)
    steps(learner, 2)
    learner.save(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    again.model.tower = copy.deepcopy(tower)
    resumed = learner_of(again, optim)
    resumed.load(tmp_path)
    assert torch.equal(steps(resumed, 2), steps(learner, 2))
    assert not any(parameter in resumed.optimizer.state for parameter in again.model.tower.parameters())


def as_written(name: str, model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """The optimizers that a name stands for, made by hand."""
    if name == "adafactor":
        options = {"scale_parameter": False, "relative_step": False, "weight_decay": 0.1}
        return [Adafactor(model.parameters(), lr=1e-3, **options)]
    if name == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=0.1)]
    if name == "adamw_torch":
        return [torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)]
    matrices = [p for n, p in model.named_parameters() if n.endswith("_proj.weight")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("_proj.weight")]
    assert len(matrices) == 14
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.1, fused=True)]


@pytest.mark.parametrize("name", ["adafactor", "sgd", "adamw_torch", "muon"])
def test_it_is_the_class_of_that_name_on_clipped_gradients(model: LlamaForCausalLM, name: str) -> None:
    other = copy.deepcopy(model)
    theirs, gradients = as_written(name, other), learner_of(other, "sgd")
    for _ in range(3):
        gradients.accumulate(random_rows(n=6), LossConfig())
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    expected = torch.cat([p.detach().flatten() for p in other.parameters()])
    assert torch.equal(steps(learner_of(model, name), 3), expected)


@pytest.mark.parametrize("name", ["adafactor", "sgd", "muon"])
def test_the_step_is_proportional_to_the_rate(model: LlamaForCausalLM, name: str) -> None:
    """Which is what `step_scale: ess` changes, whatever the optimizer. Without weight decay, which adds to it."""
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    whole, half = (steps(learner_of(copy.deepcopy(model), name), 1, lr=rate) - start for rate in (2e-3, 1e-3))
    assert float((half - whole / 2).norm() / whole.norm()) < 1e-3


def test_muon_trains_adapters_too(model: LlamaForCausalLM, tmp_path: Path) -> None:
    adapted = get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    learner = learner_of(adapted, "muon")
    assert isinstance(learner.optimizer, torch.optim.Muon)
    before = {n: p.detach().clone() for n, p in adapted.named_parameters()}
    steps(learner, 2)
    changed = {n for n, p in adapted.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if "lora_" in n}
    learner.save(tmp_path)
    learner_of(adapted, "muon").load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": "sgd", "adam_beta1": 0.8}, "adam_beta1: 0.8 has no effect with optim: sgd; remove it"),
        ({"optim": "adafactor", "adam_epsilon": 1e-6}, "adam_epsilon: 1e-06 has no effect with optim: adafactor"),
        ({"optim": "lion_8bit"}, "optim: .*'adafactor'"),
        ({"optim_args": "momentum=["}, "optim_args: .*are not valid YAML"),
        ({"optim_args": "momentum"}, "optim_args: .*expected `key=value, ...` or a section, not 'momentum'"),
    ],
)
def test_settings_without_effect_or_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate({"model": "m", "env": "countdown"} | settings)


def test_arguments_as_text_are_those_of_a_section() -> None:
    good = {"model": "m", "env": "countdown", "optim": "sgd"}
    section = validate(good | {"optim_args": {"momentum": load_yaml("9e-1"), "nesterov": True}})
    assert validate(good | {"optim_args": "momentum=9e-1, nesterov=true"}).optim_args == section.optim_args
    assert section.optim_args == {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("optim", "args", "message"),
    [
        ("sgd", {"momentun": 0.9}, "optim_args: optim: sgd has no 'momentun' here; it has dampening, momentum, nest"),
        ("adafactor", {"lr": 0.9}, "has no 'lr' here; .*keys of their own are learning_rate"),
        ("adafactor", {"clip_threshold": "a"}, "clip_threshold must be a number, true or false, not 'a'"),
        ("sgd", {"nesterov": True}, "optim_args: Nesterov momentum requires a momentum"),
        ("muon", {"adjust_lr_fn": "no"}, "optim_args: Adjust learning rate function no is not supported"),
    ],
)
def test_arguments_that_it_does_not_have(
    model: LlamaForCausalLM, optim: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        learner_of(model, optim, **args)


def test_muon_needs_matrices(model: LlamaForCausalLM) -> None:
    ends = [model.get_input_embeddings().weight]
    with pytest.raises(ValueError, match="optim: muon trains matrices of layers, and none is trained here"):
        make_optimizer("muon", {"embed": ends[0]}, ends=ends)


@pytest.mark.usefixtures("eager")
def test_states_of_other_bits_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    learner = learner_of(model, LOW_BIT[0])
    steps(learner, 1)
    learner.save(tmp_path)
    for optim in ("adamw_torch_fused", LOW_BIT[1], "muon", "adafactor", "sgd"):
        with pytest.raises(ValueError, match=r"optimizer.safetensors: not of this optim and model; differs in"):
            learner_of(model, optim).load(tmp_path)


def test_what_is_missing_is_named(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match=r"optim: adamw_torch_8bit needs torchao; pip install .*\[torchao\]'"):
        make_optimizer(LOW_BIT[0], dict(model.named_parameters()))


@pytest.mark.parametrize("optim", [LOW_BIT[1], "adafactor", "muon", "sgd"])
def test_ranks_refuse_it(optim: str) -> None:
    c = validate({"model": "m", "env": "countdown", "optim": optim})
    with pytest.raises(ValueError, match=f"learner: fsdp has no optim: {optim}: its ranks cut AdamW's states"):
        Fsdp().build(None, learner_context(c, Options.from_config(c)))  # type: ignore[arg-type]
