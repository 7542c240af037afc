"""Samples of a run for its page: text, its tokens, and the decisions of gates with their places.

Shapes: N is the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..base.sanitize import plain
from ..env.chat import common_prefix
from ..env.prompting import decode
from ..types import Decision, Group, Rollout, Token, Turn

SIBLINGS, SIBLING_TEXT = 7, 300
"""Further siblings in a sample, and characters of each."""
MAX_TOKENS = 256
"""Tokens of a sample with log-probabilities."""
MAX_DECISIONS = 16
"""Gate decisions written for a rollout."""
MAX_SEGMENTS, SEGMENT_TEXT = 16, 300
"""Segments after the first written for a rollout, and characters of the new part of each prompt."""
LAST_OBSERVATION = 10_000
"""Characters written of an observation that no turn follows."""
UNFINISHED = "\ufffd"
"""A decoder's placeholder for an incomplete character."""


def sample(step: int, group: Group, split: str, tokenizer: Any = None) -> dict[str, Any]:
    """Return a line of samples.jsonl: the group's first rollout, and beginnings and rewards of the others.

    `turns` needs a `tokenizer`. Each has its start `at` in the completion, and for its tokens `chars` and `logp` (nats,
    under the distribution of the draw; null: not sampled by the model). Of decisions about the whole group, siblings
    have only the cut. Only a rollout of several segments has `segments`, their number, and the rest of `_segments`.
    """
    r, prompt = group.rollouts[0], group.prompt
    others = [s for s in group.siblings if s is not r][:SIBLINGS]
    cuts = [d for d in group.decisions if not d.verdict.keep]
    return {
        "step": step,
        "visit": group.visit.number,
        "prompt_id": prompt.id,
        "epoch": group.visit.epoch,
        "sibling": r.sibling,
        "prompt": prompt.text if prompt.messages is None else plain(prompt.messages, str),
        "completion": _completion(r),
        "reward": r.reward,
        "rewards": r.rewards,
        **_extra(r),
        "group_rewards": [s.reward for s in group.siblings],
        "fate": str(r.fate) if r.fate else None,
        "reason": r.reason,
        "stop_reason": r.stop_reason,
        "tokens": int(r.action_mask.sum()),
        "split": split,
        "turns": _turns(r, tokenizer),
        "decisions": _decisions(group.decisions, r, tokenizer),
        **_segments(r, tokenizer),
        "siblings": [
            {
                "reward": s.reward,
                "fate": str(s.fate) if s.fate else None,
                "completion": s.text[:SIBLING_TEXT],
                **_extra(s),
                "decisions": _decisions(cuts, s, tokenizer),
            }
            for s in others
        ],
    }


def _completion(r: Rollout) -> str:
    """Return a rollout's text, with the beginning of its last observation, which may be any number of tokens."""
    last = r.turns[-1].observation if r.turns else None
    over = len(last or "") - LAST_OBSERVATION
    return r.text if over <= 0 else r.text[:-over] + "…"


def _extra(r: Rollout) -> dict[str, Any]:
    """Return values passed to `log_extra`, by column."""
    return {"extra": r.extra} if r.extra else {}


def token_chars(tokenizer: Any, ids_N: np.ndarray) -> list[int]:
    """Return the number of characters that each of `ids_N` adds to the decoded text.

    0 for tokens that `decode` leaves out. A character split over tokens counts for the token that completes it.
    """
    ends = accumulate(_lengths(tokenizer, [ids_N[: i + 1] for i in range(len(ids_N))]), max)
    return np.diff([0, *ends]).tolist()


def _lengths(tokenizer: Any, sequences: Sequence[np.ndarray]) -> list[int]:
    return [len(text.rstrip(UNFINISHED)) for text in decode(tokenizer, sequences)]


def _places(r: Rollout) -> list[tuple[int, Turn]]:
    """Return turns with their starts in the text. A rollout without turns counts as one."""
    turns = r.turns or [Turn(r.text, None, 0, len(r.token_ids), r.stop_reason)]
    ends = accumulate(len(t.action) + len(t.observation or "") for t in turns)
    return list(zip([0, *ends], turns, strict=False))


