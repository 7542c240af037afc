"""What a server answered to a request, checked: nothing of it is trained unless all of it is possible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base import Finished, Request, SamplingParams
from ..facts import Facts
from ..stops import completes, decode
from .client import Client

FLOOR = -9999.0
"""What vLLM sends in the place of NaN and minus infinity."""
ROUNDING = 1e-3
"""Nats that rounding may lift a log-probability over 0."""


class AnswerReader:
    """Turns answers into events. `versions`: policy versions by the labels that the run has published them under."""

    def __init__(self, client: Client, facts: Facts, tokenizer: Any, versions: Mapping[str, int]) -> None:
        self._error = client.error
        self._facts = facts
        self._tokenizer = tokenizer
        self._versions = versions

    def finished(self, request: Request, loaded: int, answer: Any, seconds: float) -> Finished:
        """Return the event. `loaded`: the policy version that the server had when the request was sent.

        Raises ServerError for an answer that a server with the run's model and weights does not give.
        """
        try:
            (choice,) = answer["choices"]
            tokens, entries = choice["token_ids"], (choice["logprobs"] or {"content": []})["content"]
            spans, reason, cause = choice["weight_versions"], choice["finish_reason"], choice["stop_reason"]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise self._error(
                f"the answer lacks what vLLM 0.32 gives ({type(error).__name__}: {error}); serve with that version"
            ) from None
        tokens = [] if tokens is None else tokens
        versions = self._versions_of(loaded, spans, len(tokens))
        self._check_tokens(request, tokens)
        logp = self._logp(tokens, entries)
        ended = "cancelled" if reason == "abort" else self._reason(request.params, tokens, reason, cause)
        ids = np.array(tokens, np.int64)
        return Finished(request.id, ids, logp, np.array(versions, np.int32), ended, seconds)

    def _versions_of(self, loaded: int, spans: Any, n: int) -> list[int]:
        """Return the version of each token."""
        versions: list[int] = []
        try:
            for span in spans or ():
                if span["start"] != len(versions) or span["end"] < span["start"]:
                    raise KeyError("start")
                version = self._versions.get(span["version"])
                if version is None or version < loaded:
                    raise self._error(_foreign(span["version"], version, loaded))
                versions += [version] * (span["end"] - span["start"])
        except (TypeError, KeyError):
            raise self._error(f"versions of tokens that cannot be read: {str(spans)[:200]}") from None
        if len(versions) != n:
            raise self._error(
                f"{n} tokens, and versions of {len(versions)}; run a version of vLLM that Winnow is tested with"
            )
        return versions

    def _check_tokens(self, request: Request, tokens: Any) -> None:
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise self._error(f"token ids that cannot be read: {str(tokens)[:100]}")
        limit, vocabulary = request.params.max_tokens, self._facts.vocab_size
        if len(tokens) > limit:
            raise self._error(f"{len(tokens)} tokens, though max_tokens was {limit}")
        wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise self._error(
                f"token {wrong} is outside the vocabulary of {vocabulary}: it serves another model; start it with the "
                "run's"
            )

    def _logp(self, tokens: list[int], entries: Any) -> np.ndarray:
        try:
            named = [entry["token_id"] for entry in entries]
            given = [entry["logprob"] for entry in entries]
            logp = np.array([math.nan if value is None else float(value) for value in given], np.float64)
        except (TypeError, KeyError, ValueError):
            raise self._error(f"log-probabilities that cannot be read: {str(entries)[:200]}") from None
        if named != tokens:
            raise self._error(f"log-probabilities of {len(named)} tokens that are not the {len(tokens)} sampled")
        wrong = ~(logp > FLOOR) | (logp > ROUNDING)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise self._error(
                f"log-probability {given[i]} at token {i} is impossible (vLLM sends {FLOOR:g} for NaN): its logits "
                "are not finite; set its --dtype to float32 or bfloat16, and see the weights"
            )
        return logp.astype(np.float32)

    def _reason(self, params: SamplingParams, tokens: list[int], reason: Any, cause: Any) -> str:
        """Return the stop reason, which the tokens must bear out."""
        completed = bool(tokens and params.stop) and completes(self._tokenizer, params.stop, np.array(tokens))
        if tokens and reason == "stop" and isinstance(cause, str) and completed:
            return "stop"
        if params.stop and any(stop in decode(self._tokenizer, tokens[:-1]) for stop in params.stop):
            raise self._error("it passed over a stop string: it has another tokenizer; start it with the run's")
        if tokens and reason == "stop" and tokens[-1] in self._facts.eos_ids:
            return "eos"
        if reason == "length" and len(tokens) == params.max_tokens:
            return "length"
        if reason == "length":
            raise self._error(
                f"cut after {len(tokens)} of {params.max_tokens} tokens; start it with a --max-model-len of prompt and "
                "completion together"
            )
        raise self._error(
            f"an end that its {len(tokens)} tokens do not show (finish_reason {reason!r}, stop_reason {cause!r}); "
            "start it with the run's model and tokenizer"
        )


def _foreign(label: str, version: int | None, wanted: int) -> str:
    if version is not None:
        return (
            f"tokens of version {version}, though it had loaded {wanted}: it does not use the newest weights; give "
            "each server a URL of its own, not one of several behind a balancer"
        )
    if label == "default":
        return "tokens of the weights it was started with: it has restarted since the run published its own"
    return (
        f"tokens of weights {label!r}, which this run has not published: another run uses the server; give each run "
        "servers of its own"
    )
