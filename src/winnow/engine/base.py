"""Generation engines: submit, cancel, step, load weights.

An engine does not depend on groups, rewards or training; see `docs/engine.md`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..base.seconds import Seconds
from ..base.weights import Weights
from ..config import COLDEST


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings, under the names of TRL and vLLM."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy: the recorded log-probability is then that of the untempered softmax, after the penalty."""
    top_p: float = 1.0
    top_k: int = 0
    """0 turns it off."""
    stop: tuple[str, ...] = ()
    """Strings that end a sequence; their tokens stay in `token_ids`."""
    min_p: float = 0.0
    """Drop tokens below this share of the most likely token's probability; 0 turns it off."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens already in prompt or completion are divided by it, negative ones multiplied."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. Requests with equal `prompt_ids` share one prefill."""

    id: Hashable
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    key: int
    """64-bit noise key (see `winnow.base.noise`): token j uses number j of it, whatever else runs."""
    report_at: tuple[int, ...] = ()
    """Ascending counts of sampled tokens at which to report a `Reached` event."""
    keep: bool = False
    """Keep keys and values after the sequence ends, for another turn. A later request with the same id whose prompt
    extends this prompt and its sampled tokens computes only the rest. Cancel the id if no turn follows. The engine may
    drop them; the next turn is then computed from its start."""
    raw_logp: bool = False
    """Report every token's log-probability before temperature, top-k and top-p."""
    last_hidden: bool = False
    """Report the last hidden state if the sequence ends without a cancel."""
    draft: tuple[int, ...] = ()
    """Tokens that the sequence may sample. Those that the noise draws anyway, up to the first other one, may be read in
    one forward pass; the result is the same."""


