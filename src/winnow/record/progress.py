"""The live display of a run; plain lines without a terminal."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..base.sanitize import visible

FATE_COLORS = {
    "trained": "green",
    "filtered": "yellow",
    "pruned": "magenta",
    "cut": "magenta",
    "stale": "red",
    "surplus": "blue",
    "failed": "red",
    "unrewarded": "cyan",
    "abandoned": "cyan",
}
LINE_EVERY_S = 10.0
WORKERS_SHOWN = 8
CELLS = {"tokens_per_s": "{:,.0f} tok/s", "idle": "idle {:.0%}", "lag": "lag {:.0f}", "memory_mib": "{:,.0f} MiB"}


class Display:
    """Shows reward, zero-variance share, tokens by fate, speed, remote samplers, time left and warnings.

    Use as a context manager.
    """

    def __init__(self, console: Console, *, start: int, max_steps: int) -> None:
        self.console = console
        self._tokens: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()
        """Restarts of each sampler, over the whole run."""
        self._evaluation = ""
        self._last_line = 0.0
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._bar = self._progress.add_task("train", total=max_steps, completed=start)
        self._max_steps = max_steps
        self._live = Live(self._progress, console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, float], nodes: Mapping[str, str] | None = None) -> None:
        """Show one step's metrics (names of metrics.jsonl). `nodes`: places of samplers, e.g. {"sampler/0": ...}."""
        for name, value in metrics.items():
            if name.startswith("tokens/"):
                self._tokens[name.removeprefix("tokens/")] += int(value)
        for name in workers_in(metrics):
            self._restarts[name] += int(metrics.get(f"{name}/restarts", 0))
        evaluated = next((name for name in ("pass@1", "avg@n") if f"eval/{name}" in metrics), None)
        if evaluated is not None:
            self._evaluation = f"held-out {evaluated} {metrics[f'eval/{evaluated}']:.3f} (step {step})"
        if self._live:
            self._progress.update(self._bar, completed=step)
            workers = workers_table(metrics, self._restarts, nodes or {})
            self._live.update(Group(self._line(step, metrics), fate_line(self._tokens), *workers, self._progress))
        elif evaluated is not None or time.monotonic() - self._last_line > LINE_EVERY_S or step == self._max_steps:
            self._last_line = time.monotonic()
            self.console.print(self._line(step, metrics), highlight=False, markup=False)

    def warn(self, message: str) -> None:
        """Print a warning above the live display."""
        self.console.print(visible(f"warning: {message}"), style="yellow", highlight=False, markup=False)

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        zero = metrics.get("frac_reward_zero_std", 0.0)
        parts = [f"step {step}/{self._max_steps}"]
        if "reward" in metrics:
            parts.append(f"reward {metrics['reward']:.3f}  zero-variance {zero:.0%}")
        if "tokens_per_second" in metrics:
            parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
        if "sampler/ready" in metrics:
            count = sum(name.startswith("sampler/") for name in workers_in(metrics))
            parts.append(f"{metrics['sampler/ready']:.0f} of {count} samplers")
        if self._live and "completions/mean_length" in metrics:
            parts.append(f"length {metrics['completions/mean_length']:.1f}")
        if self._evaluation and (self._live or "eval/avg@n" in metrics):
            parts.append(self._evaluation)
        return "  ".join(parts)


def fate_line(tokens: Mapping[str, int]) -> Text:
    """Return `1,000 tokens: trained 61%  filtered 39%`, coloured."""
    total = sum(tokens.values()) or 1
    line = Text(f"{total:,} tokens: ")
    for fate, count in sorted(tokens.items(), key=lambda item: -item[1]):
        line.append(f"{fate} {count / total:.0%}  ", style=FATE_COLORS.get(fate, ""))
    return line


def workers_in(metrics: Mapping[str, float]) -> list[str]:
    """Return the separate samplers and ranks in `metrics`: `sampler/0`, `sampler/1`, `rank/0`, ..."""
    found = (re.match(r"(sampler|rank)/\d+(?=/)", name) for name in metrics)
    return list(dict.fromkeys(match[0] for match in found if match))


def workers_table(metrics: Mapping[str, float], restarts: Mapping[str, int], nodes: Mapping[str, str]) -> list[Table]:
    """Return a table with a line for each of the first `WORKERS_SHOWN`; no table without any."""
    table, names = Table.grid(padding=(0, 2)), workers_in(metrics)
    for name in names[:WORKERS_SHOWN]:
        figures = {key: metrics.get(f"{name}/{key}") for key in CELLS}
        cells = ["" if value is None else CELLS[key].format(value) for key, value in figures.items()]
        waits = name.startswith("sampler/") and figures["lag"] is None
        again = f"restarts {restarts[name]}" if restarts.get(name) else ""
        table.add_row(name.replace("/", " "), *cells, again, "waits for a place" if waits else nodes.get(name, ""))
    if len(names) > WORKERS_SHOWN:
        table.add_row(f"and {len(names) - WORKERS_SHOWN} more")
    return [table] if names else []
