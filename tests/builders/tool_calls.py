"""Build tools that are called."""

from __future__ import annotations

import json
import threading

from winnow.env.tools import ToolUnavailableError


def fail(how: str) -> str:
    """
    Fails.

    Args:
        how: In which way.
    """
    if how == "hang":
        threading.Event().wait(5)
    kinds = {"away": ToolUnavailableError, "network": ConnectionError, "slow": TimeoutError}
    raise kinds.get(how, ValueError)(f"it {how}")


class Counter:
    """An environment in TRL's form."""

    def reset(self, start: int = 0, **row) -> str | None:
        self.value, self.row = start, row
        return f" Start at {start}."

    def get_reward(self) -> float:
        return float(self.value)

    def increment(self, by: int) -> str:
        """
        Increments the counter.

        Args:
            by: How much.
        """
        self.value += by
        return f"now {self.value}"

    def _hidden(self) -> None: ...


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
