"""AdamW with states of fewer bits: as the one of 32 bits where rounding does not show, and resumed bit by bit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from winnow.config import validate
from winnow.learner.fsdp.options import Fsdp
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.optimizer import adamw
from winnow.methods.loss import LossConfig

from .learner_models import random_rows

LOW_BIT = ["adamw_torch_8bit", "adamw_torch_4bit"]
V = 64


@pytest.fixture
def eager() -> Iterator[None]:
    """torchao compiles its step for each shape, which takes minutes and changes nothing of what is tested here."""
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


def learner_of(model: LlamaForCausalLM, optim: str) -> LocalLearner:
    return LocalLearner(model, TokenDistribution(V), LearnerOptions(optim=optim, weight_decay=0.1))


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
    states = [value for state in learner._optimizer.state.values() for value in state.values()]
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


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("optim", ["adamw_torch_fused", *LOW_BIT])
def test_a_resume_is_exact(model: LlamaForCausalLM, optim: str, tmp_path: Path) -> None:
    learner = learner_of(model, optim)
    steps(learner, 2)
    learner.save(tmp_path)
    resumed = learner_of(LlamaForCausalLM.from_pretrained(tmp_path / "model"), optim)
    resumed.load(tmp_path)
    assert state_bytes(resumed) == state_bytes(learner)
    assert torch.equal(steps(resumed, 2, lr=5e-4), steps(learner, 2, lr=5e-4))


@pytest.mark.usefixtures("eager")
def test_states_of_other_bits_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    learner = learner_of(model, LOW_BIT[0])
    steps(learner, 1)
    learner.save(tmp_path)
    for optim in ("adamw_torch_fused", LOW_BIT[1]):
        with pytest.raises(ValueError, match=r"optimizer.safetensors: its states are of another kind than this optim"):
            learner_of(model, optim).load(tmp_path)


def test_what_is_missing_is_named(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match=r"optim: adamw_torch_8bit needs torchao; pip install .*\[torchao\]'"):
        adamw(LOW_BIT[0], model.parameters())


def test_ranks_refuse_it() -> None:
    config = validate({"model": "m", "env": "countdown", "optim": LOW_BIT[1]})
    with pytest.raises(ValueError, match="learner: fsdp has no optim: adamw_torch_4bit"):
        Fsdp().build(None, config)  # type: ignore[arg-type]
