"""Settings of a request: honoured, refused by name, or left to the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .messages import tools_of

WITH_STOP = "include_stop_str_in_output"
"""vLLM's name for an answer with the stop string that ended it."""
OF_THE_RUN = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "chat_template_kwargs"}
"""Settings that a run has for all its rollouts."""
HONOURED = {
    "model",
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "stream_options",
    WITH_STOP,
}
NO_MATTER = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Keys that do not change an answer."""
_UNENFORCED = "the policy's answers are not constrained; ask for the form in the prompt, and reward it"
_UNAVAILABLE = "answers have no log-probabilities; leave it out"
_PENALTY = "not supported; leave it out (the run has repetition_penalty)"
REFUSED = {
    "response_format": _UNENFORCED,
    "structured_outputs": _UNENFORCED,
    "guided_json": _UNENFORCED,
    "guided_regex": _UNENFORCED,
    "guided_choice": _UNENFORCED,
    "guided_grammar": _UNENFORCED,
    "logprobs": _UNAVAILABLE,
    "top_logprobs": _UNAVAILABLE,
    "prompt_logprobs": _UNAVAILABLE,
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "logit_bias": "not supported; leave it out",
    "functions": "deprecated by OpenAI; use tools",
    "function_call": "deprecated by OpenAI; use tool_choice",
}


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a request changes: tools, limits of its answer. Raises ValueError on a refused one."""
    for key, remedy in REFUSED.items():
        value = given.get(key)
        if value and value != {"type": "text"}:
            raise ValueError(f"{key}: {remedy} (got {_shown(value)})")
    if given.get("n") not in (None, 1):
        raise ValueError(f"n: one answer per request; send several requests (got {_shown(given['n'])})")
    choice = given.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ValueError(
            f"tool_choice: a call cannot be forced; use auto or none, and reward the call (got {_shown(choice)})"
        )
    return {
        "tools": () if choice == "none" else tools_of(given.get("tools")),
        "one_call": given.get("parallel_tool_calls") is False,
        "with_stop": bool(given.get(WITH_STOP)),
        "max_tokens": _max_tokens(given),
        "stop": _stop(given.get("stop")),
    }


def without_effect(given: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Return the given settings that the run has instead, and those that nothing here has."""
    names = {key for key, value in given.items() if value is not None}
    return names & OF_THE_RUN, names - OF_THE_RUN - HONOURED - NO_MATTER - REFUSED.keys() - {"n"}


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    limits = []
    for key in ("max_tokens", "max_completion_tokens"):
        value = given.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key}: must be at least 1 (got {_shown(value)})")
        limits.append(value)
    return min(limits, default=None)


def _stop(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop: give a text or a list of texts, none empty (got {_shown(given)})")
    return tuple(texts)


def _shown(value: Any) -> str:
    return repr(value)[:80]
