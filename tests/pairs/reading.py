"""A gate as a user writes one, named by its module: it learns nothing, and its rule reads what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from winnow.methods.gate import Gate, GateContext
from winnow.types import GroupView, Token, Verdict


@dataclass(frozen=True)
class Reading:
    """Stop rollouts that sampled this within two tokens: about a third, as w3 and w30 to w39 begin so."""

    text: str = "w3"

    def build(self, context: GateContext) -> ReadingGate:
        return ReadingGate(self)


@dataclass(frozen=True)
class ReadingRule:
    at: Token
    text: str
    needs: ClassVar[frozenset[str]] = frozenset({"text"})

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        return [Verdict(self.text not in view.text, f"sampled {self.text}") for view in views]


class ReadingGate(Gate):
    def __init__(self, options: Reading) -> None:
        self.options = options

    def rule(self) -> ReadingRule:
        return ReadingRule(Token(2), self.options.text)
