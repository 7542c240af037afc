from __future__ import annotations

import json
from typing import Annotated

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.base.array_json import Packed, pack
from winnow.base.state import State, StateError, at
from winnow.methods.gate.arrol.calibration import INTS, Columns, Window


@given(st.integers(1, 7), st.lists(st.integers(0, 9), max_size=8))
def test_it_holds_the_last_rows_whenever_it_is_read(capacity: int, bursts: list[int]) -> None:
    window, rows = Window(maxlen=capacity), []
    for burst in bursts:
        for _ in range(burst):
            rows.append((np.full(2, len(rows), np.float32), float(len(rows)), len(rows) % 2 == 0))
            window.append(rows[-1])
        last = rows[-capacity:]
        assert len(window) == len(last)
        if last:
            vectors, numbers, flags = window.columns()
            np.testing.assert_array_equal(vectors, np.stack([row[0] for row in last]))
            assert (vectors.dtype, numbers.tolist()) == (np.float32, [row[1] for row in last])
            assert flags.tolist() == [row[2] for row in last]


class Part(State):
    window: Annotated[list[np.ndarray], Columns(Packed("f4", None, "hidden"), INTS)]


def test_it_resumes_exactly() -> None:
    window, other = Window(maxlen=3), Window(maxlen=3)
    for i in range(5):
        window.append((np.float32([i, 0.1]), i))
    other.load(Part.of({"window": json.loads(json.dumps(window.state_dict()))}).window)
    for both in (window, other):
        both.append((np.float32([9, 9]), 9))
    for mine, theirs in zip(window.columns(), other.columns(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    other.load(Part.of({"window": Window(maxlen=3).state_dict()}).window)
    assert len(other) == 0


@pytest.mark.parametrize(
    "columns",
    [
        [np.zeros((3, 2), np.float32), np.zeros(3)],
        [np.zeros(3, np.float32), np.zeros(3, int)],
        [np.zeros((3, 2)), np.zeros(3, int)],
        [np.zeros((3, 2), np.float32), np.zeros(2, int)],
        [np.full((3, 2), np.nan, np.float32), np.zeros(3, int)],
        [np.zeros((3, 2), np.float32)],
    ],
)
def test_columns_of_another_kind_are_refused(columns: list[np.ndarray]) -> None:
    with pytest.raises(StateError, match=r"part\.window: (is|has)"), at("part"):
        Part.of({"window": {"columns": [pack(column) for column in columns]}})


def test_a_bomb_is_not_unpacked() -> None:
    bomb = pack(np.zeros(1, int)) | {"shape": [1 << 40]}
    with pytest.raises(ValueError, match="is not between 0 and"):
        Part.of({"window": {"columns": [pack(np.zeros((1, 2), np.float32)), bomb]}})
