"""The engine over a vLLM server, next to the embedded one that the stand-in serves; and servers that fail."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from winnow.base.errors import ConfigError
from winnow.engine import Finished, LocalEngine, ModelReference, Request, SamplingParams
from winnow.engine.server import client as client_module
from winnow.engine.server import engine as engine_module
from winnow.engine.server.client import Client, ServerError
from winnow.engine.server.engine import ServerEngine
from winnow.engine.server.options import ServerOptions

from ..builders.vllm_server import Answer, StandIn, connect, server, tokenizer

__all__ = ["server", "tokenizer"]  # fixtures
PROMPT = "numbers 3 5 8 target 16 :"


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model)


@pytest.fixture
def engine(server: StandIn, tiny_model: Path, model: Any, tokenizer: Any) -> Iterator[ServerEngine]:
    built = connect(server, tiny_model, tokenizer)
    built.load_weights(model.state_dict(), 0)
    yield built
    built.close()


def requests(tokenizer: Any, n: int, **params: Any) -> list[Request]:
    prompt = tuple(tokenizer.encode(PROMPT))
    return [Request(("train", 0, i), prompt, SamplingParams(**{"max_tokens": 8} | params), key=i) for i in range(n)]


def play(engine: Any) -> list[Finished]:
    """Run to the end; in the order of the requests."""
    events: list[Any] = []
    while engine.pending:
        events += engine.step()
    return sorted(events, key=lambda event: event.id)


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 9}, {"temperature": 0.0}, {"stop": ("8",)}, {"min_p": 0.1}],
    ids=["plain", "filtered", "greedy", "stop string", "min-p"],
)
def test_what_comes_back_is_what_was_sampled(
    engine: ServerEngine, model: Any, tokenizer: Any, params: dict[str, Any]
) -> None:
    ours = LocalEngine(model, tokenizer, slots=8)
    for each in (engine, ours):
        each.submit(requests(tokenizer, 6, **params))
        assert each.pending == 6
    for a, b in zip(play(engine), play(ours), strict=True):
        assert (a.id, a.stop_reason) == (b.id, b.stop_reason)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-6)
        np.testing.assert_array_equal(a.versions, b.versions)
    assert engine.clock > 0
    assert engine.step() == []


def test_nothing_is_left_to_the_defaults_of_the_server(server: StandIn, engine: ServerEngine, tokenizer: Any) -> None:
    engine.submit(requests(tokenizer, 1, stop=("8",)))
    play(engine)
    (body,) = server.bodies
    params = body["sampling_params"]
    assert {"max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"} <= params.keys()
    assert (params["ignore_eos"], params["logprobs"], params["detokenize"]) == (True, 0, True)
    assert params["stop_token_ids"] == sorted(engine.facts.eos_ids)
    assert body["cache_salt"].endswith("-0")


def test_ids_that_pad_the_vocabulary_are_not_sampled(
    server: StandIn, tiny_model: Path, model: Any, tokenizer: Any
) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 3)
    server._model = model
    built = ServerOptions(server.url, 20.0).build(ModelReference("", torch.device("cpu"), model), tokenizer)
    assert list(built._biases.values()) == [-100.0] * (model.config.vocab_size - built.facts.vocab_size)
    assert len(built._biases) >= 3
    model.resize_token_embeddings(model.config.vocab_size + 2_000)
    with pytest.raises(ConfigError, match=r"ids of its vocabulary are no token.*call model\.resize_token_embeddings"):
        ServerOptions(server.url, 20.0).build(ModelReference("", torch.device("cpu"), model), tokenizer)


def test_new_weights_have_their_version_and_salt(
    server: StandIn, engine: ServerEngine, model: Any, tokenizer: Any
) -> None:
    engine.submit(requests(tokenizer, 2))
    play(engine)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    engine.load_weights(model.state_dict(), 7)
    phases = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    assert server.calls[-5:] == phases
    ours = LocalEngine(model, tokenizer, slots=8)
    for each in (engine, ours):
        each.submit(requests(tokenizer, 3))
    for a, b in zip(play(engine), play(ours), strict=True):
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-6)
        assert set(a.versions) == {7}
    assert engine.version == 7
    assert server.bodies[-1]["cache_salt"] != server.bodies[0]["cache_salt"]


def test_an_update_that_a_killed_run_began_is_ended(server: StandIn, engine: ServerEngine, model: Any) -> None:
    server.paused = server.updating = True
    engine.load_weights(model.state_dict(), 1)
    assert (server.paused, server.updating) == (False, False)


def test_weights_are_checked_before_they_are_sent(server: StandIn, engine: ServerEngine, model: Any) -> None:
    before = len(server.calls)
    broken = {name: torch.full_like(tensor, math.nan) for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="finite"):
        engine.load_weights(broken, 1)
    assert len(server.calls) == before


def test_cancelled_requests_end(server: StandIn, engine: ServerEngine, tokenizer: Any) -> None:
    server.hangs.set()
    engine.submit(requests(tokenizer, 3))
    time.sleep(0.2)
    ended = engine.cancel([("train", 0, 0), ("train", 0, 2), "unknown"])
    assert sorted(f.id for f in ended) == [("train", 0, 0), ("train", 0, 2)]
    assert [(len(f.token_ids), f.stop_reason) for f in ended] == [(0, "cancelled")] * 2
    assert engine.pending == 1
    assert engine.cancel(["unknown"]) == []


def test_a_call_that_is_cancelled_before_it_is_made_is_not_made(server: StandIn, engine: ServerEngine) -> None:
    arrived = engine._ask("unknown", Request("a", (1, 2), SamplingParams(4), key=0))
    assert arrived.outcome is None
    assert not engine._sent


@pytest.mark.parametrize("cancelled", [(1, 2), (0, 1, 2)], ids=["those that wait", "all"])
def test_what_waits_for_a_slot_is_not_sent_once_it_is_cancelled(
    server: StandIn, tiny_model: Path, model: Any, tokenizer: Any, cancelled: tuple[int, ...]
) -> None:
    engine = connect(server, tiny_model, tokenizer, slots=1)
    engine.load_weights(model.state_dict(), 0)
    server.hangs.set()
    engine.submit(requests(tokenizer, 3))
    time.sleep(0.1)
    started = time.monotonic()
    assert len(engine.cancel([("train", 0, i) for i in cancelled])) == len(cancelled)
    assert time.monotonic() - started < 1
    server.hangs.clear()
    engine.submit([replace(requests(tokenizer, 1)[0], id=("train", 1, 0))])
    left = [("train", 0, i) for i in range(3) if i not in cancelled]
    assert [ended.id for ended in play(engine)] == [*left, ("train", 1, 0)]
    assert len(server.bodies) == 2


def test_tokens_of_two_versions(server: StandIn, engine: ServerEngine, model: Any, tokenizer: Any) -> None:
    (request,) = requests(tokenizer, 1)
    first = engine._label
    engine.submit([replace(request, params=SamplingParams(8))])

    def split(choice: dict[str, Any]) -> None:
        whole = len(choice["token_ids"])
        spans = [(first, 0, 3), (engine._label, 3, whole)]
        choice["weight_versions"] = [{"version": label, "start": a, "end": b} for label, a, b in spans]

    server.spoil = of_choice(split)
    server.hangs.set()
    engine.load_weights(model.state_dict(), 7)
    server.hangs.clear()
    (ended,) = play(engine)
    assert ended.versions.tolist() == [0] * 3 + [7] * (len(ended.token_ids) - 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"report_at": (2,)}, "report_at: a vLLM server does not report it"),
        ({"raw_logp": True}, "raw_logp: a vLLM server"),
        ({"params": SamplingParams(8, temperature=0.005)}, r"temperature 0.005: vLLM samples at 0.01; raise it"),
        ({"params": SamplingParams(8, temperature=2.5)}, r"temperature 2.5: vLLM takes at most 2; lower it"),
        ({"params": SamplingParams(8, top_p=0.9, min_p=0.1)}, "min_p with top_p: vLLM applies min_p first"),
        ({"params": SamplingParams(100_000)}, "exceed the maximum length"),
        ({"prompt_ids": (9_999,)}, "prompt token 9999 is outside the vocabulary"),
    ],
)
def test_requests_that_a_server_cannot_run(
    engine: ServerEngine, tokenizer: Any, change: dict[str, Any], message: str
) -> None:
    values = {"id": 0, "prompt_ids": (1,), "params": SamplingParams(8), "key": 0} | change
    with pytest.raises(ValueError, match=message):
        engine.submit([*requests(tokenizer, 1), Request(**values)])
    assert engine.pending == 0
    engine.submit(requests(tokenizer, 1))
    with pytest.raises(ValueError, match="already in use"):
        engine.submit(requests(tokenizer, 1))


def of_choice(change: Callable[[Answer], Any]) -> Callable[[Answer], Answer]:
    def spoil(answer: Answer) -> Answer:
        change(answer["choices"][0])
        return answer

    return spoil


def first_logp(value: Any) -> Callable[[Answer], Any]:
    return lambda choice: choice["logprobs"]["content"][0].update(logprob=value)


def shorter(choice: Answer) -> None:
    """Three tokens of eight, and nothing else wrong."""
    choice["token_ids"] = choice["token_ids"][:3]
    choice["logprobs"]["content"] = choice["logprobs"]["content"][:3]
    choice["weight_versions"][0]["end"] = 3
    choice.update(finish_reason="length", stop_reason=None)


def relabelled(label: str) -> Callable[[Answer], Any]:
    return lambda choice: choice["weight_versions"][0].update(version=label)


def other_token(choice: Answer) -> None:
    choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = 50_000


WRONG: dict[str, tuple[Callable[[Answer], Answer], str]] = {
    "NaN": (of_choice(first_logp(math.nan)), r"log-probability nan at token 0.*logits are not finite"),
    "vLLM's NaN": (of_choice(first_logp(-9999.0)), r"log-probability -9999\.0 at token 0"),
    "none": (of_choice(first_logp(None)), "log-probability None at token 0"),
    "positive": (of_choice(first_logp(0.5)), r"log-probability 0\.5 at token 0"),
    "words": (of_choice(first_logp("low")), "log-probabilities that cannot be read"),
    "no log-probabilities": (of_choice(lambda c: c.update(logprobs=None)), "log-probabilities of 0 tokens"),
    "restarted": (of_choice(relabelled("default")), "it has restarted since the run published its own"),
    "other run": (of_choice(relabelled("abcd-4")), "weights 'abcd-4', which this run has not published: another run"),
    "no versions": (of_choice(lambda c: c.update(weight_versions=None)), "tokens, and versions of 0"),
    "odd versions": (of_choice(lambda c: c.update(weight_versions=[{"at": 3}])), "versions of tokens that cannot be"),
    "cut": (of_choice(shorter), r"cut after 3 of 8 tokens; start it with a --max-model-len"),
    "vocabulary": (of_choice(other_token), "token 50000 is outside the vocabulary.*it serves another model"),
    "no tokens": (of_choice(lambda c: c.update(token_ids=None)), "tokens"),
    "words for tokens": (of_choice(lambda c: c.update(token_ids=["a"])), "tokens"),
    "no end": (of_choice(lambda c: c.update(finish_reason="stop", stop_reason=3)), "an end that its 8 tokens do not"),
    "aborted": (of_choice(lambda c: c.update(finish_reason="abort")), "it aborted a request of the run"),
    "no choice": (lambda answer: {"choices": []}, "the answer lacks what vLLM 0.32 gives"),
    "a list": (lambda answer: [1], "the answer lacks"),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("case", list(WRONG))
def test_an_answer_that_cannot_be_is_refused_by_its_url(
    server: StandIn, engine: ServerEngine, tokenizer: Any, case: str
) -> None:
    spoil, message = WRONG[case]
    server.spoil = lambda answer: spoil(_without_end(answer))
    engine.submit(requests(tokenizer, 1))
    with pytest.raises(ServerError, match=message) as caught:
        play(engine)
    assert str(caught.value).startswith(f"sync: server: url {server.url}: ")
    with pytest.raises(RuntimeError, match=message):
        engine.step()


def _without_end(answer: Answer) -> Answer:
    """Eight tokens that end by length, whatever was sampled."""
    (choice,) = answer["choices"]
    entry = choice["logprobs"]["content"][0] | {"logprob": -1.0, "token_id": 5}
    choice.update(token_ids=[5] * 8, logprobs={"content": [dict(entry) for _ in range(8)]})
    choice.update(finish_reason="length", stop_reason=None)
    choice["weight_versions"][0]["end"] = 8
    return answer


def test_tokens_of_weights_older_than_the_last_are_refused(
    server: StandIn, engine: ServerEngine, model: Any, tokenizer: Any
) -> None:
    """As of a balancer in front of two servers, of which one was sent the weights."""
    old = server.label
    engine.submit(requests(tokenizer, 1))
    engine.load_weights(model.state_dict(), 1)
    play(engine)
    server.label = old
    engine.submit(requests(tokenizer, 1))
    with pytest.raises(ServerError, match=r"give each server a URL of its own, not one of several behind a balancer"):
        play(engine)


def test_a_stop_string_that_another_tokenizer_passed_over(
    server: StandIn, engine: ServerEngine, tokenizer: Any
) -> None:
    (token,) = tokenizer.encode("8", add_special_tokens=False)

    def spoil(answer: Answer) -> Answer:
        choice = _without_end(answer)["choices"][0]
        choice["token_ids"][2] = choice["logprobs"]["content"][2]["token_id"] = token
        return answer

    server.spoil = spoil
    engine.submit(requests(tokenizer, 1, stop=("8",)))
    with pytest.raises(ServerError, match="passed over a stop string: it has another tokenizer"):
        play(engine)


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/pause", "/update_weights", "/finish_weight_update"])
def test_a_status_is_an_error_with_the_servers_words(
    server: StandIn, engine: ServerEngine, model: Any, tokenizer: Any, path: str
) -> None:
    server.statuses[path] = 500

    def go_on() -> None:
        engine.load_weights(model.state_dict(), 1)
        engine.submit(requests(tokenizer, 1))
        play(engine)

    with pytest.raises(ServerError, match=rf"{path}: status 500: set to fail"):
        go_on()


def test_a_file_that_the_server_does_not_see(
    server: StandIn, engine: ServerEngine, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, file)
    monkeypatch.setattr(engine_module.os.path, "abspath", lambda path: "/elsewhere/weights.safetensors")
    with pytest.raises(ServerError, match=r"cannot read /elsewhere/.*must see the run's directory under the same path"):
        engine.load_file(str(file), 1)


def test_a_server_that_hangs_is_given_up(server: StandIn, tiny_model: Path, model: Any, tokenizer: Any) -> None:
    engine = connect(server, tiny_model, tokenizer, timeout_s=1.5)
    engine.load_weights(model.state_dict(), 0)
    server.hangs.set()
    engine.submit(requests(tokenizer, 2))
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"none of 2 requests was answered for 1\.5 s.*raise sync\.timeout_s"):
        play(engine)
    assert 1 < time.monotonic() - started < 10


def test_a_call_that_hangs_is_given_up(server: StandIn, engine: ServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    answers = server.post
    monkeypatch.setattr(server, "post", lambda path, body: held.wait(20) and answers(path, body))
    with pytest.raises(ServerError, match=r"no answer to /pause within 0\.5 s"):
        Client(server.url).post("/pause", None, 0.5)
    held.set()


def test_a_server_that_is_gone(server: StandIn, engine: ServerEngine, tokenizer: Any) -> None:
    server.close()
    engine.submit(requests(tokenizer, 1))
    with pytest.raises(ServerError, match=r"no answer to /inference/v1/generate \(ConnectionRefusedError"):
        play(engine)


def test_an_answer_that_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def half() -> None:
            connection, _ = listening.accept()
            connection.recv(1 << 16)
            connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"choices": [')
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):  # closed with anything unread it would reset the connection
                pass
            connection.close()

        threading.Thread(target=half, daemon=True).start()
        with pytest.raises(ServerError, match=r"no answer to /x \(IncompleteRead"):
            Client(f"http://127.0.0.1:{listening.getsockname()[1]}").post("/x", {}, 5.0)


def test_what_is_not_json(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_read", lambda response, deadline: response.read() and b"<html>")
    with pytest.raises(ServerError, match=r"is not JSON .*is this a vLLM server"):
        Client(server.url).get("/server_info", 5.0)
