"""Samples for a report: thinned to a limit, with their tokens and gate decisions placed in the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

from ..base.sanitize import plain, visible
from ..methods.gate.base import ALONE, OVERRIDE

SAMPLE_KEYS = (
    *("step", "visit", "prompt_id", "epoch", "sibling", "reward", "fate", "reason", "stop_reason", "tokens"),
    *("segments", "split"),
)
MAX_SIBLINGS = 16
MAX_SEGMENTS, MAX_SEGMENT_TEXT = 16, 1_000
MAX_TEXT = 4_000
"""Characters kept of a prompt or completion."""
NAMES = {"q": "predicted success", "chance": "survival"}
"""Readers' names for a gate's evidence."""
UNSAID = {ALONE, OVERRIDE}
"""Evidence that is not shown."""


def thin_samples(lines: Iterator[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return samples thinned to about `limit`: every kind (split, fate) evenly over the run."""
    kinds: dict[tuple[str, str], _Thinned] = {}
    for line in lines:
        kind = str(line.get("split")), str(line.get("fate"))
        if kind in kinds or len(kinds) < 32:
            kinds.setdefault(kind, _Thinned(limit)).add(line)
    share = max(1, limit // max(1, len(kinds)))
    kept = [line for thinned in kinds.values() for line in thinned.spread(share)]
    return sorted((_sample(line) for line in kept), key=lambda s: (_number(s["step"]), _number(s["visit"])))


class _Thinned:
    """Every n-th of a stream, n doubling so that it never holds `2 * limit` or more."""

    def __init__(self, limit: int) -> None:
        self.limit, self.stride, self.seen = limit, 1, 0
        self.kept: list[dict[str, Any]] = []

    def add(self, item: dict[str, Any]) -> None:
        if self.seen % self.stride == 0:
            self.kept.append(item)
        self.seen += 1
        if len(self.kept) >= 2 * self.limit:
            self.kept = self.kept[::2]
            self.stride *= 2

    def spread(self, n: int) -> list[dict[str, Any]]:
        step = max(1, len(self.kept) / n)
        return [self.kept[int(i * step)] for i in range(min(n, len(self.kept)))]


def _sample(line: Mapping[str, Any]) -> dict[str, Any]:
    sample = {key: plain(line.get(key)) for key in SAMPLE_KEYS}
    sample["prompt"] = _text(line.get("prompt"))
    sample["completion"] = _text(line.get("completion"))
    sample["turns"] = _turns(line)
    sample["marks"] = _marks(line)
    rewards = line.get("rewards")
    siblings = line.get("group_rewards")
    sample["group_rewards"] = plain(siblings[:64]) if isinstance(siblings, list) else []
    sample["siblings"] = [_sibling(s) for s in _dicts(line.get("siblings"))[:MAX_SIBLINGS]]
    sample["rewards"] = plain(rewards) if isinstance(rewards, dict) and len(rewards) > 1 else {}
    return sample


def _sibling(line: Mapping[str, Any]) -> dict[str, Any]:
    said = {"reward": plain(line.get("reward")), "fate": plain(line.get("fate"))}
    return said | {"completion": _text(line.get("completion")), "marks": _marks(line)}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _turns(line: Mapping[str, Any]) -> list[list[Any]]:
    """Return [start, characters of its tokens, their log-probabilities] of turns; older runs have no such data.

    Positions are in the text that the page shows, as JavaScript counts them.
    """
    text, found = line.get("completion"), []
    if not isinstance(text, str):
        return []
    for turn in _dicts(line.get("turns")):
        at, chars, logp = turn.get("at"), _all(turn.get("chars"), _count), _all(turn.get("logp"), _log)
        if _count(at) and chars and len(chars) == len(logp):
            pieces = [text[a:b] for a, b in pairwise(accumulate(chars, initial=at)) if a < MAX_TEXT]
            found.append([_width(text[:at]), [_width(piece) for piece in pieces], logp[: len(pieces)]])
    return [turn for turn in found if turn[1]]


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 10**9


def _log(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and -1e6 < value <= 0)


def _all(values: Any, good: Callable[[Any], bool]) -> list[Any]:
    """Return `values` if they are a list of good ones, else an empty list."""
    return values if isinstance(values, list) and all(map(good, values)) else []


def _marks(line: Mapping[str, Any]) -> list[list[Any]]:
    """Return [position in the text, `kept`, `overridden`, `stopped` or `segment`, label] of gates and segments.

    A position beyond the text is in the part that was left out.
    """
    text, found = line.get("completion"), []
    if not isinstance(text, str):
        return []
    for d in _dicts(line.get("decisions"))[:MAX_SIBLINGS]:
        char = d.get("char")
        if isinstance(char, int) and _count(char):
            stand = "stopped" if not d.get("keep") else "kept" if d.get("overridden") is None else "overridden"
            found.append([_place(char, text), stand, visible(_said(d, stand))])
    return sorted([*found, *_segments(line, text)], key=lambda mark: mark[0])


def _place(char: int, text: str) -> int:
    shown = text[:MAX_TEXT]
    return _width(shown[:char]) + (char > len(shown))


def _segments(line: Mapping[str, Any], text: str) -> list[list[Any]]:
    """Return a mark of each segment after the first: what its prompt has of earlier ones, and what is new."""
    marks = [(0, f"segment 1, agent {line['agent']}")] if line.get("agent") else []
    for number, segment in enumerate(_dicts(line.get("later"))[:MAX_SEGMENTS], 2):
        counts = _all([segment.get(name) for name in ("char", "prompt_tokens", "shared", "like")], _count)
        if not counts:
            continue
        char, tokens, shared, like = counts
        agent = f", agent {segment['agent']}" if segment.get("agent") else ""
        kept = f"the first {shared:,} as in segment {like + 1}" if shared else "none as in an earlier segment"
        new = f"\n{segment['new']}" if segment.get("new") else ""
        marks.append((char, f"segment {number}{agent}: {tokens:,} prompt tokens, {kept}{new}"))
    return [[_place(char, text), "segment", visible(label[:MAX_SEGMENT_TEXT])] for char, label in marks]


def _said(d: Mapping[str, Any], stand: str) -> str:
    """Return words and numbers of a decision; a reason already has the deciding numbers."""
    at = f"token {d['token']}" if "token" in d else f"environment step {d.get('step')}"
    verb = {"kept": f"kept at {at}", "overridden": f"let go on at {at}", "stopped": f"stopped at {at}"}[stand]
    evidence = d.get("evidence")
    numbers = [
        f"{NAMES.get(name, name)} {value:.3g}"
        for name, value in (evidence.items() if isinstance(evidence, dict) else ())
        if name not in UNSAID and isinstance(value, int | float)
    ]
    reason = str(d.get("reason") or "")
    return f"{d.get('gate')} {verb}: " + (reason or ", ".join(numbers) or "no numbers")


def _width(text: str) -> int:
    """Return the UTF-16 units of `text` as the page shows it."""
    return len(visible(text).encode("utf-16-le")) // 2


def _text(value: Any) -> str:
    """Return a string, or a list of messages as `role: content` paragraphs; long ones are cut with a mark."""
    if isinstance(value, list) and all(isinstance(m, dict) for m in value):
        value = "\n\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in value)
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = f" … ({len(text) - MAX_TEXT:,} more characters)" if len(text) > MAX_TEXT else ""
    return visible(text[:MAX_TEXT]) + cut


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else -1.0
