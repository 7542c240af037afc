"""The learner against brute force: log-probabilities, gradients, adapters, the engine's own numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from winnow.engine.base import SamplingParams
from winnow.engine.local.engine import LocalEngine
from winnow.learner.base import Stats
from winnow.learner.batch import PASS_TOKENS, PassLimits, collate, micro_batches
from winnow.learner.local import logprob
from winnow.learner.local.eval_mode import halve_frozen
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution, token_logp
from winnow.learner.local.merged import MergedWeights
from winnow.learner.rows import Row
from winnow.methods.correct.truncate import Truncate
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import POLICY_LOSSES, Plain
from winnow.study.warm_start import word_tokenizer

from .learner_models import (
    VOCABULARY,
    WORDS,
    assert_engine_agrees,
    assert_equal,
    gemma2,
    gradients,
    learner_of,
    llama,
    naive_logp,
    random_rows,
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer([f"w{i}" for i in range(WORDS)], max_positions=64)


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("rows_a_chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.9}])
def test_chunked_log_softmax_is_the_naive_one_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, rows_a_chunk: int, bias: bool, options: dict[str, float]
) -> None:
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", rows_a_chunk * VOCABULARY)
    monkeypatch.setattr(logprob, "SLICE_ELEMENTS", {"cpu": 20 * rows_a_chunk})
    torch.manual_seed(0)
    hidden = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(8, VOCABULARY + 5, bias=bias, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (20,))
    upstream = torch.randn(2, 20, dtype=torch.float64)
    distribution = TokenDistribution(VOCABULARY, **options)

    logp, entropy, squares = token_logp(hidden, head, targets, distribution)
    (upstream[0] * logp + upstream[1] * entropy).sum().backward()
    ours = [logp.detach(), entropy.detach(), hidden.grad.clone(), head.weight.grad.clone()]
    hidden.grad = head.weight.grad = None

    naive_logp, naive_entropy = naive(head(hidden), targets, **options)
    (upstream[0] * naive_logp + upstream[1] * naive_entropy).sum().backward()
    assert_equal(ours, [naive_logp.detach(), naive_entropy.detach(), hidden.grad, head.weight.grad])
    assert not squares.any(), "nobody asked"


def naive(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row: the allowed set is built in Python, the target always in it."""
    logps, entropies = [], []
    for row, target in zip(logits, targets.tolist(), strict=True):
        scaled = row[:VOCABULARY] / temperature
        order = sorted(range(VOCABULARY), key=lambda v: -scaled[v].item())
        allowed = order[: top_k or VOCABULARY]
        probabilities = torch.softmax(scaled[allowed].detach(), 0).tolist()
        kept, mass = [], 0.0
        for v, p in zip(allowed, probabilities, strict=True):
            if mass >= top_p:
                break
            kept.append(v)
            mass += p
        kept = list(dict.fromkeys([*kept, target]))
        logp = scaled[kept] - torch.logsumexp(scaled[kept], 0)
        logps.append(logp[kept.index(target)])
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logps), torch.stack(entropies)


