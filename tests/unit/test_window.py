from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.base.array_json import pack
from winnow.methods.gate.window import Window


@given(st.integers(1, 7), st.lists(st.integers(0, 9), max_size=8))
def test_it_holds_the_last_rows_whenever_it_is_read(capacity: int, bursts: list[int]) -> None:
    window, rows = Window(capacity, "Ffb"), []
    for burst in bursts:
        for _ in range(burst):
            rows.append((np.full(2, len(rows), np.float32), float(len(rows)), len(rows) % 2 == 0))
            window.append(*rows[-1])
        last = rows[-capacity:]
        assert len(window) == len(last)
        if last:
            vectors, numbers, flags = window.columns()
            np.testing.assert_array_equal(vectors, np.stack([row[0] for row in last]))
            assert (vectors.dtype, numbers.tolist()) == (np.float32, [row[1] for row in last])
            assert flags.tolist() == [row[2] for row in last]


def test_it_resumes_exactly() -> None:
    window, other = Window(3, "Fi"), Window(3, "Fi")
    for i in range(5):
        window.append(np.float32([i, 0.1]), i)
    other.load_state_dict(json.loads(json.dumps(window.state_dict())))
    for both in (window, other):
        both.append(np.float32([9, 9]), 9)
    for mine, theirs in zip(window.columns(), other.columns(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    empty = Window(2, "i")
    empty.load_state_dict(json.loads(json.dumps(Window(2, "i").state_dict())))
    assert len(empty) == 0


@pytest.mark.parametrize(
    "columns",
    [
        [np.zeros((3, 2)), np.zeros(3)],
        [np.zeros(3), np.zeros(3, int)],
        [np.zeros((3, 2)), np.zeros(2, int)],
        [np.zeros((4, 2)), np.zeros(4, int)],
        [np.zeros((0, 2)), np.zeros(0, int)],
        [np.zeros((3, 2))],
        [np.zeros((3, 2)), np.full(3, 9)],
    ],
)
def test_columns_of_another_kind_are_refused(columns: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="where"):
        Window(3, "Fi").load_state_dict({"columns": [pack(column) for column in columns]}, (-1, 1), (0, 8))


def test_a_window_of_too_many_rows_is_not_unpacked() -> None:
    bomb = pack(np.zeros(1)) | {"shape": [1 << 40]}
    with pytest.raises(ValueError, match="rows, where at most 3 are"):
        Window(3, "f").load_state_dict({"columns": [bomb]})
