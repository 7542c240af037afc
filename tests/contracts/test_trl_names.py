"""What Winnow overrides of TRL's trainer has TRL's own parameters: callers may give any of them by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("trl")

from trl import GRPOTrainer

from winnow.integrations.trl import WinnowGRPOTrainer

OVERRIDES = [name for name in vars(WinnowGRPOTrainer) if not name.startswith("__") and hasattr(GRPOTrainer, name)]
OVERRIDES = [name for name in OVERRIDES if inspect.isfunction(getattr(GRPOTrainer, name))]


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_has_the_parameters_of_trl(name: str) -> None:
    trainers = GRPOTrainer, WinnowGRPOTrainer
    theirs, ours = (list(inspect.signature(getattr(cls, name)).parameters.values()) for cls in trainers)
    named = [p for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in named] == [p.name for p in theirs][: len(named)]
    assert [p.default for p in named] == [p.default for p in theirs][: len(named)]
    rest = [p for p in theirs[len(named) :] if p.kind is not p.VAR_KEYWORD]
    if rest:  # passed on, in any form
        assert {p.kind for p in ours[len(named) :]} == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def test_the_overrides_are_those_that_are_known() -> None:
    """One that TRL renames would never be called."""
    private = {name for name in vars(WinnowGRPOTrainer) if name.startswith("_") and not name.startswith("__")}
    assert {name for name in private if not hasattr(GRPOTrainer, name)} == {
        "_row",
        "_rolled_out",
        "_of_rollouts",
        "_corrected",
    }


def test_every_argument_of_trl_can_be_given_by_name() -> None:
    def bound(*args: Any, **kwargs: Any) -> inspect.BoundArguments:
        return inspect.signature(WinnowGRPOTrainer.__init__).bind(None, *args, **kwargs)

    names = [name for name in inspect.signature(GRPOTrainer.__init__).parameters if name != "self"]
    assert bound(**dict.fromkeys(names)).kwargs.keys() >= set(names)
