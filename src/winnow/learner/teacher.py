"""Distillation on the policy's own rollouts: a teacher's log-probabilities of the sampled tokens.

The advantage of a token gets weight * (log teacher - log policy), the policy being that of the update. Its policy
gradient is that of -KL(policy || teacher), token by token at the states that the policy visits (Agarwal et al.
2306.13649 with the reverse KL; Lu et al. 2025, On-Policy Distillation). Only rows of the batch are asked about: what a
selector skipped, a gate cut or a filter dropped costs the teacher nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..base.errors import ConfigError
from ..base.seconds import now
from ..base.weights import weights_digest
from ..config.options import TeacherConfig
from ..engine.loading import CPU, load_causal_lm, load_tokenizer, require_finite
from ..env.base import Task, has_no_environment
from ..env.chat import text_of
from ..env.prompting import encode_prompt
from ..types import Group, Prompt
from .base import Learner, Policy
from .context import LearnerContext
from .local.eval_mode import halve_frozen
from .local.logprob import TokenDistribution
from .local.scorer import Scorer
from .rows import Row
from .teacher_server import TeacherServer

Ask = Callable[[Sequence[Row]], Sequence[torch.Tensor]]
"""Returns the log-probabilities [A] (nats) of each row's A action tokens."""


@dataclass(frozen=True)
class Teacher:
    """Scores the rows of a batch."""

    ask: Ask
    n_positions: int | None = None
    """Most tokens of a row; None: unlimited."""
    hint: Callable[[Prompt], tuple[int, ...]] | None = None
    """Token ids that the teacher reads instead of a prompt; None: the prompt."""
    digest: str = ""
    """What a resume compares; empty for the policy itself."""

    def score(self, rows: Sequence[Row], groups: Sequence[Group]) -> tuple[list[Row], dict[str, float]]:
        """Return the rows of these groups with `teacher_logp`, and metrics.

        Raises FloatingPointError when a log-probability is not finite, ConfigError when a row is too long.
        """
        started = now()
        seen = self._as_seen(rows, groups)
        logps = self.ask(seen)
        seconds = now() - started
        scored = []
        for row, logp in zip(rows, logps, strict=True):
            values_A = logp.detach().float().cpu().numpy()
            if not np.isfinite(values_A).all():
                where = int(np.flatnonzero(~np.isfinite(values_A))[0])
                raise FloatingPointError(
                    f"teacher: the log-probability of sampled token {where} of a rollout is {values_A[where]}; no "
                    "update was made"
                )
            scored.append(replace(row, teacher_logp=values_A))
        read = sum(row.length for row in seen)
        return scored, {"teacher/tokens": float(read), "seconds/update/teacher": seconds}

    def _as_seen(self, rows: Sequence[Row], groups: Sequence[Group]) -> list[Row]:
        """Return the rows as the teacher reads them."""
        seen = list(rows)
        if self.hint is not None:
            prompts = {id(rollout): group.prompt for group in groups for rollout in group.rollouts}
            hints: dict[str, tuple[int, ...]] = {}
            for n, row in enumerate(rows):
                prompt = prompts[id(row.rollout)]
                ids = hints.get(prompt.id) or hints.setdefault(prompt.id, self.hint(prompt))
                seen[n] = replace(row, rollout=replace(row.rollout, prompt_ids=ids))
        longest = max((row.length for row in seen), default=0)
        if self.n_positions is not None and longest > self.n_positions:
            raise ConfigError(
                f"teacher: has {self.n_positions} positions, and a rollout with the teacher's prompt has {longest} "
                "tokens; shorten teacher.prompt, or lower max_completion_length"
            )
        return seen


def build_teacher(
    c: TeacherConfig, learner: Learner, policy: Policy, task: Task, context: LearnerContext, longest: int
) -> Teacher:
    """Build the teacher of a run. Raises ConfigError when it cannot teach this policy.

    `context`: what the learner was built from. `longest`: most tokens of a rollout with its prompt.
    """
    teacher = _teacher(c, learner, policy, task, context)
    longest = min(longest, learner.sizes.max_length or longest)
    if teacher.n_positions is not None and teacher.n_positions < longest:
        raise ConfigError(
            f"teacher: has {teacher.n_positions} positions, and a rollout with its prompt may have {longest} tokens; "
            "lower max_prompt_length or max_completion_length, or choose another teacher"
        )
    return teacher


