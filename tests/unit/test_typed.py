"""States from files against those of fresh parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from winnow.base.array_json import pack
from winnow.base.typed import require_like

OWN = {"n": 1, "x": 0.5, "on": True, "none": None, "seen": [], "p": [0, 0.5], "z": pack(np.zeros(3)), "in": {"t": "a"}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2.5, "x": 3, "none": [1], "seen": [["a"], 2], "p": [1, 1e300]},
        {"z": pack(np.array([1.0, np.nan, 2.0])), "in": {"t": "b", "unknown": 1}, "unknown": None},
    ],
)
def test_what_such_a_part_may_have_learned_is_taken(more: dict[str, Any]) -> None:
    require_like(OWN | more, OWN, "state")
    require_like({}, OWN, "state")  # what is missing, the part itself says


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"n": True}, "state.n cannot be True"),
        ({"n": 2**63}, "state.n cannot be"),
        ({"x": float("inf")}, "state.x cannot be inf"),
        ({"x": "0.5"}, "state.x cannot be '0.5'"),
        ({"on": 1}, "state.on cannot be 1"),
        ({"seen": {}}, "state.seen is no list"),
        ({"p": [1.0]}, "state.p is no list of 2"),
        ({"p": [1.0, None]}, r"state.p\[1\] cannot be None"),
        ({"z": pack(np.zeros(4))}, r"state.z is no array of \[3\] <f8"),
        ({"z": pack(np.zeros(3, np.int64))}, "state.z is no array of"),
        ({"z": [0.0] * 3}, "state.z cannot be"),
        ({"in": None}, "state.in cannot be None"),
        ({"in": {"t": 1}}, "state.in.t cannot be 1"),
    ],
)
def test_what_is_of_another_form_is_named(more: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        require_like(OWN | more, OWN, "state")
