"""Upper bounds of what a step asks of a GPU: bytes, kernel launches and waits, counted on a pretended device."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.pretend_cuda import PretendCuda
from winnow.engine.facts import Facts
from winnow.engine.local.cache import Chunk, KVCache
from winnow.engine.local.hf import make_backend
from winnow.learner.local import recompute
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.methods.correct import Correction, Truncate
from winnow.methods.correct.mask import Mask
from winnow.methods.loss import LossConfig

from ..builders.cuda import BF16, VOCAB, qwen3, rows_of
from .engine_models import word_tokenizer


def test_a_layer_of_a_decode_step_moves_little_more_than_its_weights_and_cache() -> None:
    """Shapes of Qwen3-0.6B, 64 rows of 128 columns; a launch counts bytes that the card's cache may have, too."""
    n, columns, moved = 64, 128, []
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    for layers in (1, 2):
        config = Qwen3Config(**sizes, num_hidden_layers=layers, head_dim=128, vocab_size=VOCAB)
        model = Qwen3ForCausalLM(config).eval()
        with PretendCuda() as gpu, torch.inference_mode():
            backend = make_backend(model, Facts.from_model(model, word_tokenizer(VOCAB)), "bfloat16", "cuda")
            cache = KVCache(backend.kv_shapes, n, torch.bfloat16, torch.device("cuda"))
            cache.reserve(n, columns)
            tokens = torch.arange(n, device="cuda")
            gpu.clear()
            backend.decode(tokens, tokens + columns - n, cache, [Chunk(0, n, columns)])
            moved.append(gpu.traffic)
    weights = 2 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    kept = 2 * 2 * n * columns * 8 * 128
    assert weights + kept <= moved[1] - moved[0] <= 1.3 * (weights + kept)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_starts_few_kernels_and_waits_once(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody makes it slower unseen: kernels of a layer, of the rest of a micro-batch, and of the optimizer.

    Passes over prefix trees do not wait for the device; the statistics of all come in one transfer.
    """
    monkeypatch.setattr(recompute, "WORTH", 0)
    counts = []
    for layers in (2, 3):
        with PretendCuda() as gpu:
            options = LearnerOptions(tokens_per_microbatch=512, gradient_checkpointing=checkpointing, **BF16)
            learner = LocalLearner(qwen3(layers=layers).to("cuda"), TokenDistribution(VOCAB), options)
            rows, kernels = rows_of(6, 4), []
            for _ in range(2):
                gpu.clear()
                learner.accumulate(rows, LossConfig(), 0)
                kernels = [sum(gpu.launches.values())]
                passes = len(learner._batches)
                assert passes > 1
                assert all(batch.trees is not None for batch in learner._batches)
                assert sum(n for (where, _), n in gpu.syncs.items() if "batch.py" not in where) == 1, gpu.report()
                gpu.clear()
                learner.apply(1e-3)
                kernels.append(sum(gpu.launches.values()))
            counts.append(kernels)
    (smaller, step), (larger, _) = counts
    of_layer = (larger - smaller) / passes
    assert of_layer <= (295 if checkpointing else 250)
    assert (smaller - 2 * of_layer * passes) / passes <= 220
    assert step <= 12


@pytest.mark.parametrize("correction", [Truncate(), Truncate(level="token"), Mask(only_negative=True)])
def test_a_correction_waits_for_no_micro_batch(correction: Correction) -> None:
    with PretendCuda() as gpu:
        options = LearnerOptions(tokens_per_microbatch=512, **BF16)
        learner = LocalLearner(qwen3(layers=1).to("cuda"), TokenDistribution(VOCAB), options)
        rows, loss = rows_of(6, 4), LossConfig(correction=correction)
        learner.accumulate(rows, loss, 0)
        gpu.clear()
        learner.accumulate(rows, loss, 0)
        assert len(learner._batches) > 1
        assert sum(n for (where, _), n in gpu.syncs.items() if "batch.py" not in where) == 1, gpu.report()
