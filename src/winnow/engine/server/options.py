"""Options of the engine that is a vLLM server, and what such a server must be started with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...base.errors import ConfigError
from ..loading import ModelReference
from .client import Client, ServerError, StatusError, UnreachableError

BACKEND = "winnow"
"""Name of the backend in `engine/vllm/files.py`, which the learner's process cannot import without vLLM."""
WAIT_S = 100.0
"""Longest wait for a server that may be restarting, with any time limit; below what a sampler has to start."""
LOOK_S = 1.0
"""Seconds between two looks at it."""
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"


@dataclass(frozen=True)
class ServerOptions:
    """One vLLM server, started by the user."""

    provides: ClassVar[frozenset[str]] = frozenset({"logp"})

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

    def build(self, model: ModelReference, tokenizer: Any) -> Any:
        """Connect, waiting for a server that restarts. Raises ConfigError when it cannot sample for the run."""
        from .engine import ServerEngine

        client = Client(self.url)
        wait_for(client, min(WAIT_S, self.timeout_s))
        return ServerEngine(client, self, require_usable(client, self), model, tokenizer)


def wait_for(client: Client, wait_s: float) -> None:
    """Return once the server answers. Raises ConfigError after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            client.get("/health", max(LOOK_S, deadline - time.monotonic()))
            return
        except (UnreachableError, StatusError) as error:
            restarting = isinstance(error, UnreachableError) or error.status >= 500
            if not restarting or time.monotonic() > deadline:
                raise ConfigError(str(error)) from None
            time.sleep(LOOK_S)
        except ServerError as error:
            raise ConfigError(str(error)) from None


def require_usable(client: Client, options: ServerOptions) -> Mapping[str, Any]:
    """Return vLLM's configuration of a server.

    Raises ConfigError, with the flag to start it with, when it cannot sample for this run.
    """
    try:
        answer = client.get("/server_info?config_format=json", options.timeout_s)
    except StatusError as error:
        remedy = f"; it is not a vLLM server, or has no weight-update interface: {DEV_MODE}" if error.status == 404 else ""
        raise ConfigError(f"{error}{remedy}") from None
    except ServerError as error:
        raise ConfigError(str(error)) from None
    _require_tokens(client, options)
    try:
        config: Mapping[str, Any] = answer["vllm_config"]
        model, backend = config["model_config"], (config["weight_transfer_config"] or {}).get("backend")
        mode, _ = model["logprobs_mode"], int(model["max_model_len"])
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            client.named(f"its /server_info cannot be read ({type(error).__name__}: {error}); run vLLM 0.32")
        ) from None
    if mode != "processed_logprobs":
        raise ConfigError(
            client.named(
                f"its logprobs_mode is {mode}: log-probabilities of another distribution than it samples from; start "
                "it with --logprobs-mode processed_logprobs"
            )
        )
    if backend != BACKEND:
        raise ConfigError(
            client.named(
                f"its weight transfer is {backend!r}; start it with --worker-extension-cls "
                f"winnow.engine.vllm.files.Files --weight-transfer-config '{{\"backend\": \"{BACKEND}\"}}'"
            )
        )
    return config


def _require_tokens(client: Client, options: ServerOptions) -> None:
    """Raise ConfigError unless the server takes and gives token ids. The request is refused before anything runs."""
    try:
        client.post("/inference/v1/generate", {}, options.timeout_s)
    except StatusError as error:
        if error.status in (403, 404):
            raise ConfigError(f"{error}; start it with --enable-scale-out, which opens token ids in and out") from None
        if error.status == 401:
            raise ConfigError(f"{error}; start it without --api-key, on an address that only the run reaches") from None
    except ServerError as error:
        raise ConfigError(str(error)) from None
