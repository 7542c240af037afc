"""Build vLLM with adapters."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnow.base.weights import adapters_of
from winnow.config.options import LoraConfig
from winnow.engine import Finished, LocalEngine, ModelReference
from winnow.engine.loading import peft_config
from winnow.engine.vllm.options import VllmOptions
from winnow.learner.local.merged import MergedWeights

from ..unit.engine_models import PADDED, make_model, word_tokenizer
from .vllm import SMALL_CACHE, WIDE, assert_same, play, requests

peft = pytest.importorskip("peft")


MODELS = {"qwen2-tied": "all-linear", "qwen3": ["q_proj", "v_proj", "down_proj", "lm_head"]}
"""Kind of model, and modules with adapters."""


class Parts:
    """A vLLM engine for adapters, the embedded one for whole weights, and the model with adapters on it."""

    def __init__(self, kind: str, folder: Path, ranks: int = 1) -> None:
        model, tokenizer = make_model(kind, **WIDE), word_tokenizer()
        model.save_pretrained(folder)
        lora = LoraConfig(r=4, alpha=12, target_modules=MODELS[kind], merge=False)
        options = VllmOptions(slots=8, max_length=128, tensor_parallel_size=ranks, args=SMALL_CACHE)
        self.theirs = options.build(ModelReference(str(folder), torch.device("cpu"), adapters=lora), tokenizer)
        self.ours = LocalEngine(copy.deepcopy(model), tokenizer, slots=8, max_length=128)
        self.adapted = peft.get_peft_model(model, peft_config(lora)).eval()

    def draw(self, seed: int) -> dict[str, torch.Tensor]:
        """New adapters on the model."""
        state = adapters_of(self.adapted.get_base_model())
        generator = torch.Generator().manual_seed(seed)
        for tensor in state.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
        return state

    def load(self, engine: Any, version: int) -> None:
        model = self.adapted.get_base_model()
        engine.load_weights(adapters_of(model) if engine is self.theirs else MergedWeights(model), version)

    @torch.no_grad()
    def logp(self, prompt: tuple[int, ...], sampled: np.ndarray) -> np.ndarray:
        """Of each sampled token [T], by peft's own forward pass."""
        ids = torch.tensor([[*prompt, *sampled.tolist()]])
        logits = self.adapted(input_ids=ids).logits[0, len(prompt) - 1 : -1, :PADDED]
        found = torch.log_softmax(logits[:, : self.ours.sequences.facts.vocab_size].float(), -1)
        return found.gather(1, torch.from_numpy(sampled)[:, None])[:, 0].numpy()


@pytest.fixture(scope="module", params=MODELS)
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    made = Parts(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.theirs.close()
    del made
    gc.collect()


def assert_adapters_change_between_steps(parts: Parts) -> None:
    """As merged weights do. Before there are any, nothing is added."""
    assert_same(*(play(engine, requests()) for engine in (parts.theirs, parts.ours)))
    for version, first in ((1, 100), (2, 200)):
        drawn = copy.deepcopy(parts.draw(version))
        script = {3: lambda engine, v=version: parts.load(engine, v)}
        theirs, ours = (play(engine, requests(first), script) for engine in (parts.theirs, parts.ours))
        assert_same(theirs, ours)
        versions = [set(e.versions.tolist()) for e in theirs.values() if isinstance(e, Finished)]
        assert {version - 1, version} in versions
        assert {version} in versions
        assert_same(*(play(engine, requests(first)) for engine in (parts.theirs, parts.ours)))
        for name, tensor in adapters_of(parts.adapted.get_base_model()).items():
            assert torch.equal(tensor, drawn[name]), "they are the learner's"
