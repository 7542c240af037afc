"""A teacher that a vLLM server serves: its log-probabilities of a prompt's tokens are those of a whole rollout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch

from ..base.errors import ConfigError, ExpectedError
from .rows import Row

AT_A_TIME = 16
"""Requests that wait for an answer at a time; the server batches them."""
COMPARED = 64
"""Token ids whose texts are compared."""
LEAST = -9000.0
"""vLLM writes -9999 for a probability of 0."""


class TeacherLostError(ExpectedError):
    """The teacher's server did not answer, or not with log-probabilities."""


@dataclass(frozen=True)
class TeacherServer:
    url: str
    model: str
    timeout_s: float
    n_positions: int

    @classmethod
    def connect(cls, url: str, model: str | None, timeout_s: float) -> TeacherServer:
        """Return the server at `url`. Raises ConfigError when it does not answer, or does not serve `model`."""
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"teacher: url: {url!r} has no http:// or https://; write e.g. http://localhost:8000")
        try:
            answer = _answer(f"{url}/v1/models", None, timeout_s)
            served = {each["id"]: each.get("max_model_len") for each in answer["data"]}
        except (TeacherLostError, KeyError, TypeError) as error:
            raise ConfigError(f"teacher: url: {error}; start it with `vllm serve MODEL`") from None
        name = model or next(iter(served), "")
        if name not in served:
            raise ConfigError(f"teacher: model: {url} does not serve {name!r}; it has {', '.join(served)}")
        return cls(url, name, timeout_s, int(served[name] or 0))

    def logp(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the log-probabilities [A] of each row's action tokens. Raises TeacherLostError."""
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            return list(pool.map(self._of_row, rows))

    def _of_row(self, row: Row) -> torch.Tensor:
        ids = [*row.rollout.prompt_ids, *row.rollout.token_ids.tolist()]
        request = {"model": self.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = _answer(f"{self.url}/v1/completions", request, self.timeout_s)
        first = len(row.rollout.prompt_ids)
        try:
            by_place = answer["choices"][0]["prompt_logprobs"]
            places = [first + int(n) for n in row.rollout.action_mask.nonzero()[0]]
            values = [float(by_place[place][str(ids[place])]["logprob"]) for place in places]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise TeacherLostError(
                f"teacher: {self.url} answered without the log-probabilities of the tokens it was given "
                f"({type(error).__name__}: {error}); it must be a vLLM server with the policy's tokenizer"
            ) from None
        return torch.tensor([value if value > LEAST else -torch.inf for value in values])

    def require_same_tokens(self, tokenizer: Any, n_tokens: int) -> None:
        """Raise ConfigError unless the server has the policy's tokens: some ids, over the whole vocabulary."""
        for i in range(0, n_tokens, max(1, n_tokens // COMPARED)):
            own = tokenizer.decode([i])
            try:
                asked = {"model": self.model, "tokens": [i]}
                theirs = _answer(f"{self.url}/detokenize", asked, self.timeout_s)["prompt"]
            except (TeacherLostError, KeyError, TypeError) as error:
                raise ConfigError(f"teacher: url: its vocabulary cannot be compared: {error}") from None
            if theirs != own:
                raise ConfigError(
                    f"teacher: {self.url} has another vocabulary: token {i} is {theirs!r}, and {own!r} for the policy; "
                    "choose a teacher of the policy's family"
                )


def _answer(url: str, request: Mapping[str, Any] | None, timeout_s: float) -> Any:
    """Return the JSON that a server answers. Raises TeacherLostError."""
    body = None if request is None else json.dumps(request).encode()
    try:
        with urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=timeout_s) as response:
            return json.load(response)
    except HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise TeacherLostError(f"teacher: {url} answered {error.code}: {said}") from None
    except (URLError, OSError, HTTPException, ValueError) as error:
        raise TeacherLostError(f"teacher: {url} does not answer: {error}") from None
