"""Servers that cannot sample for a run are refused at its start, by their URL and with the remedy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from winnow.base.errors import ConfigError
from winnow.engine import Request, SamplingParams
from winnow.engine.server import options as options_module
from winnow.engine.server.client import ServerError
from winnow.engine.server.options import ServerOptions
from winnow.sampler import Server

from ..builders.vllm_server import StandIn, connect, server, tokenizer

__all__ = ["server", "tokenizer"]  # fixtures


def without(server: StandIn, **changes: Any) -> None:
    for name, value in changes.items():
        if name == "backend":
            server.config["weight_transfer_config"] = value
        else:
            server.config["model_config"][name] = value


UNUSABLE: dict[str, tuple[Callable[[StandIn], Any], str]] = {
    "raw": (lambda s: without(s, logprobs_mode="raw_logprobs"), "start it with --logprobs-mode processed_logprobs"),
    "no transfer": (
        lambda s: without(s, backend=None),
        "weight transfer is None; start it with --worker-extension-cls",
    ),
    "nccl": (lambda s: without(s, backend={"backend": "nccl"}), "weight transfer is nccl"),
    "short": (lambda s: without(s, max_model_len=32), "max_model_len is 32.*--max-model-len"),
    "no interface": (lambda s: s.statuses.update({"/server_info": 404}), "start it with VLLM_SERVER_DEV_MODE=1"),
    "no tokens": (lambda s: s.statuses.update({"/inference/v1/generate": 403}), "start it with --enable-scale-out"),
    "key": (lambda s: s.statuses.update({"/inference/v1/generate": 401}), "start it without --api-key"),
    "odd": (lambda s: s.config.clear(), "its /server_info cannot be read"),
    "other model": (
        lambda s: setattr(s._model.config, "hidden_size", 4_096),
        "its hidden_size is 4096.*the run's model",
    ),
}


@pytest.mark.parametrize("case", list(UNUSABLE))
def test_a_server_that_cannot_sample_for_a_run(server: StandIn, tiny_model: Path, tokenizer: Any, case: str) -> None:
    change, message = UNUSABLE[case]
    change(server)
    with pytest.raises(ConfigError, match=message) as caught:
        connect(server, tiny_model, tokenizer)
    assert server.url in str(caught.value)


def test_a_server_that_restarts_is_waited_for(
    server: StandIn, tiny_model: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options_module, "LOOK_S", 0.05)
    server.statuses["/health"] = 503
    threading.Timer(0.3, server.statuses.clear).start()
    connect(server, tiny_model, tokenizer)
    monkeypatch.setattr(options_module, "WAIT_S", 0.2)
    server.close()
    with pytest.raises(ServerError, match=r"no answer to /health \(ConnectionRefusedError.*correct the URL"):
        connect(server, tiny_model, tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "url: missing"),
        ({"url": "127.0.0.1:8000"}, "is not the address of a server; expected e.g. http://127.0.0.1:8000"),
        ({"url": "ftp://here"}, "is not the address"),
        ({"url": "http://here:99999"}, "is not the address"),
        ({"url": "http://me:secret@here"}, "is not the address"),
        ({"url": "http://here/v1/"}, "leave out /v1"),
        ({"url": ["http://here", "http://here"]}, "named twice"),
        ({"url": ["http://here", "http://there"], "samplers": 3}, "samplers: 3, but there is one for each of 2 url"),
    ],
)
def test_urls_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Server(**options)


def test_a_sampler_for_each_url() -> None:
    server = Server(url=("http://here", "https://there/vllm/"), timeout_s=9.0)
    assert server.samplers == server.least == 2
    assert server.engine_of(1) == ServerOptions("https://there/vllm/", 9.0)


def test_a_server_on_a_cpu_gets_no_seeds(server: StandIn, tiny_model: Path, tokenizer: Any) -> None:
    """vLLM would end as soon as it reads such a prompt in two steps."""
    request = Request("it", tuple(tokenizer.encode("numbers 3 5 target 8 :")), SamplingParams(8), key=1)
    assert "seed" in connect(server, tiny_model, tokenizer)._params(request)
    server.config["device_config"] = {"device": "cpu"}
    assert "seed" not in connect(server, tiny_model, tokenizer)._params(request)


def test_a_server_that_stops_answering_is_no_refusal(
    server: StandIn, tiny_model: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sampler is then replaced up to `max_restarts` times: its engine hangs below /health, or it is gone again."""
    held = threading.Event()
    answers = server.post

    def post(path: str, body: Any) -> Any:
        if path == "/init_weight_transfer_engine":
            held.wait(20)
        return answers(path, body)

    server.statuses["/server_info"] = 500
    with pytest.raises(ServerError, match="/server_info: status 500"):
        connect(server, tiny_model, tokenizer)
    del server.statuses["/server_info"]
    monkeypatch.setattr(server, "post", post)
    with pytest.raises(ServerError, match=r"no answer to /init_weight_transfer_engine within 1\.5 s") as caught:
        connect(server, tiny_model, tokenizer, timeout_s=1.5)
    held.set()
    assert "the run's model" not in str(caught.value)
    monkeypatch.setattr(options_module, "_wait_for", lambda client, wait_s: server.close())
    with pytest.raises(ServerError, match=r"no answer to /server_info \(ConnectionRefusedError"):
        connect(server, tiny_model, tokenizer)
