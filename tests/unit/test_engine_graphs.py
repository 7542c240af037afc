"""Decode steps as CUDA graphs, on the pretended device, where a graph's replay is the step over the same addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.pretend_cuda import PretendCuda
from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, Request, SamplingParams
from winnow.engine.local import graphs
from winnow.engine.local.graphs import DecodeGraphs

from .engine_models import make_model, word_tokenizer

VOCAB = 60


def requests(count: int, longest: int) -> list[Request]:
    """Prompts and lengths of all sizes."""
    return [
        Request(i, tuple(range(3, 5 + i % 7)), SamplingParams(2 + i * 7 % longest, temperature=1.0), noise_key(0, i))
        for i in range(count)
    ]


def answers(engine: LocalEngine, asked: list[Request]) -> dict[Any, list[int]]:
    engine.submit(asked)
    found = {}
    while engine.pending:
        found |= {event.id: event for event in engine.step() if isinstance(event, Finished)}
    return {id_: event.token_ids.tolist() for id_, event in found.items()}


def engine_of(slots: int, device: str, **options: Any) -> LocalEngine:
    return LocalEngine(make_model("qwen3"), word_tokenizer(VOCAB), slots=slots, device=device, **options)


def captured(engine: LocalEngine) -> DecodeGraphs:
    found = engine._backend._graphs  # type: ignore[attr-defined]
    assert isinstance(found, DecodeGraphs)
    return found


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("slots", [5, 10, 16])
@pytest.mark.parametrize("most", [1, 64])
def test_graphs_sample_what_single_steps_sample(slots: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are taken again, the cache grows during the run, and with `most` 1 nearly no step is a graph."""
    monkeypatch.setattr(graphs, "MOST_GRAPHS", most)
    first, second = requests(20, longest=20), requests(12, longest=90)
    plain = engine_of(slots, "cpu")
    expected = answers(plain, first), answers(plain, second)
    with PretendCuda() as gpu:
        engine = engine_of(slots, "cuda")
        assert (answers(engine, first), answers(engine, second)) == expected
        assert 0 < len(captured(engine)._graphs) <= most
    assert not gpu.mixed, gpu.report()


def test_new_weights_and_a_release_forget_all_graphs() -> None:
    """They read the addresses of the weights that are gone."""
    model, asked = make_model("qwen3", seed=1), requests(12, longest=20)
    other = LocalEngine(model, word_tokenizer(VOCAB), slots=8)
    expected = answers(other, asked)
    with PretendCuda():
        engine = engine_of(8, "cuda")
        answers(engine, asked)
        assert captured(engine)._graphs
        engine.release()
        assert not captured(engine)._graphs
        engine.load_weights(model.to("cuda").state_dict(), 1)
        assert answers(engine, asked) == expected


def test_all_graphs_of_an_engine_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps a workspace of cuBLAS for every stream: 30 publishes took 0.9 GiB on an H100."""
    model, streams, firsts = make_model("qwen3", seed=1), 0, []
    with PretendCuda():
        pretended = graphs.capturing

        def counted(device: torch.device) -> graphs.Capture:
            nonlocal streams
            streams += 1
            capture = pretended(device)

            def noted(step: graphs.Replay, first: bool) -> graphs.Replay:
                firsts.append(first)
                return capture(step, first)

            return noted

        monkeypatch.setattr(graphs, "capturing", counted)
        engine, state = engine_of(8, "cuda"), model.to("cuda").state_dict()
        for version in range(1, 4):
            answers(engine, requests(12, longest=20))
            engine.release()
            engine.load_weights(state, version)
        answers(engine, requests(12, longest=20))
        engine.release()
    assert streams == 1
    assert sum(firsts) == 4  # one pool for each set of weights
    assert firsts[0]


def test_shapes_are_rounded_up_by_an_eighth_at_most() -> None:
    sizes = [graphs._rounded(n, 1 << 20) for n in range(1, 5000)]
    for n, size in enumerate(sizes, 1):
        assert n <= size <= max(16 * -(-n // 16), n * 9 / 8)
    assert sizes == sorted(sizes)
    assert len(set(np.array(sizes)[1024:])) < 25
    assert graphs._rounded(100, 100) == 100
