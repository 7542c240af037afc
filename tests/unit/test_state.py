"""State models: what is not of their form is refused by the key of its place."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pytest

from winnow.base.array_json import Packed, pack, unpack
from winnow.base.errors import ConfigError
from winnow.base.state import Count, Loose, State, StateError, at


class Inner(State):
    t: str


class Part(State):
    n: Count
    x: float
    on: bool
    seen: list[Annotated[tuple[int, float], Loose]]
    z: Annotated[np.ndarray, Packed("f8", "rows")]
    kind: Annotated[np.ndarray, Packed("i8", "rows", index="kinds")]
    inside: Inner
    rate: Annotated[np.ndarray | None, Packed("f4", "rows", 2, nan=True)] = None


SAVED = {"n": 1, "x": 0.5, "on": True, "seen": [[1, 2.0]], "z": pack(np.zeros(3)), "inside": {"t": "a"}}
SAVED |= {"kind": pack(np.array([0, 1, 1]))}


def test_what_a_part_has_saved_is_taken() -> None:
    rate = np.full((3, 2), np.nan, np.float32)
    saved = Part.of(SAVED | {"x": 3, "seen": [], "rate": pack(rate)}, rows=3, kinds=2)
    assert (saved.n, saved.x, saved.inside.t) == (1, 3.0, "a")
    np.testing.assert_array_equal(saved.z, np.zeros(3))
    assert saved.rate is not None
    np.testing.assert_array_equal(saved.rate, rate)
    assert Part.of(saved) is saved


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"n": True}, r"part\.n: .*valid integer \(got True"),
        ({"n": 1.0}, r"part\.n: .*valid integer"),
        ({"n": -1}, r"part\.n: .*greater than or equal to 0"),
        ({"x": float("nan")}, r"part\.x: .*finite number \(got nan"),
        ({"x": "0.5"}, r"part\.x: .*valid number \(got '0\.5'"),
        ({"on": 1}, r"part\.on: .*valid boolean"),
        ({"seen": {}}, r"part\.seen: .*valid list"),
        ({"seen": [[1]]}, r"part\.seen\.0\.1: Field required"),
        ({"seen": [[1, None]]}, r"part\.seen\.0\.1: .*valid number"),
        ({"inside": None}, r"part\.inside: .*Inner"),
        ({"inside": {"t": 1}}, r"part\.inside\.t: .*valid string"),
        ({"inside": {"t": "a", "u": 1}}, r"part\.inside\.u: Extra inputs are not permitted"),
        ({"z": pack(np.zeros(4))}, r"part\.z: is an array of \[4\] float64, not of \[3\] float64"),
        ({"z": pack(np.zeros((3, 1)))}, r"part\.z: is an array of \[3, 1\] float64"),
        ({"z": pack(np.zeros(3, np.int64))}, r"part\.z: is an array of \[3\] int64, not of \[3\] float64"),
        ({"z": pack(np.array([1.0, np.nan, 2.0]))}, r"part\.z: has numbers that are not finite"),
        ({"z": [0.0] * 3}, r"part\.z: is not a packed array"),
        ({"z": pack(np.zeros(3)) | {"zlib": "AAAA"}}, r"part\.z: is not a packed array"),
        ({"kind": pack(np.array([0, 1, 2]))}, r"part\.kind: has numbers from 0 to 2, not from 0 to 1"),
        ({"kind": pack(np.array([0, 1, -1]))}, r"part\.kind: has numbers from -1 to 1"),
    ],
)
def test_what_is_of_another_form_is_named(more: dict[str, Any], said: str) -> None:
    with pytest.raises(StateError, match=said), at("part"):
        Part.of(SAVED | more, rows=3, kinds=2)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(StateError, match=r"^loop\.part\.n: Field required"), at("loop"), at("part"):
        Part.of({key: value for key, value in SAVED.items() if key != "n"})


def test_arrays_of_one_axis_are_equally_long() -> None:
    with pytest.raises(ValueError, match=r"is an array of \[2\] int64, not of \[3\]"):
        Part.of(SAVED | {"kind": pack(np.zeros(2, np.int64))})


def test_a_part_without_a_model_is_named_too_and_a_wrong_configuration_stays_one() -> None:
    with pytest.raises(StateError, match=r"^gates\.own: KeyError: 'floor'"), at("gates.own"):
        raise KeyError("floor")
    with pytest.raises(ConfigError, match=r"^gates: wrong"), at("loop"):
        raise ConfigError("gates: wrong")


def test_a_model_writes_what_it_reads() -> None:
    saved = Part.of(SAVED)
    written = saved.model_dump(mode="json", exclude_none=True)
    assert written | {"z": None, "kind": None} == SAVED | {"z": None, "kind": None}
    np.testing.assert_array_equal(unpack(written["kind"]), [0, 1, 1])