def _turns(r: Rollout, tokenizer: Any) -> list[dict[str, Any]]:
    """Return tokens by turn; empty if log-probabilities are unknown or all 0, or tokens do not give the text."""
    if tokenizer is None or not r.sampler_logp.any():
        return []
    if not r.turns and decode(tokenizer, [r.token_ids]) != [r.text]:
        return []
    found, left = [], MAX_TOKENS
    for at, turn in _places(r):
        tokens = slice(turn.start, min(turn.stop, turn.start + left))
        ends = [min(end, len(turn.action)) for end in accumulate(token_chars(tokenizer, r.token_ids[tokens]))]
        chars = np.diff([0, *ends]).tolist()
        logp = zip(r.sampler_logp[tokens].tolist(), r.action_mask[tokens].tolist(), strict=True)
        found.append({"at": at, "chars": chars, "logp": [_rounded(v, 2) if sampled else None for v, sampled in logp]})
        left -= len(chars)
        if not left:
            break
    return found


def _segments(r: Rollout, tokenizer: Any) -> dict[str, Any]:
    """Return the number of segments, the first one's agent, and what changed in the prompt of each `later` one.

    `char` is its place in the text. Its first `shared` prompt tokens begin segment `like`, too: the one before it that
    shares most, with its prompt and tokens. `new` is the beginning of the rest as text.
    """
    if not r.later_segments:
        return {}
    places = _places(r)
    later: list[dict[str, Any]] = []
    earlier: list[np.ndarray] = []
    for part, segment in zip(r.parts()[: MAX_SEGMENTS + 1], r.segments, strict=False):
        prompt_N = np.array(part.prompt_ids, np.int64)
        if earlier:
            shared, like = max((common_prefix(prompt_N, ids), n) for n, ids in enumerate(earlier))
            new = "" if tokenizer is None else decode(tokenizer, [prompt_N[shared:]])[0]
            if len(new) > SEGMENT_TEXT:
                new = new[:SEGMENT_TEXT] + "…"
            char = next((at for at, turn in places if turn.start >= segment.start), len(r.text))
            counts = {"prompt_tokens": len(prompt_N), "shared": shared, "like": like}
            later.append({"agent": segment.agent, "char": char, **counts, "new": new})
        earlier.append(np.concatenate([prompt_N, part.token_ids]))
    return {"segments": len(r.segments), "agent": r.agent, "later": later}


def _decisions(about_group: Sequence[Decision], r: Rollout, tokenizer: Any) -> list[dict[str, Any]]:
    """Return gate decisions on a rollout or its group, ordered by `char`, their place in its text."""
    if r.greedy:
        return []
    places = _places(r)
    found = [_decision(d, r, places, tokenizer) for d in (*about_group, *r.decisions)[:MAX_DECISIONS]]
    return sorted(found, key=lambda d: d["char"])


def _decision(d: Decision, r: Rollout, places: Sequence[tuple[int, Turn]], tokenizer: Any) -> dict[str, Any]:
    """Return a decision. `char` is the end of its token, or of the answer to its environment step."""
    v = d.verdict
    char, point = len(r.text), {"step": d.turn}
    if d.turn < len(places):
        char, turn = places[d.turn]
    if isinstance(d.at, Token):
        point = {"turn": d.turn, "token": d.at.n}
        if d.turn < len(places) and tokenizer is not None:
            (n,) = _lengths(tokenizer, [r.token_ids[turn.start : min(turn.stop, turn.start + d.at.n)]])
            char += min(n, len(turn.action))
    numbers = {k: _rounded(float(e), 4) for k, e in v.evidence.items() if isinstance(e, int | float | np.number)}
    said = {"keep": v.keep, "reason": v.reason, "probability": v.probability, "overridden": v.override_probability}
    return {"gate": d.gate, **point, "char": char, **said, "evidence": numbers}


def _rounded(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None
