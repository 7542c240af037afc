"""Tables of recorded groups: the rows of a group, and hostile tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.config.paths import as_saved
from winnow.env.row_files import DataError
from winnow.methods.gate.signals import table_rows
from winnow.record.records import Records
from winnow.study.gate_tables import read_recorded
from winnow.types import Fate, Turn

from ..builders.gate_tables import SEVEN, make_rows, without, write
from ..builders.groups import make_group


def test_rows_of_a_group_can_be_read_back(tmp_path: Path) -> None:
    rows = []
    for number, rewards in enumerate(([1.0, 0.0], [1.0, 1.0], [0.1, 0.1])):
        group = make_group(number, rewards)
        for i, rollout in enumerate(group.rollouts):
            names = "abc" if number == 0 and i == 0 else "abd"
            rollout.turns = [Turn(f"Thought. {a}", "o", 0, 1, "eos", canonical=a, taken=True) for a in names]
        rows += table_rows(group, [2, 3])
    recorded = read_recorded(write(tmp_path / "g.parquet", rows))
    assert recorded[3].zero_N.tolist() == [False, True, True]
    assert recorded[3].signals["prefix_edit_distance"].tolist() == pytest.approx([1 / 3, 0, 0])
    assert recorded[2].signals["prefix_edit_distance"].tolist() == [0, 0, 0]
    assert recorded[2].columns["steps_k"].tolist() == [4, 4, 4]
    with pytest.raises(ValueError, match="visit 7: fewer than two members have a reward"):
        table_rows(make_group(7, [1.0, None]), [2])


def test_equal_variances_are_ties() -> None:
    """In any order of the siblings, and for as many right as wrong ones: a last digit would rank them."""
    for right in range(1, 7):
        orders = [[float(i in places) for i in range(7)] for places in itertools.combinations(range(7), right)]
        found = {table_rows(make_group(0, rewards), [1])[0]["reward_var"] for rewards in orders}
        assert found == {right * (7 - right) / 49}


@pytest.mark.parametrize("fate", [Fate.PRUNED, Fate.FAILED])
@pytest.mark.parametrize("stopped", [2, 4])
def test_a_stopped_sibling_is_absent_from_every_signal(fate: Fate, stopped: int) -> None:
    """Eight trajectories that are the same: nothing diverges and nobody has ended, whoever was stopped half-way."""
    group = make_group(0, [None] * stopped + [1.0] * (8 - stopped))
    whole = [Turn(a, f"saw {a}", 0, 1, "eos", taken=True) for a in "abcdef"]
    for rollout in group.rollouts:
        rollout.turns = whole[:]
        if rollout.reward is None:  # in its third turn
            rollout.turns, rollout.fate = [*whole[:2], Turn("c-", None, 0, 1, "cancelled")], fate
    rows = table_rows(group, [1, 2, 3, 5])
    assert [row["prefix_edit_distance"] for row in rows] == [0, 0, 0, 0]
    assert [row["termination_fraction"] for row in rows] == [0, 0, 0, 0]
    assert [row["unique_prefix_ratio"] for row in rows] == [1 / 8, 1 / 8, 1 / (8 - stopped), 1 / (8 - stopped)]
    assert (rows[2]["reward_var"], rows[2]["steps"], rows[2]["steps_k"]) == (0, 6 * (8 - stopped), 3 * (8 - stopped))
    group.rollouts[-1].reward, group.rollouts[-1].fate = None, Fate.CUT
    with pytest.raises(ValueError, match="its group was stopped"):
        table_rows(group, [2])
    with pytest.raises(ValueError, match="fewer than two"):
        table_rows(make_group(0, [1.0]), [2])


# Hostile input.


def spoil(name: str, value: Any, row: int = 3) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda rows: [r | {name: value} if i == row else {**r} for i, r in enumerate(rows)]


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (lambda rows: without(rows, "K"), r"no column 'K'.*--map K=COLUMN"),
        (lambda rows: without(rows, "reward_var"), "no column 'reward_var'"),
        (lambda rows: without(rows, "task_id"), "no column 'task_id'"),
        (lambda rows: without(rows, *SEVEN), "no column of a signal"),
        (spoil("action_entropy", float("nan")), "row 4: 'action_entropy': Input should be a (finite|valid) number"),
        (spoil("action_entropy", None), "row 4: 'action_entropy': Input should be a valid number"),
        (spoil("reward_var", float("inf")), "row 4: 'reward_var': Input should be a finite number"),
        (spoil("reward_var", -0.1), "row 4: 'reward_var': Input should be greater than or equal to 0"),
        (spoil("K", 0), "row 4: 'K': Input should be greater than or equal to 1"),
        (lambda rows: [r | {"K": r["K"] + 0.5} for r in rows], "row 1: 'K': Input should be a valid integer"),
        (spoil("obs_unique_ratio", 1.5), "row 4: 'obs_unique_ratio': Input should be less than or equal to 1"),
        (spoil("label", "won"), "row 4: 'label': Input should be 'all_fail', 'mixed' or 'all_succeed'"),
        (lambda rows: [r | {"label": "mixed"} for r in rows], "contradicts a reward variance of 0"),
        (spoil("steps_k", 1e6), "row 4: steps_k.*exceeds steps"),
        (lambda rows: [*rows, rows[0]], "row 81: task 't0' at K = 10 is in row 1 already"),
        (
            lambda rows: [r | {"K": "ten"} for r in rows],
            r"row 1: 'K': Input should be a valid integer.*\(got 'ten'\); correct it",
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_bad_tables_are_refused(tmp_path: Path, spoiled: Any, message: str, suffix: str) -> None:
    path = write(tmp_path / f"g{suffix}", spoiled(make_rows()))
    with pytest.raises(ConfigError, match=message):
        read_recorded(path)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    (empty := tmp_path / "empty.csv").write_text("")
    with pytest.raises(ConfigError, match=r"empty\.csv: the table is empty"):
        read_recorded(empty)
    (headers := tmp_path / "headers.csv").write_text("K,task_id,reward_var,action_entropy\n")
    with pytest.raises(ConfigError, match="has no rows"):
        read_recorded(headers)
    (ragged := tmp_path / "ragged.csv").write_text("K,task_id\n1,2,3\n")
    with pytest.raises(ConfigError, match=r"ragged\.csv, line 2: 1 more cells than columns"):
        read_recorded(ragged)
    (broken := tmp_path / "broken.csv").write_text('K,task_id\n"1,2\n')
    with pytest.raises(ConfigError, match="not a CSV"):
        read_recorded(broken)
    (no_parquet := tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"x\.parquet: cannot be read as parquet"):
        read_recorded(no_parquet)
    parquet.write_table(pa.table([[1], [2]], names=["K", "K"]), columns := tmp_path / "columns.parquet")
    with pytest.raises(DataError, match="two columns 'K'"):
        read_recorded(columns)
    (twice := tmp_path / "twice.csv").write_text("K,task_id,reward_var,reward_var,action_entropy\n1,a,0,0,0\n")
    with pytest.raises(ConfigError, match="2 columns 'reward_var'"):
        read_recorded(twice)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_recorded(tmp_path / "absent.csv")
    with pytest.raises(ConfigError, match=r"gate\.jsonl: absent"):
        read_recorded(tmp_path)


def test_other_names_are_mapped(tmp_path: Path) -> None:
    renamed = [
        {("step" if k == "K" else f"{k}_mean" if k == "action_entropy" else k): v for k, v in r.items()}
        | {"task_id": f"{i // 2:03d}"}
        for i, r in enumerate(make_rows())
    ]
    path = write(tmp_path / "g.csv", renamed)
    recorded = read_recorded(path, {"K": "step"})
    assert recorded[10].columns["task_id"][:2].tolist() == ["000", "001"], "text, even where it looks like a number"
    assert "action_entropy" in recorded[10].signals
    for mapping, message in (
        ({"K": "stpe"}, "no column 'stpe'. Did you mean 'step'"),
        ({"action_entrpy": "step"}, "no column we read. Did you mean 'action_entropy'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_recorded(path, mapping)


# Weights and runs.


def test_a_group_weighs_the_inverse_of_its_chance() -> None:
    group = make_group(0, [1.0, 0.0])
    for rollout in group.rollouts:
        rollout.turns, rollout.survival_p = [Turn("a", "o", 0, 1, "eos", taken=True)], 0.2
    assert table_rows(group, [1])[0]["weight"] == 5.0
    group.rollouts[0].survival_p = 1.0
    with pytest.raises(ValueError, match="unlike chances"):
        table_rows(group, [1])


@pytest.mark.parametrize(
    ("options", "written"), [({}, True), ({"gates": ["random"]}, False), ({"gates": ["random"], "audit": {}}, True)]
)
def test_only_a_run_that_knows_what_is_missing_writes_the_table(
    tmp_path: Path, options: dict[str, Any], written: bool
) -> None:
    settings = as_saved(validate({"model": "m", "env": "countdown", **options}))
    Records(tmp_path, settings, max_turns=9).close()
    assert (tmp_path / "gate.jsonl").exists() == written
