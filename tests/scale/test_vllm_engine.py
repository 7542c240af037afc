"""The vLLM engine beside the embedded one: the same tokens, reports and log-probabilities, come what may."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow.base.errors import ConfigError
from winnow.base.noise import noise_key
from winnow.engine import CAPABILITIES, Finished, LocalEngine, ModelReference, Request, SamplingParams
from winnow.engine.vllm.options import VllmOptions

from ..builders.vllm import SMALL_CACHE, WIDE, assert_same, build, play, requests
from ..unit.engine_models import make_model, word_tokenizer

pytest.importorskip("vllm")

MODELS = (("qwen2-tied", 2), ("qwen2-tied", 1), ("qwen3", 1), ("llama-tied", 1))
"""Kind of model, and how many processes each of its layers is cut among; the last engine is there until the end."""


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0]}-{p[1]}")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    name, ranks = request.param
    both = build(name, tmp_path_factory.mktemp(name), tensor_parallel_size=ranks)
    yield both
    both[0].close()
    del both
    gc.collect()


def weights(engine: LocalEngine, seed: int) -> dict[str, torch.Tensor]:
    """Others of the same shapes, tied where the model ties them."""
    generator = torch.Generator().manual_seed(seed)
    facts = engine.sequences.facts
    state = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in facts.shapes.items()}
    return {name: state[facts.tied.get(name, name)] for name in state}


def test_what_is_sampled_and_said_is_the_same(engines: tuple[Any, Any]) -> None:
    assert engines[0].provides == set(CAPABILITIES) - {"adapters", "drafts"}
    assert engines[0].dtype == "float32"
    theirs, ours = (play(engine, requests()) for engine in engines)
    assert_same(theirs, ours)
    finished = [e for e in theirs.values() if isinstance(e, Finished)]
    assert {"stop", "length"} <= {e.stop_reason for e in finished}
    assert all(e.seconds > 0 for e in finished)


def test_weights_between_two_steps(engines: tuple[Any, Any]) -> None:
    """Running sequences go on and say which version drew each token; those that wait start with the new weights."""
    for version, first in ((1, 100), (2, 200)):
        state = weights(engines[1], version)
        script = {3: lambda e, s=state, v=version: e.load_weights(s, v)}
        theirs, ours = (play(engine, requests(first), script) for engine in engines)
        assert_same(theirs, ours)
        assert engines[0].version == version
        versions = [set(e.versions.tolist()) for e in theirs.values() if isinstance(e, Finished)]
        assert {version - 1, version} in versions
        assert {version} in versions
        assert_same(*(play(engine, requests(first)) for engine in engines))


def test_cancelled_sequences_have_sampled_no_further(engines: tuple[Any, Any]) -> None:
    def cancel(engine: Any) -> list[Finished]:
        return engine.cancel([301, 302, 319, "unknown"])

    theirs, ours = (play(engine, requests(300), {4: cancel}) for engine in engines)
    assert_same(theirs, ours)
    had = {e.id: len(e.token_ids) for e in theirs.values() if isinstance(e, Finished) and e.stop_reason == "cancelled"}
    assert had == {301: 4, 302: 4, 319: 0}
    assert engines[0].pending == 0
    again = [play(engine, requests(300)) for engine in engines]
    assert_same(*again)


def test_what_does_not_depend_on_what_else_runs(engines: tuple[Any, Any]) -> None:
    together = play(engines[0], requests(400))
    for request in requests(400)[::5]:
        alone = play(engines[0], [request])
        assert_same(alone, {key: together[key] for key in alone})


def test_a_second_turn_pays_only_for_what_is_new(engines: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the keys and values of the same weights, and of no others."""
    theirs, ours = engines
    computed: list[int] = []
    execute = theirs._core.runner.execute_model

    def counting(scheduled: Any, *rest: Any) -> Any:
        computed.append(scheduled.total_num_scheduled_tokens)
        return execute(scheduled, *rest)

    monkeypatch.setattr(theirs._core.runner, "execute_model", counting)
    first = Request("turn", tuple(1 + j % 50 for j in range(64)), SamplingParams(20), noise_key(9, 0), keep=True)
    said = [play(engine, [first])["Finished", "turn", 0] for engine in engines]
    prompt = (*first.prompt_ids, *said[1].token_ids.tolist(), 3, 4, 5)
    second = Request("turn", prompt, SamplingParams(8), noise_key(9, 1))
    computed.clear()
    assert_same(*(play(engine, [second]) for engine in engines))
    assert computed[0] <= 23 + 32, "whole blocks of 32 tokens are shared"
    for engine in engines:
        engine.load_weights(weights(ours, 7), 7)
    computed.clear()
    assert_same(*(play(engine, [second]) for engine in engines))
    assert computed[0] == len(prompt)


