"""An environment for worker processes: counts its steps, and can be told to misbehave."""

from __future__ import annotations

import os
import time
from pathlib import Path

from winnow.env.base import ModelTurn, StepResult


class CountingEnv:
    def __init__(self, turns: int, log: str = "") -> None:
        self.turns, self.log = turns, log
        self.steps = 0

    def reset(self) -> str | None:
        self._note("reset")
        return " 7"

    def step(self, text: str) -> StepResult:
        if text == "hang":
            time.sleep(600)
        if text == "die":
            os._exit(3)
        if text == "raise":
            raise ConnectionError("the simulator went away")
        if text == "tuple":
            return "8 9", 1.0, True  # type: ignore[return-value]
        if text == "long":
            return StepResult("8" * (5 << 20))
        self.steps += 1
        done = self.steps >= self.turns
        info = {"progress": self.steps / 10, ("steps",): object()}
        return StepResult("8 9", 1.0 if done else None, done, info, text.upper())

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(what + "\n")


class HearingEnv(CountingEnv):
    def step(self, text: str) -> StepResult:
        assert isinstance(text, ModelTurn)
        return StepResult(f"{text.stop_reason} {text.stop_string} {text.whole}")
