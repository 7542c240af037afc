"""One prompt as the model sees it, for the plan, a run's start and its page; and a warning about plain text."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..base.sanitize import visible
from ..env.base import Task
from ..env.chat import MARK, rendered
from ..env.prompting import encode_prompt
from ..types import Prompt
from .agents import AgentTask

TRIED = 16
"""Prompts tried; the first that can be encoded is shown."""
HEAD, TAIL = 160, 80
"""Characters shown of a longer prompt, from its beginning and its end."""
_OPENING = re.compile(r"(</?[^<>/|\uff5c\s]+>|\[[A-Z_]+\])\s*$")
"""A tag of the answer's format, and no mark of a turn, such as `<|assistant|>`."""


@dataclass(frozen=True)
class PromptExample:
    """A training prompt with its special tokens, and what follows it before the policy samples."""

    id: str
    text: str
    tokens: int
    follows: str | None

    @property
    def opening(self) -> str:
        """Return the tag in which the prompt ends, e.g. `<think>`; empty if it ends in none."""
        match = _OPENING.search(self.text)
        return match[1] if match else ""

    def line(self) -> str:
        """Return the line a run prints at its start."""
        more = f", then {self.follows}" if self.follows else ""
        return f"prompt '{visible(self.id)}' ({self.tokens} tokens{more}): {on_one_line(self.text)}"


def on_one_line(text: str) -> str:
    """Format a text for a console: line ends as `\\n`, the middle of a long one left out."""
    text = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} [...] {text[-TAIL:]}"


def prompt_example(task: Task, tokenizer: Any) -> PromptExample | None:
    """Return the first training prompt that can be encoded, without starting an environment; None if an agent writes
    the prompts."""
    if isinstance(task, AgentTask):
        return None
    for prompt in task.train[:TRIED]:
        with suppress(ValueError):
            ids = list(encode_prompt(tokenizer, prompt))
            text = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            follows = "the environment's first observation, if it has one" if task.max_turns > 1 else None
            return PromptExample(prompt.id, text, len(ids), follows)
    return None


def warn_of_plain_text(task: Task, tokenizer: Any) -> None:
    """Warn that a chat model gets text prompts without its template."""
    first = task.train[0]
    if first.messages is not None or not getattr(tokenizer, "chat_template", None) or isinstance(task, AgentTask):
        return
    if not _looks_rendered(first, tokenizer):
        warnings.warn(
            f"prompt '{first.id}' is plain text, to which the model's chat template is not applied; for a chat give "
            'messages, [{"role": "user", "content": ...}], or set system_prompt; ignore this if that is intended',
            stacklevel=2,
        )


def _looks_rendered(prompt: Prompt, tokenizer: Any) -> bool:
    """Whether the text has a special token of the template, or what it writes before an answer."""
    text = prompt.text or ""
    try:
        shown = rendered(tokenizer, [{"role": "user", "content": MARK}])
    except Exception:  # a template that wants other messages
        return False
    special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special and t.content in shown]
    ready = shown.rpartition(MARK)[2].strip().splitlines()
    return any(mark in text for mark in special if mark != tokenizer.bos_token) or bool(ready and ready[-1] in text)
