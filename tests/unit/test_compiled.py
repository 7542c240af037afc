"""`torch_compile`: the same numbers as without, in few graphs; block masks of prefix trees are their dense masks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch.nn.attention import flex_attention as flex

from winnow.learner.adapters import adapted
from winnow.learner.base import Policy
from winnow.learner.batch import PassLimits, collate
from winnow.learner.context import LearnerContext
from winnow.learner.fsdp.learner import Fsdp
from winnow.learner.local import compiled, logprob
from winnow.learner.local.forward import predictions
from winnow.learner.local.learner import LearnerOptions, Local, LocalLearner
from winnow.learner.local.logprob import TokenDistribution, token_logp
from winnow.learner.local.reference import frozen_copy
from winnow.methods.loss import LossConfig
from winnow.run.budget import Shapes

from ..builders.cuda import LORA, VOCAB, qwen3, rows_of
from .engine_models import word_tokenizer


@pytest.fixture
def few_tokens_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BLOCK", 16)


@pytest.fixture
def with_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU flex attention has a backward pass where it is not compiled to C++, but refuses it."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(compiled, "SPARSE_ON", frozenset({"cpu"}))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions are traced forward and backward, and run without code being generated for them."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    compiled.compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    compiled.compiled.cache_clear()
    torch._dynamo.reset()


def test_a_block_mask_is_the_dense_mask_by_blocks(few_tokens_a_block: None) -> None:
    trees = collate(rows_of(5, 4), 0, limits=PassLimits(pairs=math.inf)).trees
    assert trees is not None
    mask: Any = compiled.block_mask(trees)
    S = trees.stop_US.shape[1]
    seen = trees.mask(torch.float64)[0, 0] == 0
    kinds = set()
    for q, queries in enumerate(torch.arange(S).split(16)):
        partly = mask.kv_indices[0, 0, q, : mask.kv_num_blocks[0, 0, q]].tolist()
        whole = mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist()
        for k, keys in enumerate(torch.arange(S).split(16)):
            block = seen[queries][:, keys]
            kind = "whole" if block.all() and k < q else "partly" if block.any() else "hidden"
            assert (k in whole, k in partly) == (kind == "whole", kind == "partly"), (q, k)
            kinds.add(kind)
    assert kinds == {"whole", "partly", "hidden"}


@pytest.mark.parametrize("heads", [2, 6])
def test_attention_by_blocks_is_that_under_the_dense_mask(
    heads: int, with_backward: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compiled", lambda function: function)
    trees = collate(rows_of(), 0, limits=PassLimits(pairs=math.inf)).trees
    assert trees is not None
    U, S = trees.stop_US.shape
    torch.manual_seed(0)
    query, key, value = (torch.randn(U, n, S, 16, dtype=torch.float64, requires_grad=True) for n in (heads, 2, 2))
    results = []
    for mask in (trees.mask(torch.float64), compiled.block_mask(trees)):
        module: Any = torch.nn.Module()
        module.num_key_value_groups = heads // 2
        states, _ = compiled.tree_attention(module, query, key, value, mask, scaling=0.3)
        results.append((states, *torch.autograd.grad(states.square().sum(), (query, key, value))))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "full": ({}, 4),
    "checkpointing": ({"gradient_checkpointing": True}, 4),
    "lora": ({"lora": True}, 5),
    "kl and entropy": ({"reference": True, "loss": LossConfig(beta=0.1, entropy_coef=0.01)}, 5),
}
"""Options of the learner, and the graphs that are compiled."""


def learner_of(*, lora: bool = False, reference: bool = False, **options: Any) -> LocalLearner:
    model = qwen3().double()
    kept = frozen_copy(model) if reference else None
    if lora:
        torch.manual_seed(1)
        model = adapted(model, LORA, None, None, word_tokenizer(VOCAB), keep_reference=False).model.double()
    return LocalLearner(model, TokenDistribution(VOCAB, temperature=0.7), LearnerOptions(**options), kept)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(KINDS))
def test_a_compiled_update_computes_the_same(
    name: str,
    traced: None,
    with_backward: None,
    few_tokens_a_block: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(logprob.SLICE_ELEMENTS, "cpu", 1 << 14)
    options, graphs = dict(KINDS[name][0]), KINDS[name][1]
    loss = options.pop("loss", LossConfig())
    plain, ours = learner_of(**options), learner_of(torch_compile=True, **options)
    for groups in (3, 2):
        rows = rows_of(groups)
        stats = [learner.accumulate(rows, loss) for learner in (plain, ours)]
        assert stats[1].sums == pytest.approx(stats[0].sums)
        for a, b in zip(plain._params.values(), ours._params.values(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-5 * float(a.grad.abs().max()))
        assert ours.apply(1e-3) == pytest.approx(plain.apply(1e-3))
        for a, b in zip(plain.logp(rows), ours.logp(rows), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    assert ours._by_blocks
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs, "for all layers and sizes: a layer and the head, both ways"
    ours.save(tmp_path)
    ours.load(tmp_path)
    ours.export(tmp_path / "whole")
    assert "winnow_trees" not in (tmp_path / "whole" / "config.json").read_text()


def kept_by_compiled_layers(states: torch.Tensor) -> float:
    """Return the bytes a token that compiled functions keep for their backward passes."""
    held: dict[int, int] = {}
    nodes, seen, tokens = [states.grad_fn], set(), states.shape[1]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        if type(node).__name__ == "CompiledFunctionBackward":
            own = [x for x in node.saved_tensors if x.shape.count(tokens) == 1]  # neither weights nor the mask
            held |= {x.data_ptr(): x.numel() * x.element_size() for x in own}
    return sum(held.values()) / tokens


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_generated_code_is_few_kernels_and_keeps_little() -> None:
    """A layer's and the head's, both ways; of a layer the 21 products and 2 of attention are not among them."""
    torch._dynamo.reset()
    compiled.compiled.cache_clear()
    plain, ours = qwen3(layers=1), qwen3(layers=1)
    compiled.compile_layers(ours)
    rows, head, kernels = rows_of(), TokenDistribution(VOCAB), []
    batch = collate(rows, 0, limits=PassLimits(pairs=math.inf))
    gradients = []
    for model in (plain, ours):
        metrics.reset()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden: list[torch.Tensor] = []

            def body(model: Any = model, hidden: list[torch.Tensor] = hidden, **inputs: Any) -> torch.Tensor:
                hidden.append(model.model(**inputs).last_hidden_state)
                return hidden[0]

            states, state_N = predictions(body, batch, torch.bfloat16)
            held = kept_by_compiled_layers(hidden[0])
            states.sum().backward()
            kernels.append(metrics.generated_kernel_count)
            targets_N, leaf = batch.sampled(batch.input_ids_BT[:, 1:]), states.detach().requires_grad_()
            logp, _, _ = token_logp(leaf, model.lm_head, targets_N, head, state_N=state_N, fused=model is ours)
            logp.sum().backward()
        kernels.append(metrics.generated_kernel_count)
        gradients.append([p.grad for p in model.parameters()] + [logp])
    predicted = Shapes.from_model(ours, None).kept_by_layer(True, recomputed=True, lora=False)
    assert 0 < held < 1.1 * predicted, "bytes a token; attention by blocks does not repeat keys and values as this one"
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0.03 * float(a.abs().max()))
    assert kernels[2] <= 70
    assert kernels[3] - kernels[2] <= 14


@pytest.mark.parametrize(("baselines", "what"), [(True, "advantage: opob"), (False, "deterministic: true")])
def test_what_cannot_be_compiled_is_refused_by_name(baselines: bool, what: str) -> None:
    options = LearnerOptions(torch_compile=True, deterministic=not baselines)
    context, policy = LearnerContext(options, "cpu", gradient_baselines=baselines), Policy(qwen3(), None, None)
    with pytest.raises(ValueError, match=f"torch_compile: does not work with {what}; set it to false"):
        Local().build(policy, context)
    with pytest.raises(ValueError, match="learner: fsdp does not compile"):
        Fsdp().build(policy, context)


def test_a_model_without_layers_of_transformers_is_refused() -> None:
    with pytest.raises(ValueError, match="torch_compile: Linear marks no decoder layers"):
        compiled.compile_layers(torch.nn.Linear(2, 2))
