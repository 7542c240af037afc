"""The prompt of the next turn: the tokens so far with an observation behind them, or a segment of its own.

A segment begins where the next prompt does not continue the tokens that the policy has had: an agent edited or
compacted its messages, asked with other tools, or went on with an earlier conversation; or the chat template, with
`history: template`, leaves out parts of earlier turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..env.chat import is_begun
from ..env.prompting import NextMessages, PromptError, encode_observation, encode_prompt, first_messages, with_messages
from ..types import Job, Message, Prompt
from .in_flight import Sibling
from .options import RolloutOptions

MOST_TEXTS = 10_000
"""Text prompts whose tokens are kept; later ones are encoded at every visit."""

LONG_TEXT, CHARS_PER_TOKEN = 65_536, 16
"""Characters of an observation, and of a token of its room, beyond which its beginning is encoded first: seconds for
each megabyte."""


class PromptTokens:
    """Tokens of first prompts. A text without an observation is encoded once in a run."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._of_text: dict[str, tuple[int, ...]] = {}

    def of(self, job: Job, observation: str | None, options: RolloutOptions) -> tuple[int, ...]:
        """Return what `encode_prompt` does. Raises PromptError where that is longer than `max_prompt_length`, except
        for a probe, which gets the last tokens: engine and learner can be compared on any text."""
        if not isinstance(observation, str | None):
            raise TypeError(f"reset() must return a text or None, not {type(observation).__name__}")
        prompt = job.visit.prompt
        ids = self._encoded(prompt, observation)
        if job.purpose == "probe":
            return ids[-options.longest_prompt :]
        if len(ids) > (limit := options.max_prompt_length):
            raise PromptError(f"prompt '{prompt.id}' has {len(ids)} tokens, over max_prompt_length={limit}")
        return ids

    def _encoded(self, prompt: Prompt, observation: str | None) -> tuple[int, ...]:
        if prompt.text is None or prompt.messages is not None or observation is not None:
            return encode_prompt(self._tokenizer, prompt, observation)
        ids = self._of_text.get(prompt.text)
        if ids is None:
            ids = encode_prompt(self._tokenizer, prompt)
            if len(self._of_text) < MOST_TEXTS:
                self._of_text[prompt.text] = ids
        return ids


def begin(sibling: Sibling, prompt: Prompt, observation: str | None) -> None:
    """Remember the messages of a first prompt, to render them again with later turns."""
    if isinstance(observation, NextMessages):
        sibling.rollout.agent, sibling.settings = observation.agent, observation.settings
    elif prompt.messages is not None:
        messages = first_messages(prompt, observation)
        if len(messages) > 1 and is_begun(messages):
            sibling.begun = str(messages.pop()["content"])
        sibling.messages = messages


def append_or_restart(
    tokenizer: Any, prompt: Prompt, sibling: Sibling, observation: str, *, template: bool, room: int
) -> None:
    """Add an observation to the sibling: as tokens behind its last turn, or as the prompt of a new segment.

    `template`: let the chat template render all messages. `room`: tokens that fit; of an observation far beyond them
    only the beginning may be added, which is beyond them as well. Raises PromptError when the template refuses them.
    """
    request = observation if isinstance(observation, NextMessages) else NextMessages((), agent=sibling.current_agent)
    sibling.settings = request.settings
    whole, request.whole = request.whole, ()  # else every turn would keep all messages before it
    same_agent = request.agent == sibling.current_agent
    if request.continues is None or (template and whole):
        following = encode_prompt(tokenizer, with_messages(prompt, whole, request.tools))
    elif template and sibling.messages is not None:
        following = _rendered(tokenizer, prompt, sibling, observation)
    else:
        sampled = sibling.last_sampled(request.continues)
        if request.continues == -1 and same_agent:
            _append(sibling, _encoded(tokenizer, prompt, observation, sampled, room))
            return
        added = encode_observation(tokenizer, prompt, observation, sampled)
        following = (*sibling.context(request.continues), *added)
    before = sibling.context()
    if template and same_agent and following[: len(before)] == before:
        _append(sibling, following[len(before) :])
    else:
        sibling.restart(following, request.agent)


def _encoded(tokenizer: Any, prompt: Prompt, observation: str, sampled: np.ndarray, room: int) -> list[int]:
    if len(observation) > (most := max(LONG_TEXT, CHARS_PER_TOKEN * room)):
        ids = encode_observation(tokenizer, prompt, _beginning(observation, most), sampled)
        if len(ids) > 2 * room:
            return ids
    return encode_observation(tokenizer, prompt, observation, sampled)


def _beginning(observation: str, most: int) -> str:
    """Return an observation with at most so many characters, of messages in each."""
    if not isinstance(observation, NextMessages):
        return observation[:most]
    messages = [{**m, "content": m["content"] and m["content"][:most]} for m in observation.messages]
    return NextMessages(messages, observation.tools)


def _rendered(tokenizer: Any, prompt: Prompt, sibling: Sibling, observation: str) -> tuple[int, ...]:
    """Return all messages as the chat template shows them, the last turn and the observation included."""
    assert sibling.messages is not None
    turn = sibling.rollout.turns[-1]
    message = turn.message or {"role": "assistant", "content": turn.action}
    added: tuple[Message, ...] = ({"role": "user", "content": observation},)
    if isinstance(observation, NextMessages):
        added = observation.messages
    sibling.messages += [{**message, "content": sibling.begun + str(message["content"] or "")}, *added]
    sibling.begun = ""
    return encode_prompt(tokenizer, with_messages(prompt, sibling.messages, prompt.tools))


def _append(sibling: Sibling, ids: Sequence[int]) -> None:
    n = len(ids)
    sibling.append(np.array(ids, np.int64), False, np.zeros(n, np.float32), np.full(n, -1, np.int32))
