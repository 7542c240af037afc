"""A teacher that a vLLM server serves: its log-probabilities of a prompt's tokens are those of a whole rollout."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ..base.errors import ConfigError
from ..engine.server.client import Client, ServerError
from .rows import Row

AT_A_TIME = 16
"""Requests that wait for an answer at a time; the server batches them."""
COMPARED = 64
"""Token ids whose texts are compared."""
LEAST = -9000.0
"""vLLM writes -9999 for a probability of 0."""


@dataclass(frozen=True)
class TeacherServer:
    client: Client
    model: str
    timeout_s: float
    n_positions: int
    """Most tokens of a rollout with its prompt; 0: unknown."""

    @classmethod
    def connect(cls, url: str, model: str | None, timeout_s: float) -> TeacherServer:
        """Return the server at `url`. Raises ConfigError when it does not answer, or does not serve `model`."""
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"teacher: url: {url!r} has no http:// or https://; write e.g. http://localhost:8000")
        client = Client(url, "teacher")
        try:
            answer = client.get("/v1/models", timeout_s)
            served = {each["id"]: each.get("max_model_len") for each in answer["data"]}
        except (KeyError, TypeError, AttributeError):
            raise ConfigError(client.named("its /v1/models cannot be read; start it with `vllm serve MODEL`")) from None
        except ServerError as error:
            raise ConfigError(str(error)) from None
        name = model or next(iter(served), "")
        if name not in served:
            raise ConfigError(f"teacher: model: {url} does not serve {name!r}; it has {', '.join(served)}")
        return cls(client, name, timeout_s, int(served[name] or 1) - 1)  # it samples one token more

    def logp(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the log-probabilities [A] of each row's action tokens. Raises ServerError."""
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            return list(pool.map(self._of_row, rows))

    def _of_row(self, row: Row) -> torch.Tensor:
        ids = [*row.rollout.prompt_ids, *row.rollout.token_ids.tolist()]
        request = {"model": self.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        answer = self.client.post("/v1/completions", request, self.timeout_s)
        first = len(row.rollout.prompt_ids)
        try:
            by_place = answer["choices"][0]["prompt_logprobs"]
            places = [first + int(n) for n in row.rollout.action_mask.nonzero()[0]]
            values = [float(by_place[place][str(ids[place])]["logprob"]) for place in places]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self.client.error(
                "it answered without the log-probabilities of the tokens it was given "
                f"({type(error).__name__}: {error}); it must be a vLLM server with the policy's tokenizer"
            ) from None
        return torch.tensor([value if value > LEAST else -torch.inf for value in values])

    def require_same_tokens(self, tokenizer: Any, n_tokens: int) -> None:
        """Raise ConfigError unless the server has the policy's tokens: some ids, over the whole vocabulary."""
        for i in range(0, n_tokens, max(1, n_tokens // COMPARED)):
            own = tokenizer.decode([i])
            try:
                asked = {"model": self.model, "tokens": [i]}
                theirs = self.client.post("/detokenize", asked, self.timeout_s)["prompt"]
            except (ServerError, KeyError, TypeError) as error:
                raise ConfigError(self.client.named(f"its vocabulary cannot be compared: {error}")) from None
            if theirs != own:
                raise ConfigError(
                    f"teacher: {self.client.url} has another vocabulary: token {i} is {theirs!r}, and {own!r} for the "
                    "policy; choose a teacher of the policy's family"
                )
