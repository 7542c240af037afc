"""The live display of a run; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .collapse import EssWatch

FATE_COLORS = {
    "trained": "green",
    "filtered": "yellow",
    "pruned": "magenta",
    "cut": "magenta",
    "stale": "red",
    "surplus": "blue",
    "failed": "red",
}
LINE_EVERY_S = 10.0


class Display:
    """Shows reward, zero-variance share, tokens by fate, speed and time left, and warns. Use as a context manager."""

    def __init__(self, console: Console, *, start: int, max_steps: int) -> None:
        self.console = console
        self._tokens: Counter[str] = Counter()
        self._evaluation = ""
        self._last_line = 0.0
        self._watch: EssWatch | None = EssWatch()
        """None: it has spoken, once is enough."""
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

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step's metrics (names of metrics.jsonl)."""
        for name, value in metrics.items():
            if name.startswith("tokens/"):
                self._tokens[name.removeprefix("tokens/")] += int(value)
        if "eval/pass@1" in metrics:
            self._evaluation = f"held-out pass@1 {metrics['eval/pass@1']:.3f} (step {step})"
        if self._watch and self._watch.observe(metrics):
            self.console.print(f"warning: {self._watch.message}", style="yellow", highlight=False)
            self._watch = None
        if self._live:
            self._progress.update(self._bar, completed=step)
            self._live.update(Group(self._table(metrics), fate_line(self._tokens), self._progress))
        elif "eval/pass@1" in metrics or time.monotonic() - self._last_line > LINE_EVERY_S or step == self._max_steps:
            self._last_line = time.monotonic()
            self.console.print(self._line(step, metrics), highlight=False)

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        zero = metrics.get("frac_reward_zero_std", 0.0)
        parts = [f"step {step}/{self._max_steps}"]
        if "reward" in metrics:
            parts.append(f"reward {metrics['reward']:.3f}  zero-variance {zero:.0%}")
        if "tokens_per_second" in metrics:
            parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
        if "eval/pass@1" in metrics:
            parts.append(self._evaluation)
        return "  ".join(parts)

    def _table(self, metrics: Mapping[str, float]) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(
            f"reward [bold]{metrics.get('reward', 0.0):.3f}[/]",
            f"zero-variance [bold]{metrics.get('frac_reward_zero_std', 0.0):.0%}[/]",
            f"length [bold]{metrics.get('completions/mean_length', 0.0):.1f}[/]",
            f"[bold]{metrics.get('tokens_per_second', 0.0):,.0f}[/] tok/s",
            self._evaluation,
        )
        return table


def fate_line(tokens: Mapping[str, int]) -> Text:
    """`tokens: trained 61% filtered 39%`, coloured."""
    total = sum(tokens.values()) or 1
    line = Text(f"{total:,} tokens: ")
    for fate, count in sorted(tokens.items(), key=lambda item: -item[1]):
        line.append(f"{fate} {count / total:.0%}  ", style=FATE_COLORS.get(fate, ""))
    return line