def test_chunks_in_a_whole_update(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, loss = collate(random_rows(), pad_id=0), LossConfig(entropy_coef=0.1, policy_loss=Plain())
    whole, stats = gradients(llama().double(), [batch], loss)
    monkeypatch.setattr(logprob, "SLICE_ELEMENTS", {"cpu": 4 * VOCABULARY})
    chunked, chunked_stats = gradients(llama().double(), [batch], loss)
    assert_equal(chunked, whole)
    assert chunked_stats.sums == pytest.approx(stats.sums)


# ---------------------------------------------------------------- batches


def test_accumulation_over_micro_batches_is_one_batch() -> None:
    rows, loss = random_rows(n=9), LossConfig(beta=0.1, entropy_coef=0.05)
    together, stats = gradients(
        llama().double(), micro_batches(rows, PassLimits(10_000), pad_id=0), loss, reference=llama().double()
    )
    pieces = micro_batches(rows, PassLimits(30), pad_id=0)
    assert len(pieces) > 3
    apart, apart_stats = gradients(llama().double(), pieces, loss, reference=llama().double())
    assert_equal(apart, together)
    assert apart_stats.sums == pytest.approx(stats.sums)


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_rows_without_signal_change_nothing_when_left_out(policy_loss: str) -> None:
    rows, loss = random_rows(n=8), LossConfig(policy_loss=POLICY_LOSSES[policy_loss]())
    assert loss.only_advantages
    everything, _ = gradients(llama().double(), [collate(rows, pad_id=0)], loss)
    teaching = [row for row in rows if row.advantage != 0]
    assert len(teaching) == 6
    assert_equal(gradients(llama().double(), [collate(teaching, pad_id=0)], loss)[0], everything)


def test_micro_batches_of_ragged_rows_are_hardly_padded() -> None:
    rows = random_rows(n=300)
    for i, row in enumerate(rows):
        row.rollout.token_ids = np.zeros(10 if i % 10 else 400, np.int64)
        row.rollout.action_mask = np.ones(len(row.rollout.token_ids), bool)
        row.rollout.sampler_logp = np.zeros(len(row.rollout.token_ids), np.float32)
    batches = micro_batches(rows, PassLimits(100_000), pad_id=0)
    assert sum(len(b.input_ids_BT) for b in batches) == 300
    assert sum(b.input_ids_BT.numel() for b in batches) <= sum(r.length for r in rows) + len(batches) * PASS_TOKENS
    assert len(batches) <= 5


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_matrix_precision_is_the_updates_alone(precision: str) -> None:
    batch, before = collate(random_rows(), pad_id=0), torch.get_float32_matmul_precision()
    exact, _ = gradients(llama().double(), [batch], LossConfig(policy_loss=Plain()))
    model = llama()
    learner = LocalLearner(model, TokenDistribution(VOCABULARY), LearnerOptions(matmul_precision=precision))
    learner.forward_backward(batch, LossConfig(policy_loss=Plain()), Stats())
    assert torch.get_float32_matmul_precision() == before
    ours = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    theirs = torch.cat([g.flatten() for g in exact])
    assert (ours - theirs).norm() < (1e-4 if precision == "highest" else 0.05) * theirs.norm()


def test_correction_and_clipping_share_the_ratio_between_them() -> None:
    """In a second pass: weight old/sampler, clipped ratio new/old (decoupled PPO), never new/sampler twice."""
    model, batch = llama().double(), collate(random_rows(), pad_id=0)
    batch.sampler_logp_BT = batch.sampler_logp_BT.double()
    learner = learner_of(model)
    old = naive_logp(model, batch)
    batch.sampler_logp_BT[:, 1:] = (old - 0.3) * batch.mask_BT[:, 1:]
    loss = LossConfig(correction=Truncate(level="token", high=100.0))
    learner.forward_backward(batch, loss, Stats())
    learner.apply(1e-2)
    now, stats = naive_logp(model, batch), Stats()
    learner.forward_backward(batch, loss, stats)
    ratio, A = (now - old).exp(), batch.advantages_B[:, None]
    surrogate = np.exp(0.3) * torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    expected = -(surrogate * batch.mask_BT[:, 1:] * batch.row_weight_B[:, None]).sum()
    assert (ratio - 1).abs().max() > 0.01
    assert stats.sums["loss"] == pytest.approx(expected.item(), rel=1e-9)


def test_padding_and_its_token_do_not_matter() -> None:
    rows, loss = random_rows(n=5), LossConfig()
    batched, _ = gradients(llama().double(), [collate(rows, pad_id=0)], loss)
    assert_equal(gradients(llama().double(), [collate(rows, pad_id=7)], loss)[0], batched)
    assert_equal(gradients(llama().double(), [collate([row], pad_id=0) for row in rows], loss)[0], batched)


def test_gradients_that_a_users_module_has_switched_off() -> None:
    rows, loss = random_rows(n=5), LossConfig()
    expected, _ = gradients(llama().double(), [collate(rows, pad_id=0)], loss)
    with torch.no_grad():
        assert_equal(gradients(llama().double(), [collate(rows, pad_id=0)], loss)[0], expected)


def test_a_loss_or_gradient_that_is_not_finite_leaves_the_weights_alone() -> None:
    model = llama()
    learner, before = learner_of(model), copy.deepcopy(model.state_dict())
    bad = Row(random_rows()[0].rollout, float("inf"), 1.0)
    with pytest.raises(FloatingPointError, match="loss"):
        learner.accumulate([bad], LossConfig(policy_loss=Plain()))
    learner.forward_backward(collate(random_rows(), pad_id=0), LossConfig(), Stats())
    next(model.parameters()).grad[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="gradient norm"):
        learner.apply(1e-3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------- adapters


def with_adapters(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def test_lora_trains_adapters_only_and_merges_exactly(tokenizer: Any) -> None:
    base = llama()
    engine = LocalEngine(base, tokenizer)
    before = copy.deepcopy(base.state_dict())
    learner = learner_of(with_adapters(base))
    batch = collate(random_rows(), pad_id=0)
    for _ in range(3):
        learner.forward_backward(batch, LossConfig(policy_loss=Plain(), beta=0.1), Stats())
        learner.apply(1e-2)
    for name, value in learner.model.state_dict().items():
        if "lora_" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(value, before[plain]), name

    merged = llama()
    merged.load_state_dict(learner.weights().state_dict())
    with torch.no_grad():
        expected = learner.model(input_ids=batch.input_ids_BT).logits
        torch.testing.assert_close(merged(input_ids=batch.input_ids_BT).logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, before["model.layers.0.mlp.up_proj.weight"])
    engine.load_weights(learner.weights(), version=3)
    assert_engine_agrees(engine, learner, SamplingParams(12))


def test_adapters_alone_are_what_is_published_and_a_whole_model_what_is_exported(tmp_path: Path) -> None:
    options = LearnerOptions(merge_adapters=False)
    learner = LocalLearner(with_adapters(llama()), TokenDistribution(VOCABULARY), options)
    learner.forward_backward(collate(random_rows(), pad_id=0), LossConfig(policy_loss=Plain()), Stats())
    learner.apply(1e-2)
    alone, whole = learner.weights(), MergedWeights(learner.model.get_base_model())
    layer = learner.model.get_base_model().model.layers[0].self_attn.q_proj
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in alone.specs)
    state = alone.state_dict()
    name = "model.layers.0.self_attn.q_proj"
    delta = state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"] * 2  # alpha / r
    torch.testing.assert_close(whole.state_dict()[f"{name}.weight"], layer.get_base_layer().weight + delta)
    learner.export(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved[f"{name}.weight"], whole.state_dict()[f"{name}.weight"])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_base_that_was_saved_in_bfloat16_stays_so_and_changes_no_number(checkpointing: bool) -> None:
    """Log-probabilities, gradients, published and exported weights are those over a float32 base, bit for bit."""
    found = []
    for half in (False, True):
        options = LearnerOptions(compute_dtype=torch.bfloat16, gradient_checkpointing=checkpointing)
        model = with_adapters(llama().bfloat16().float())
        if half:
            halve_frozen(model)
        learner = LocalLearner(model, TokenDistribution(VOCABULARY), options)
        batch = collate(random_rows(), pad_id=0)
        for _ in range(2):
            learner.forward_backward(batch, LossConfig(policy_loss=Plain(), beta=0.1), Stats())
            gradients = [p.grad.clone() for p in learner.model.parameters() if p.requires_grad]
            learner.apply(1e-2)
        weights = learner.weights()
        state = weights.state_dict()
        assert {name: (spec.shape, spec.dtype) for name, spec in weights.specs.items()} == {
            name: (tuple(tensor.shape), torch.float32) for name, tensor in state.items()
        }
        found.append([learner.batch_logp(batch), *gradients, *state.values()])
        layer = learner.model.get_base_model().model.layers[0]
        assert layer.mlp.up_proj.base_layer.weight.dtype == (torch.bfloat16 if half else torch.float32)
        assert layer.mlp.up_proj.lora_A.default.weight.dtype == torch.float32
        assert layer.input_layernorm.weight.dtype == torch.float32
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_base_that_bfloat16_cannot_hold_stays_whole() -> None:
    model = with_adapters(llama())
    halve_frozen(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# ---------------------------------------------------------------- the engine's numbers


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}]
)
@pytest.mark.parametrize("make", [llama, gemma2])
def test_sampled_tokens_have_the_log_probability_that_the_engine_recorded(
    tokenizer: Any, make: Any, options: dict[str, float]
) -> None:
    model = make()
    engine = LocalEngine(model, tokenizer, max_length=64)
    assert_engine_agrees(engine, learner_of(model, **options), SamplingParams(12, **options))


def test_a_published_update_reaches_the_engine(tokenizer: Any) -> None:
    model = llama(vocab_size=VOCABULARY + 14)
    engine, learner = LocalEngine(model, tokenizer), learner_of(model)
    learner.forward_backward(collate(random_rows(), pad_id=0), LossConfig(policy_loss=Plain()), Stats())
    learner.apply(1e-2)
    engine.load_weights(learner.weights(), version=1)
    assert_engine_agrees(engine, learner, SamplingParams(12))
