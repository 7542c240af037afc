"""What a run's seconds and tokens were spent on: tables of `winnow verify` and of the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.table import Table

from ..base.seconds import DECODE_MORE, DECODE_ROWS

SECONDS, OF_SAMPLERS, OVERLAPPED = "seconds/", "sampler/seconds/", "seconds_overlapped/"
"""Prefixes of metrics: of the run's own thread, summed over samplers in other processes, and of overlapped updates."""
UNKNOWN = "–"
PARTS = {
    "loading": "load",
    "waiting": "generate/waiting",
    "prefill": "generate/prefill",
    **{f"decode, {name.removeprefix('decode_')} rows": f"generate/{name}" for name in DECODE_ROWS.values()},
    "decode, more rows": f"generate/{DECODE_MORE}",
    "reading drafts": "generate/drafts",
    "copying rows": "generate/copying",
    "sampling": "generate/sampling",
    "engine, not told apart": "generate/engine",
    "rewards": "generate/rewards",
    "environments": "generate/environments",
    "rest of generation": "generate",
    "reuse": "reuse",
    "teacher": "update/teacher",
    "packing": "update/pack",
    "forward and backward": "update/forward_backward",
    "optimizer": "update/optimizer",
    "rest of the update": "update",
    "publish": "publish",
    "evaluation": "evaluate",
    "record": "record",
}
"""Row -> name of its seconds. A phase that has parts gets what they leave."""
OPTIONAL = ("engine, not told apart", "reuse", "teacher")
"""Rows that are left out if they are unknown."""


@dataclass(frozen=True)
class Cells:
    """A table as text."""

    head: list[str]
    rows: list[list[str]]

    def table(self) -> Table:
        """Return it for a rich console."""
        table = Table()
        for number, name in enumerate(self.head):
            table.add_column(name, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def costs_of(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return sums of the seconds of steps' metrics, and their last `seconds_total` and counts of tokens."""
    costs: dict[str, float] = {}
    for metrics in steps:
        for name, value in metrics.items():
            if name.startswith((SECONDS, OF_SAMPLERS, OVERLAPPED)):
                costs[name] = costs.get(name, 0.0) + value
        costs.pop("num_computed_tokens", None)  # unknown since a step that has none
        last = ("seconds_total", "num_tokens", "num_computed_tokens", "num_teacher_tokens")
        costs |= {name: metrics[name] for name in last if name in metrics}
    return costs


def seconds_table(costs: Mapping[str, float]) -> Cells | None:
    """Return the run's seconds, which the rows add up to; None without any. A dash: not measured.

    Samplers in other processes get a column, whose sum is the time of all; so do updates that overlap with generation.
    """
    own = _rows(_named(costs, SECONDS))
    if not any(own.values()):
        return None
    total = costs.get("seconds_total", 0.0) or sum(value or 0.0 for value in own.values())
    own["other"] = max(total - sum(value or 0.0 for value in own.values()), 0.0)
    own["all"] = total
    elsewhere = _named(costs, OF_SAMPLERS)
    all_samplers = elsewhere.pop("total", 0.0)
    samplers = _rows({name if name == "publish" else f"generate/{name}": s for name, s in elsewhere.items()})
    samplers["rest of generation"] = max(all_samplers - sum(value or 0.0 for value in samplers.values()), 0.0)
    samplers["all"] = all_samplers
    meanwhile = _rows(_named(costs, OVERLAPPED))
    meanwhile["all"] = sum(value or 0.0 for value in meanwhile.values())
    columns = {"all samplers": samplers, "meanwhile": meanwhile}
    columns = {head: column for head, column in columns.items() if column["all"]}
    rows = []
    for name, seconds in own.items():
        others = [column.get(name) for column in columns.values()]
        if name in OPTIONAL and seconds is None and not any(others):
            continue
        share = UNKNOWN if seconds is None else f"{seconds / total:.1%}"
        rows.append([name, _text(seconds), share, *map(_text, others)])
    return Cells(["seconds of", "seconds", "of all", *columns], rows)


def tokens_table(costs: Mapping[str, float], trained: float) -> Cells | None:
    """Return tokens sampled, computed and trained; None if no token was sampled."""
    sampled, computed = costs.get("num_tokens", 0), costs.get("num_computed_tokens")
    if not sampled:
        return None
    counts = {"sampled": sampled, "computed": computed, "trained": trained}
    if "num_teacher_tokens" in costs:
        counts["read by the teacher"] = costs["num_teacher_tokens"]
    rows = [
        [name, UNKNOWN, UNKNOWN] if n is None else [name, f"{n:,.0f}", f"{n / sampled:.2f}"]
        for name, n in counts.items()
    ]
    return Cells(["tokens", "count", "of sampled"], rows)


def _named(costs: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in costs.items() if name.startswith(prefix)}


def _rows(seconds: Mapping[str, float]) -> dict[str, float | None]:
    """Return seconds by row of `PARTS`; None: unknown."""
    rows = {}
    for row, name in PARTS.items():
        parts = sum(value for part, value in seconds.items() if part.startswith(f"{name}/"))
        rows[row] = max(seconds[name] - parts, 0.0) if name in seconds else None
    return rows


def _text(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds:,.1f}"
