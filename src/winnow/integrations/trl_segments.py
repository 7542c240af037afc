"""Rollouts of several segments in TRL's log-probabilities.

TRL has one row for a rollout: the first segment's prompt, and the tokens of all segments. Here each segment is a row
with its own prompt, and its log-probabilities return to the rollout's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from ..types import Rollout

Logps = tuple[torch.Tensor, torch.Tensor | None, Any]
"""Log-probabilities [B, T] of the last T tokens, their entropies [B, T] or None, and what else TRL returns."""


class _Part(NamedTuple):
    row: int
    start: int
    """Index of its first token in the row's completion."""
    prompt_ids: torch.Tensor
    token_ids: torch.Tensor


def logps_by_segment(
    logps: Callable[[torch.Tensor, torch.Tensor, int], Logps],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    rollouts: Sequence[Rollout | None],
) -> Logps:
    """Return log-probabilities of TRL's rows, each segment's under its own prompt.

    `logps`: TRL's, of ids, attention mask and number of tokens. `rollouts`: those of the rows; None: an empty row.
    """
    parts = list(_parts(input_ids, attention_mask.bool(), logits_to_keep, rollouts))
    prompts, completions = [part.prompt_ids for part in parts], [part.token_ids for part in parts]
    ids = torch.cat([_prompts(prompts), _completions(completions)], dim=1)
    there_RT = _completions([torch.ones_like(tokens) for tokens in completions])
    there = torch.cat([_prompts([torch.ones_like(prompt) for prompt in prompts]), there_RT], dim=1)
    logp_RT, entropy_RT, more = logps(ids, there, there_RT.shape[1])
    part_N, at_N = there_RT.nonzero(as_tuple=True)
    row_R = torch.tensor([part.row for part in parts], device=ids.device)
    start_R = torch.tensor([part.start for part in parts], device=ids.device)

    def in_rows(values_RT: torch.Tensor) -> torch.Tensor:
        empty_BT = values_RT.new_zeros(len(input_ids), logits_to_keep)
        return empty_BT.index_put((row_R[part_N], start_R[part_N] + at_N), values_RT[part_N, at_N])

    return in_rows(logp_RT), None if entropy_RT is None else in_rows(entropy_RT), more


def _parts(
    input_ids: torch.Tensor, there: torch.Tensor, logits_to_keep: int, rollouts: Sequence[Rollout | None]
) -> Iterator[_Part]:
    for b, (ids, there_L, rollout) in enumerate(zip(input_ids, there, rollouts, strict=True)):
        prompt_ids = ids[:-logits_to_keep][there_L[:-logits_to_keep]]
        token_ids = ids[-logits_to_keep:][there_L[-logits_to_keep:]]
        if rollout is None or not rollout.later_segments:
            yield _Part(b, 0, prompt_ids, token_ids)
            continue
        start = 0
        for part in rollout.parts():
            stop = start + len(part.token_ids)
            if stop > start:
                yield _Part(b, start, torch.tensor(part.prompt_ids).to(ids), token_ids[start:stop])
            start = stop


def _prompts(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True, padding_side="left")


def _completions(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True)
