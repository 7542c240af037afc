"""TRL's tensors, row by row and as the rectangular batch that it trains on.

TRL has one row for a rollout: the first segment's prompt, and the tokens of all segments. For its log-probabilities
each segment is a row with its own prompt; they return to the rollout's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..base.errors import ConfigError
from ..types import Rollout

PADDED_LEFT, PADDED_RIGHT = ("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask", "tool_mask")
BY_TOKEN = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
TOKEN_MEANS = ("dapo", "cispo", "vespo")
"""Losses of TRL that average over the tokens of the batch; the others average over rows."""

Tensors = dict[str, torch.Tensor]


def check_tensors(output: Mapping[str, Any]) -> None:
    """Raise ConfigError on tensors that do not belong to text."""
    unknown = set(output) - {*PADDED_LEFT, *PADDED_RIGHT, *BY_TOKEN, "advantages", "num_items_in_batch"}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ConfigError(f"train_dataset: Winnow inside TRL works on text only ({names}); remove other inputs")


def row_of(output: Mapping[str, torch.Tensor], i: int, length: int) -> Tensors:
    """Return TRL's tensors of row `i` without padding: prompts [P], completions [T]; advantages []."""
    prompt = output["prompt_mask"][i].bool()
    row = {key: output[key][i][prompt] for key in PADDED_LEFT} | {"advantages": output["advantages"][i]}
    for key in (*PADDED_RIGHT, *BY_TOKEN):
        if key in output:
            whole = output[key][i]
            row[key] = whole if whole.shape == (1,) else whole[:length]  # a ratio may be one of the sequence
    return row


def mask_rows(output: Tensors, left_out_B: np.ndarray) -> None:
    """Leave rows out of the loss, as TRL's `mask_truncated_completions` does."""
    rows = torch.from_numpy(left_out_B).to(output["completion_mask"].device)
    for key in ("completion_mask", "tool_mask"):
        if key in output:
            output[key] = output[key].masked_fill(rows.unsqueeze(1), 0)


def batch_of(
    rows: Sequence[Tensors],
    advantages_N: np.ndarray,
    times_N: np.ndarray,
    *,
    loss_type: str,
    empty: Sequence[Tensors],
    pad_token: int,
    multiple_of: int = 1,
) -> Tensors:
    """Return N rows, then the `empty` ones, as a rectangle padded as TRL pads.

    Each row counts as `times_N` of the N rows that the loss averages over, an empty one as 0: the loss equals TRL's on
    the N rows alone. Lengths are a multiple of `multiple_of`, as TRL's `pad_to_multiple_of`.
    """
    n, total = len(rows), len(rows) + len(empty)
    merged = _merged([*rows, *empty], pad_token, multiple_of)
    merged["completion_mask"][n:] = 0
    times_N = times_N if loss_type in TOKEN_MEANS or not n else times_N * total / n
    device = merged["completion_mask"].device
    weighted = np.concatenate([advantages_N * times_N, np.zeros(total - n)])
    merged["advantages"] = torch.tensor(weighted, dtype=torch.float32, device=device)
    tokens = (merged["completion_mask"] * merged.get("tool_mask", 1)).sum()
    return merged | {"num_items_in_batch": tokens}


def _merged(rows: Sequence[Tensors], pad_token: int, multiple_of: int) -> Tensors:
    """Merge rows of several generations into one rectangle, padded on the side TRL pads."""
    merged = {}
    fills = {"prompt_ids": pad_token, "completion_ids": pad_token, "tool_mask": 1}
    fills["importance_sampling_ratio"] = 1  # VESPO multiplies those of all positions
    for key in rows[0].keys() - {"advantages"}:
        longest = max(len(row[key]) for row in rows)
        if not (key == "importance_sampling_ratio" and longest == 1):  # of the sequence
            longest += -longest % multiple_of
        fill = fills.get(key, 0)
        missing = [longest - len(row[key]) for row in rows]
        sides = [(n, 0) if key in PADDED_LEFT else (0, n) for n in missing]
        merged[key] = torch.stack([pad(row[key], side, value=fill) for row, side in zip(rows, sides, strict=True)])
    return merged


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