def check_request(request: Request, vocab_size: int, max_length: int | None) -> None:
    """Raise ValueError if prompt, draft, sampling parameters or `report_at` cannot be run."""
    params, prompt, who = request.params, request.prompt_ids, f"request {request.id!r}"
    if not prompt:
        raise ValueError(f"{who}: the prompt is empty; it needs at least one token")
    wrong = next((i for i in prompt if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"{who}: prompt token {wrong} is outside the vocabulary of {vocab_size}")
    if params.max_tokens < 1:
        raise ValueError(f"{who}: max_tokens must be at least 1, not {params.max_tokens}")
    total = len(prompt) + params.max_tokens
    if max_length is not None and total > max_length:
        raise ValueError(
            f"{who}: {len(prompt)} prompt tokens + max_tokens {params.max_tokens} = {total} exceed the maximum "
            f"length {max_length}; shorten the prompt or lower max_tokens"
        )
    wrong = next((i for i in request.draft if not 0 <= i < vocab_size), None)
    if wrong is not None or len(request.draft) > params.max_tokens:
        what = f"token {wrong}" if wrong is not None else f"{len(request.draft)} tokens"
        raise ValueError(f"{who}: the draft has {what}, outside the vocabulary of {vocab_size} or over max_tokens")
    if params.temperature != 0 and not COLDEST <= params.temperature < math.inf:
        raise ValueError(
            f"{who}: temperature must be 0 (greedy) or a number from {COLDEST} on, not {params.temperature}"
        )
    if not 0 < params.top_p <= 1:
        raise ValueError(f"{who}: top_p must be in (0, 1], not {params.top_p}")
    if not 0 <= params.min_p < 1:
        raise ValueError(f"{who}: min_p must be in [0, 1), not {params.min_p}")
    if not 0 < params.repetition_penalty < math.inf:
        raise ValueError(f"{who}: repetition_penalty must be positive, not {params.repetition_penalty}")
    if params.top_k < 0:
        raise ValueError(f"{who}: top_k must be >= 0 (0 turns it off), not {params.top_k}")
    if not all(params.stop):
        raise ValueError(f"{who}: a stop string is empty")
    counts = request.report_at
    if any(a >= b for a, b in zip((0, *counts), counts, strict=False)):
        raise ValueError(f"{who}: report_at must be positive and ascending, not {counts}")


@dataclass(frozen=True, slots=True)
class Reached:
    """Event: a sequence has sampled `n` tokens and still runs. If cancelled now, it computes no more tokens."""

    id: Hashable
    n: int
    logp: np.ndarray
    """float32 [n]."""
    hidden: np.ndarray | None = None
    """float32 [H]: input of the lm_head for the n-th token; None from an engine without `hidden`."""
    raw_logp: np.ndarray | None = None
    """float32 [n] if requested: `logp` under the model itself, before temperature, top-k and top-p."""
    token_ids: np.ndarray | None = None
    """int64 [n]; None from an engine without `text`."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: a sequence has ended."""

    id: Hashable
    token_ids: np.ndarray
    """int64 [T], including the end-of-sequence token if sampled."""
    logp: np.ndarray
    """float32 [T], nats, under the sampling distribution of each token (after temperature, top-p, top-k)."""
    versions: np.ndarray
    """int32 [T]: policy version that sampled each token."""
    stop_reason: str
    """`eos`, `stop`, `length` or `cancelled`."""
    seconds: float
    """Share of engine time: sum over its steps of step time divided by active rows."""
    hidden: np.ndarray | None = None
    """float32 [H] if requested: input of the lm_head for the last token."""
    raw_logp: np.ndarray | None = None
    """float32 [T] if requested; see `Reached`."""
    num_reused_tokens: int = 0
    """Tokens among them that took no decoding step of their own: of a draft, or decoded once for some siblings."""
    num_computed_tokens: int | None = None
    """Positions that went through the model for it: of the prompt, of a draft, of its decoding steps. What several
    share counts for the first of them. None: the engine does not count them."""


Event = Reached | Finished


CAPABILITIES = {
    "logp": "log-probabilities of sampled tokens",
    "raw_logp": "the same before temperature, top-k and top-p",
    "report_at": "`Reached` events",
    "text": "sampled tokens in `Reached`",
    "exact_cancel": "a sequence cancelled at its event samples no further token",
    "hidden": "last hidden states in `Reached`",
    "last_hidden": "last hidden states in `Finished`",
    "keep_kv": "keys and values survive from turn to turn",
    "keyed_noise": "sampled tokens depend on a request's key, whatever else runs",
    "drafts": "drafts are read in one forward pass",
    "adapters": "`load_weights` takes LoRA adapters alone, over an unchanged model",
}
"""Capabilities that an engine may provide and rules may require."""


class Engine(Protocol):
    """A generation engine. `dtype`, `max_length`, `no_drafts`, `load_file()`, `release()`, `close()` and `seconds` are
    optional.

    `dtype`: compute dtype (e.g. `float32`); without it, the learner comparison allows for bfloat16 rounding.
    `max_length`: most tokens of a prompt with its completion; without it, or with None, there is no limit.
    `no_drafts`: why it has none, for the error where a run wants them.
    `load_file(path, version)`: `load_weights` from a safetensors file, for an engine that has it read elsewhere.
    `release()`: called before an update in the same process; frees the weights' memory until `load_weights`.
    `close()`: called at the end of a run; frees what would outlast the object, such as another library's memory.
    `seconds`: `Seconds(*ENGINE_SECONDS)` of its steps; without it, they are reported as one figure.
    """

    provides: frozenset[str]
    """A subset of `CAPABILITIES`."""
    version: int
    """Policy version of the weights in use."""
    clock: int
    """Tokens a sequence would have if it had run since the start; the unit of waits for environments and rewards."""

    @property
    def pending(self) -> int:
        """Return the number of sequences submitted and neither finished nor cancelled."""
        ...

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue all requests, or raise and queue no request.

        Raises ValueError on a duplicate id, an empty or over-long prompt, or a token outside the vocabulary.
        """
        ...

    def cancel(self, ids: Iterable[Hashable]) -> list[Finished]:
        """Stop these sequences now; return their tokens so far, with stop_reason `cancelled`.

        Drops their kept keys and values. Ignores unknown ids.
        """
        ...

    def step(self) -> list[Event]:
        """Admit waiting requests into free slots and sample one token for every running sequence."""
        ...

    def load_weights(self, weights: Weights, version: int) -> None:
        """Swap weights between two decode steps; running sequences keep their KV cache and continue.

        `weights` uses the names of the Hugging Face model's `state_dict()`, or of its adapters if the engine was built
        for them. Raises ValueError on a missing, unknown, misshapen or non-finite tensor, and keeps the old weights.
        """
        ...


def engine_seconds(engine: Engine, whole: float) -> dict[str, float]:
    """Return an engine's seconds by `ENGINE_SECONDS` since the last call; `engine: whole` if it does not measure them.

    `whole`: seconds of its steps.
    """
    seconds: Seconds | None = getattr(engine, "seconds", None)
    return {"engine": whole} if seconds is None else seconds.take()


def close_engine(engine: Engine | None) -> None:
    """Close an engine that can be closed."""
    close = getattr(engine, "close", None)
    if close is not None:
        close()


def release_engine(engine: Engine | None) -> None:
    """Free the weights' memory of an engine that can, until its next `load_weights`."""
    release = getattr(engine, "release", None)
    if release is not None:
        release()