def _teacher(c: TeacherConfig, learner: Learner, policy: Policy, task: Task, context: LearnerContext) -> Teacher:
    tokenizer, options = policy.tokenizer, context.options_for(policy)
    hint = None if c.prompt is None else _hint(c.prompt, tokenizer, task)
    if c.url is not None:
        server = TeacherServer.connect(c.url, c.model, c.timeout_s)
        server.require_same_tokens(tokenizer, learner.sizes.vocab_size)
        return Teacher(server.logp, server.n_positions or None, hint, f"{server.model} at a server")
    if c.model is None:
        ask = learner.logp if c.adapter else learner.reference_logp
        return Teacher(ask, learner.sizes.max_length, hint)
    n_tokens = learner.sizes.vocab_size
    model = load_causal_lm(c.model, CPU)
    require_finite(model, c.model)
    _require_same_vocabulary(c.model, model, tokenizer, n_tokens)
    digest = weights_digest(model.state_dict())
    model.requires_grad_(False)
    if learner.device.type == "cuda" and options.compute_dtype == torch.bfloat16:
        halve_frozen(model)
    scorer = Scorer(model.to(learner.device), TokenDistribution(n_tokens, context.sampling.temperature), options)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Teacher(scorer.logp, positions, hint, digest)


def _require_same_vocabulary(source: str, model: Any, tokenizer: Any, n_tokens: int) -> None:
    """Raise ConfigError unless every id that the policy samples is the same token for the teacher."""
    own, theirs = (
        {i: token for token, i in each.get_vocab().items() if i < n_tokens}
        for each in (tokenizer, load_tokenizer(source))
    )
    rows = model.get_output_embeddings().weight.shape[0]
    if rows < n_tokens:
        raise ConfigError(f"teacher: {source} has {rows} tokens, and the policy {n_tokens}; choose one of its family")
    different = [i for i in sorted(own.keys() | theirs.keys()) if own.get(i) != theirs.get(i)]
    if different:
        i = different[0]
        raise ConfigError(
            f"teacher: {source} has another vocabulary: token {i} is {theirs.get(i)!r}, and {own.get(i)!r} for the "
            f"policy ({len(different)} of {n_tokens} differ); choose a teacher of the policy's family"
        )


def _hint(template: str, tokenizer: Any, task: Task) -> Callable[[Prompt], tuple[int, ...]]:
    """Return the function to the ids of a prompt as the teacher reads it. Raises ConfigError if it cannot be shown."""
    if not has_no_environment(task):
        raise ConfigError(
            "teacher: prompt: the task has an environment, whose answers are part of the prompt; leave prompt out, or "
            "choose a task of one turn"
        )

    def hint(prompt: Prompt) -> tuple[int, ...]:
        return encode_prompt(tokenizer, hinted(prompt, template))

    if len(task.train):
        hint(task.train[0])
    return hint


def hinted(prompt: Prompt, template: str) -> Prompt:
    """Return the prompt with its text, or its last user's message, as the template shows it.

    Raises ConfigError naming a column that the prompt lacks.
    """
    messages = list(prompt.messages or ())
    last = next((n for n in reversed(range(len(messages))) if messages[n]["role"] == "user"), None)
    if messages and last is None:
        raise ConfigError(f"teacher: prompt: prompt '{prompt.id}' has no message of a user")
    content: Any = prompt.text if last is None else messages[last]["content"]
    if isinstance(content, list | tuple):
        content = "".join(text_of(part) for part in content)
    try:
        text = template.format_map({**prompt.columns, "prompt": content})
    except KeyError as error:
        known = ", ".join(sorted(prompt.columns)) or "none"
        raise ConfigError(f"teacher: prompt: prompt '{prompt.id}' has no column {error}; it has: {known}") from None
    except (IndexError, ValueError, AttributeError) as error:
        raise ConfigError(f"teacher: prompt: {template!r} cannot be filled in: {error}") from None
    if last is None:
        return replace(prompt, text=text)
    messages[last] = {**messages[last], "content": text}
    return replace(prompt, messages=tuple(messages))
