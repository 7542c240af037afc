"""Detect a collapsing run from its metrics: few rollouts dominate the updates; the policy has become deterministic; the
reward has fallen.

Under a large lag the effective sample size falls first and the reward follows (VCPO, section 3.1 and appendix A).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

Metrics = Mapping[str, float]
LOW = 0.3
"""Effective share of a batch's rollouts below which few of them dominate the update."""
PATIENCE = 5
"""Consecutive updates that must be so."""
ADVICE = "updates are dominated by few rollouts; lower max_lag, or use step_scale: ess"


ENTROPY = "sampling/entropy"
DETERMINISTIC = 0.1
"""Share of the first step's entropy below which the policy has collapsed, unless it solves most prompts."""


def ess_of(metrics: Metrics) -> float | None:
    """Return the effective share of the batch's rollouts or, if unknown, of those with a gradient."""
    return metrics.get("ess_ratio", metrics.get("ess_ratio/with_gradient"))


def low_ess(rows: Sequence[Metrics]) -> list[Metrics]:
    """Return the updates of the first window of at least `PATIENCE` with `ess_of` under `LOW`, or an empty list.

    Steps without an update are ignored.
    """
    window: list[Metrics] = []
    for row in rows:
        ess = ess_of(row)
        if ess is None:
            continue
        if ess < LOW:
            window.append(row)
        elif len(window) >= PATIENCE:
            break
        else:
            window = []
    return window if len(window) >= PATIENCE else []


def ess_message(window: Sequence[Metrics]) -> str:
    return (
        f"the effective sample size was under {LOW:.0%} of the rollouts for {len(window)} updates, from step "
        f"{window[0]['step']:.0f}: {ADVICE}"
    )


def entropy_message(rows: Sequence[Metrics], first: float) -> str | None:
    """Return a warning if all of `PATIENCE` steps had an entropy under `DETERMINISTIC` of the first step's, else None.

    A policy that solves most of the groups may well be deterministic.
    """
    low = [row for row in rows if row[ENTROPY] < DETERMINISTIC * first and row.get("frac_zero_easy", 0.0) < 0.5]
    if len(low) < PATIENCE:
        return None
    return (
        f"the policy has become nearly deterministic: the entropy is {low[-1][ENTROPY]:.2g} nats a token, {first:.2g} "
        "at the first step, so siblings repeat each other and fewer groups teach; raise temperature, epsilon_high or "
        "entropy_coef, or lower learning_rate"
    )


def reward_collapse(rows: Sequence[Metrics]) -> Metrics | None:
    """Return the first step after which the reward stays under half of its best.

    Both are means over the last twentieth of the steps, or the last `PATIENCE`; it must have stayed so for as long.
    """
    steps = [row for row in rows if "reward" in row]
    size = max(PATIENCE, len(steps) // 20)
    last: deque[float] = deque(maxlen=size)
    best, fallen = 0.0, len(steps)
    for i, row in enumerate(steps):
        last.append(row["reward"])
        mean = sum(last) / size
        low = len(last) == size and best > 0 and mean < best / 2
        fallen = min(fallen, i) if low else len(steps)
        best = max(best, mean if len(last) == size else best)
    return steps[fallen] if len(steps) - fallen >= size else None


def off_policy_marks(rows: Sequence[Metrics], axes: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return marks of a collapse for the page, each with `text`, `color` and place on the `axes`.

    None for a run without stale tokens, correction or low effective sample size, which needs no such section.
    """
    ess, fall = low_ess(rows), reward_collapse(rows)
    if not (ess or any(row.get("lag/max", 0) > 0 or "correction/clipped_share" in row for row in rows)):
        return None
    marks = []
    if ess:
        message = ess_message(ess)
        marks.append(_mark(message[0].upper() + message[1:] + ".", "bad", ess[0], axes))
    if fall:
        marks.append(_mark(f"From step {fall['step']:.0f} on the reward was under half of its best.", "c4", fall, axes))
    return marks


def _mark(text: str, color: str, row: Metrics, axes: Sequence[str]) -> dict[str, Any]:
    return {"text": text, "color": color} | {axis: row.get(axis) for axis in axes}
