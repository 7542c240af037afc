"""What users return from methods of their own that is none of what they return: named at once, with the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.methods.filter import AllOf, Filter, ZeroVariance, checked_verdict
from winnow.methods.gate import NamedRule, RuleError, check_rule
from winnow.methods.select import StreamSelector
from winnow.run.inputs import build_task
from winnow.types import EnvStep, GroupKind, Prompt, Token, Verdict

from ..builders.groups import make_group
from ..builders.toy_rollouts import ToyTask


class SaysTrue(Filter):
    def admit(self, group: Any, kind: Any) -> Any:
        return True


class Scores(StreamSelector):
    def keeps(self, ordinals_N: np.ndarray, epoch: int) -> np.ndarray:
        return np.full(len(ordinals_N), 0.3)


@dataclass(frozen=True)
class Bare:
    at: Token

    def decide(self, view: Any) -> Any:
        return []


@dataclass(frozen=True)
class Reader:
    at: Any
    needs: ClassVar[frozenset[str]] = frozenset({"text"})

    def decide(self, views: Any) -> Any:
        return [Verdict(keep="no" not in view.text) for view in views]


def test_a_filter_that_returns_no_verdict() -> None:
    group = make_group(0, [0.0, 1.0], [3, 4])
    with pytest.raises(ConfigError, match=r"filter: SaysTrue\.admit returned True; return KEEP, or Verdict"):
        checked_verdict(SaysTrue(), group, GroupKind.SIGNAL)
    with pytest.raises(ConfigError, match=r"filter: SaysTrue\.admit returned True"):
        AllOf([("a", ZeroVariance()), ("b", SaysTrue())]).admit(group, GroupKind.SIGNAL)


def test_a_selector_that_returns_scores() -> None:
    prompts = [Prompt(str(i), i, text="x") for i in range(4)]
    with pytest.raises(ConfigError, match=r"selector: Scores\.keeps returned float64 \[\d+\]; return bool \[\d+\]"):
        Scores(prompts, 0).select(2)


def test_a_rule_that_says_nothing_of_its_needs() -> None:
    with pytest.raises(RuleError, match="gate bare: a rule needs `needs`, a frozenset"):
        check_rule(NamedRule("bare", Bare(Token(4))))  # type: ignore[arg-type]


def test_a_rule_at_an_environment_step_cannot_ask_for_what_only_tokens_have() -> None:
    with pytest.raises(RuleError, match=r"gate reads: at an environment step a rule sees no text; .*`actions`"):
        check_rule(NamedRule("reads", Reader((EnvStep(1), EnvStep(2)))))
    check_rule(NamedRule("reads", Reader(Token(4))))


def test_one_gate_needs_no_list() -> None:
    assert validate({"model": "m", "env": "countdown", "gates": "random"}).gates == ["random"]


def test_a_task_whose_stop_is_one_text() -> None:
    """Each of its characters would end a turn."""
    task = ToyTask(stop="</answer>")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"env: task toy: stop must be a tuple of texts, e.g. \('</answer>',\)"):
        build_task(task)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (
            Prompt("b", 0, text="?"),
            r"env: prompt 'b' is train\[1\], but its ordinal is 0; number prompts by their place",
        ),
        (Prompt("b", 1, messages=[{"role": "user"}]), "env: the messages of prompt 'b' must be a tuple"),  # type: ignore
    ],
)
def test_prompts_of_an_own_task_that_would_be_taken_for_others(prompt: Prompt, said: str) -> None:
    task = ToyTask()
    task.train = [Prompt("a", 0, text="?"), prompt]
    with pytest.raises(ConfigError, match=said):
        build_task(task)
