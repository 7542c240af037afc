"""Rewards that compare siblings: they see a whole group in one list, or the run is refused."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest

from winnow import ConfigError, Trainer
from winnow.env.rewards.rewarder import Rewarder

from ..builders.pruning import PRUNING
from ..builders.rewards import group, scored

WHOLE = {"max_steps": 2, "eval_steps": None}
PARTS = {"group_size": {"name": "sequential", "probe": 2}}
LINES = """
def ranked(completions, **columns):
    return [sorted(completions).index(c) / len(completions) for c in completions]
ranked.compares_siblings = MARK
"""


class Ranked:
    """Gives the longest completion 1 and keeps the number of completions of each call."""

    __name__ = "ranked"

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls.append(len(completions))
        order = sorted(range(len(completions)), key=lambda i: (len(completions[i]), completions[i], i))
        return [order.index(i) / max(len(completions) - 1, 1) for i in range(len(completions))]


class Marked(Ranked):
    compares_siblings = True


def test_a_greedy_baseline_is_scored_alone() -> None:
    """It takes no place in the others' ranking, and what is logged of it is no metric of the group."""
    ranked = Ranked()

    def logging(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("longest", max(map(len, completions)))
        log_extra("length", [len(c) for c in completions])
        return [0.0] * len(completions)

    g = group("a", "ccc", "bb", "dddd")
    g.rollouts[1].greedy = True
    rewarder = Rewarder([ranked, logging])
    rewarder.start(g, environments=["w", "x", "y", "z"])
    assert rewarder.done(wait=True) == [g]
    rewarder.close()
    assert sorted(ranked.calls) == [1, 3]
    assert [r.reward for r in g.rollouts] == [0.0, 0.0, 0.5, 1.0]
    assert [r.extra["length"] for r in g.rollouts] == [1, 3, 2, 4]
    assert rewarder.pop_logged() == {"longest": 4.0}


def test_a_failing_greedy_baseline_fails_alone() -> None:
    def share(completions: list[str]) -> list[float]:
        return [i / (len(completions) - 1) for i in range(len(completions))]

    g = group("a", "b", "c")
    g.rollouts[2].greedy = True
    scored(share, g)
    assert [r.reward for r in g.rollouts] == [0.0, 1.0, None]
    assert "ZeroDivisionError" in g.rollouts[2].reason


def test_remax_leaves_a_ranking_as_it_is(tiny_config: dict[str, Any]) -> None:
    ranked = Ranked()
    Trainer(config=tiny_config | WHOLE | {"advantage": "remax"}, reward_funcs=ranked).train()
    assert sorted(ranked.calls) == [1] * 8 + [4] * 8


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (PARTS, "group_size: sequential scores the first 2 of a group before the others .* use group_size: fixed"),
        ({"advantage": "remax"}, "advantage: remax subtracts the reward of a greedy rollout, which is scored alone"),
    ],
)
@pytest.mark.parametrize("how", ["object", "partial", "decorated", "file"])
def test_a_marked_function_is_refused(
    tiny_config: dict[str, Any], tmp_path: Path, how: str, keys: dict[str, Any], words: str
) -> None:
    (tmp_path / "ranks.py").write_text(LINES.replace("MARK", "True"))

    def ranked(completions: list[str], bonus: float = 0, **columns: Any) -> list[float]:
        return [bonus] * len(completions)

    ranked.compares_siblings = True  # type: ignore[attr-defined]
    function = {
        "object": Marked(),
        "partial": functools.partial(ranked, bonus=1),
        "decorated": functools.wraps(ranked)(lambda completions, **columns: ranked(completions)),
        "file": f"{tmp_path / 'ranks.py'}:ranked",
    }[how]
    with pytest.raises(ConfigError, match=rf"reward_funcs: \w+ compares siblings \(compares_siblings\), but .*{words}"):
        Trainer(config=tiny_config | WHOLE | keys, reward_funcs=[function])


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("keys", [{}, {"gates": [PRUNING]}, {"group_size": {"name": "adaptive_k", "high": 6}}])
def test_a_marked_function_sees_whole_groups_elsewhere(tiny_config: dict[str, Any], keys: dict[str, Any]) -> None:
    """Of a pruned group it sees those that ended."""
    ranked = Marked()
    Trainer(config=tiny_config | WHOLE | keys, reward_funcs=ranked).train()
    assert len(ranked.calls) == 8
    assert set(ranked.calls) <= {2, 3, 4} if "gates" in keys else set(ranked.calls) == {4}


@pytest.mark.parametrize(("mark", "asked"), [(None, True), (False, False)])
def test_an_unmarked_function_is_asked_about_where_groups_come_in_parts(
    tiny_config: dict[str, Any], tmp_path: Path, mark: bool | None, asked: bool
) -> None:
    (tmp_path / "ranks.py").write_text(LINES.replace("MARK", str(mark)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Trainer(config=tiny_config | PARTS, reward_funcs=[f"{tmp_path / 'ranks.py'}:ranked", "countdown"])
    found = [str(w.message) for w in seen if "compares siblings" in str(w.message)]
    assert len(found) == asked
    assert all("If ranked compares siblings, use group_size: fixed" in text for text in found)


def test_a_mark_is_true_or_false(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(LINES.replace("MARK", "'yes'"))
    with pytest.raises(ConfigError, match="ranked: compares_siblings must be True or False \\('yes'\\)"):
        Trainer(config=tiny_config, reward_funcs=[f"{tmp_path / 'ranks.py'}:ranked"])
