"""Pass rates by prompt, one JSON line each: `winnow pass-rates` writes them, the selector `pass_rate` reads them.

    {"id": "countdown-17", "n": 16, "correct": 3, "mean_reward": 0.1875}

`n` counts judged rollouts only: a failed rollout is never a reward of 0. A prompt without a judged rollout has no line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..base.files import bytes_of
from ..config.errors import explain
from ..env.rewards.scores import MAX_REWARD

BINS = ("0", *(f"({i / 10:g}, {(i + 1) / 10:g}]" for i in range(9)), "(0.9, 1)", "1")
"""Bins of `histogram`. Dead (0) and solved (1) prompts have their own bins."""


class ProfileError(ValueError):
    """An unusable profile; the message names the file, the line and the key, or the difference."""


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, extra="forbid"))
class PassRate:
    """Pass rate of a prompt. Raises ValueError, naming the field, on impossible values."""

    id: Annotated[str, Field(min_length=1)]
    n: PositiveInt
    """Judged rollouts; prompts without one are left out."""
    correct: NonNegativeInt
    """Judged rollouts with at least the success reward."""
    mean_reward: Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]

    def __post_init__(self) -> None:
        if self.correct > self.n:
            raise ValueError(f"correct must be 0 to n={self.n}, got {self.correct}")

    @property
    def rate(self) -> float:
        """Share of judged rollouts that are correct, 0 to 1."""
        return self.correct / self.n

    def line(self) -> str:
        """Return the JSON line, without its end."""
        return json.dumps(asdict(self), ensure_ascii=True, allow_nan=False)


_PASS_RATE = TypeAdapter(PassRate)
_KEYS = ("id", "n", "correct", "mean_reward")


def read_profile(path: str | Path) -> dict[str, PassRate]:
    """Return pass rates by prompt id, in file order.

    Raises OSError when the file cannot be read. Raises ProfileError, naming file, line and key, on a line that is not a
    pass rate, an id with two different lines, and a file without any line.
    """
    path = Path(path)
    try:
        content = bytes_of(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such profile; make it with `winnow pass-rates MODEL -o {path}`") from None
    rates = parse_profile(content, path)
    if not rates:
        raise ProfileError(f"{path}: holds no pass rate; finish it with `winnow pass-rates MODEL -o {path}`")
    return rates


def parse_profile(content: bytes, path: Path) -> dict[str, PassRate]:
    """Parse like `read_profile`; an empty file is an empty profile."""
    rates: dict[str, PassRate] = {}
    first: dict[str, int] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        rate = _parse_line(line, f"{path}, line {number}")
        known = rates.setdefault(rate.id, rate)
        if known != rate:
            raise ProfileError(
                f"{path}, line {number}: id {rate.id!r} has {_counts(rate)} here, but {_counts(known)} in line "
                f"{first[rate.id]}; keep one of them"
            )
        first.setdefault(rate.id, number)
    return rates


def _parse_line(line: bytes, where: str) -> PassRate:
    try:
        return _PASS_RATE.validate_json(line)
    except ValidationError as error:
        remedy = ""
        if error.errors()[0]["type"] == "json_invalid":
            remedy = (
                ". The last line of a profile that was interrupted: run the same `winnow pass-rates` again, which "
                "finishes it"
            )
        raise ProfileError(explain(error, _KEYS, where) + remedy) from None


def _counts(rate: PassRate) -> str:
    return f"{rate.correct} of {rate.n} correct (mean reward {rate.mean_reward:g})"


def histogram(rates: Iterable[PassRate]) -> list[int]:
    """Return the number of prompts in each of `BINS`. Exact: no rounding moves a prompt over an edge."""
    counts = [0] * len(BINS)
    for r in rates:
        counts[-1 if r.correct == r.n else -(-10 * r.correct // r.n)] += 1
    return counts


def summary(rates: Sequence[PassRate]) -> dict[str, Any]:
    """Return `profiled`, of which `dead` (never solved), `solved` (always), `in_band` (neither); `mean_pass_rate`."""
    counts = histogram(rates)
    return {
        "profiled": len(rates),
        "dead": counts[0],
        "solved": counts[-1],
        "in_band": sum(counts[1:-1]),
        "mean_pass_rate": math.fsum(r.rate for r in rates) / len(rates) if rates else None,
    }
