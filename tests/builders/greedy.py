"""Build groups with a greedy rollout."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from winnow.types import Group

from .groups import make_rollout

reward = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.1]), st.floats(-10, 10))


def with_greedy(group: Group, reward: float | None) -> Group:
    greedy = replace(make_rollout(len(group.rollouts), 3, reward), greedy=True)
    return Group(group.visit, [*group.rollouts, greedy])
