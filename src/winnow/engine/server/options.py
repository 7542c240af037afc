"""Options of the engine that is a vLLM server, and what such a server must be started with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...base.errors import ConfigError
from ..loading import ModelReference
from .client import Client, ServerError, StatusError
from .engine import ServerEngine

BACKEND = "winnow"
"""Name of the backend in `engine/vllm/files.py`, which a process without vLLM cannot import."""
WAIT_S = 100.0
"""Longest wait for a server that may be restarting, with any time limit; below what a sampler has to start."""
LOOK_S = 1.0
"""Seconds between two looks at it."""
HEALTH_S = 10.0
"""Longest wait for the answer to one look."""


@dataclass(frozen=True)
class ServerOptions:
    """One vLLM server, started by the user."""

    provides: ClassVar[frozenset[str]] = ServerEngine.provides

    url: str
    timeout_s: float
    """Longest wait for an answer: to a call, or to any of the requests that run."""
    slots: int = 256
    """Requests sent at once; the server batches them."""
    max_length: int | None = None
    """Tokens of the longest request, completion included, if known."""

    def for_run(self, longest: int | None, share: float, *, sleep: bool) -> ServerOptions:
        """With the length of this run."""
        return replace(self, max_length=longest)

    def build(self, model: ModelReference, tokenizer: Any) -> ServerEngine:
        """Build the engine, waiting for a server that restarts. Raises errors as `connect` does."""
        client, config = connect(self, min(WAIT_S, self.timeout_s))
        return ServerEngine(
            client,
            config,
            model,
            tokenizer,
            timeout_s=self.timeout_s,
            slots=self.slots,
            max_length=self.max_length,
        )


def connect(options: ServerOptions, wait_s: float) -> tuple[Client, Mapping[str, Any]]:
    """Return a client of the server, and vLLM's configuration there.

    Raises ServerError when it does not answer (`wait_s`: to the first call), ConfigError when its answers show that it
    cannot sample for runs, with the flag to start it with.
    """
    client = Client(options.url)
    _wait_for(client, wait_s)
    try:
        config = _config_of(client, options.timeout_s)
        _require_tokens(client, options.timeout_s)
        _require_flags(config)
    except ConfigError as error:
        raise ConfigError(client.named(str(error))) from None
    return client, config


def _wait_for(client: Client, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            client.get("/health", HEALTH_S)
            return
        except ServerError:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOOK_S)


def _config_of(client: Client, timeout_s: float) -> Mapping[str, Any]:
    try:
        answer = client.get("/server_info?config_format=json", timeout_s)
    except StatusError as error:
        if error.status >= 500:  # it fails, which is no refusal
            raise
        raise ConfigError(
            f"status {error.status} of /server_info; it is not a vLLM server, or has no interface for weight updates: "
            "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        ) from None
    try:
        config: Mapping[str, Any] = answer["vllm_config"]
        int(config["model_config"]["max_model_len"])
    except (TypeError, KeyError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"its /server_info cannot be read ({what}); run a vLLM that Winnow is tested with") from None
    return config


def _require_tokens(client: Client, timeout_s: float) -> None:
    """Raise ConfigError unless the server takes and gives token ids. The empty request is refused before it runs."""
    try:
        client.post("/inference/v1/generate", {}, timeout_s)
    except StatusError as error:
        if error.status in (403, 404):
            raise ConfigError("its interface of token ids is closed; start it with --enable-scale-out") from None
        if error.status == 401:
            raise ConfigError(
                "it wants a key; start it without --api-key, on an address that only the run reaches"
            ) from None


def _require_flags(config: Mapping[str, Any]) -> None:
    mode = config["model_config"].get("logprobs_mode")
    if mode != "processed_logprobs":
        raise ConfigError(
            f"its logprobs_mode is {mode}: log-probabilities of another distribution than it samples from; start it "
            "with --logprobs-mode processed_logprobs"
        )
    transfer = config.get("weight_transfer_config") or {}
    if transfer.get("backend") != BACKEND:
        raise ConfigError(
            f"its weight transfer is {transfer.get('backend')}; start it with --worker-extension-cls "
            f'winnow.engine.vllm.files.Files --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
        )