def test_requests_and_weights_that_cannot_be_are_refused(engines: tuple[Any, Any]) -> None:
    theirs, ours = engines
    before = theirs.version
    for wrong, message in (
        (Request(0, (), SamplingParams(2), 0), "the prompt is empty"),
        (Request(0, (1,) * 100, SamplingParams(50), 0), "exceed the maximum length 128"),
        (Request(0, (63,), SamplingParams(2), 0), "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            theirs.submit([wrong])
    state = weights(ours, 8)
    name = next(iter(state))
    for broken, message in (
        ({k: v for k, v in state.items() if k != "model.norm.weight"}, "missing"),
        (state | {name: state[name] * torch.nan}, "not finite"),
        (state | {name: state[name][:-1]}, "has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            theirs.load_weights(broken, before + 1)
    assert theirs.version == before
    assert_same(*(play(engine, requests(500)) for engine in engines))


def test_the_process_stays_as_it_was(tmp_path: Path) -> None:
    """Threads and random generators are the learner's, too."""
    torch.manual_seed(5)
    before, set_threads = torch.get_rng_state(), torch.set_num_threads
    model, tokenizer = make_model("qwen2-tied", **WIDE), word_tokenizer()
    torch.set_rng_state(before)
    VllmOptions(args=SMALL_CACHE).build(ModelReference("", torch.device("cpu"), model), tokenizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == 1


def test_an_engine_that_failed_says_so(tmp_path: Path) -> None:
    engine, ours = build("qwen2-tied", tmp_path)
    huge = {name: tensor * 1e30 for name, tensor in weights(ours, 9).items()}
    engine.load_weights(huge, 1)
    engine.submit(requests()[:2])
    with pytest.raises(FloatingPointError, match=r"not finite at token 1 \(policy version 1\)"):
        engine.step()
    with pytest.raises(RuntimeError, match="the engine failed earlier"):
        engine.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots\n  Input should be greater than 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size\n  Input should be greater than 0"),
        ({"args": {"max_num_seqs": 4}}, "max_num_seqs is set by Winnow"),
        ({"gpu_memory_utilization": 2}, "gpu_memory_utilization\n  Input should be less than or equal to 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VllmOptions(**options)


def test_a_model_that_vllm_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    model, tokenizer = make_model("qwen2-tied"), word_tokenizer()  # heads of 8, which its CPU attention lacks
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"vLLM cannot run '{tmp_path}'"):
        VllmOptions(args=SMALL_CACHE).build(ModelReference(str(tmp_path), torch.device("cpu")), tokenizer)


def test_an_engine_that_sleeps_is_woken_by_weights(engines: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own calls, on a CPU, where they free nothing: what the weights were is overwritten instead."""
    theirs, ours = engines
    core, calls = theirs._core, []
    for name in ("sleep", "wake", "load"):
        real = getattr(core, name)
        monkeypatch.setattr(core, name, lambda x, name=name, real=real: (calls.append((name, x)), real(x)))
    theirs.release()
    assert not calls, "on a CPU there is nothing to give back"
    monkeypatch.setattr(theirs, "_sleeps", True)
    for version in (3, 3, 4):
        calls.clear()
        theirs.release()
        theirs.release()
        assert core._llm.is_sleeping()
        if version == 4:  # requests may come before the weights
            theirs.submit(requests(500)[:1])
            assert [e.id for e in theirs.cancel([500])] == [500]
        state = weights(ours, version)
        for engine in engines:
            engine.load_weights(state, version)
        assert [(name, x if name != "load" else None) for name, x in calls] == [
            ("sleep", 2),
            ("wake", "weights"),
            ("load", None),
            ("wake", "kv_cache"),
        ]
        assert not core._llm.is_sleeping()
        assert_same(*(play(engine, requests(500)) for engine in engines))
    calls.clear()
    theirs.submit(requests(600)[:2])
    theirs.step()
    theirs.release()
    assert not calls, "something runs"
    theirs.cancel([600, 601])
