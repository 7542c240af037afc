"""Task `dataset`: formats, splits, and errors that name the file, the line and the remedy."""

from __future__ import annotations

import datetime
import gzip
import hashlib
import json
import random
import re
import threading
import warnings
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from winnow import ConfigError
from winnow.base.dotted import TargetError
from winnow.env import prompt_store, row_files
from winnow.env.dataset import DatasetConfig, content_of
from winnow.env.row_files import DataError

from ..builders.datasets import build, build_rows, plain_ids, write


def test_text_and_columns(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "1 + 1 = ", "answer": 2}, {"prompt": "🙂 مرحبا <eos>", "level": "x"})
    task = build(path)
    first, second = task.train
    assert (first.text, first.messages, first.ordinal) == ("1 + 1 = ", None, 0)
    assert first.columns == {"answer": 2, "level": None}
    assert second.text == "🙂 مرحبا <eos>"
    assert second.columns == {"answer": None, "level": "x"}
    assert len({first.id, second.id}) == 2
    assert task.test == []
    assert task.reward_funcs == []
    assert task.make_env(first) is None


def test_messages_and_system_prompt(tmp_path):
    row = {"prompt": [{"role": "user", "content": "hi", "name": None}]}
    path = write(tmp_path / "a.jsonl", row)
    assert build(path).train[0].messages == ({"role": "user", "content": "hi"},)
    with_system = build(path, system_prompt="be brief").train[0].messages
    assert with_system[0] == {"role": "system", "content": "be brief"}
    assert build(path, prompt_format="text").train[0].text == "hi"
    text = write(tmp_path / "b.jsonl", {"prompt": "hi"})
    assert build(text, system_prompt="be brief").train[0].messages == with_system


def test_accepted_oddities(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert [p.text for p in build(path).train] == ["a", "b"]


def test_formats(tmp_path):
    """Every form of a file gives the same rows."""
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{i} + 1 =\nsay 'it'", "answer": i + 1, "hint": "a,b"} for i in range(3)]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(tmp_path / "disk"))
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(str(tmp_path / "splits"))
    data.to_csv(str(tmp_path / "a.csv"))
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.to_json(str(tmp_path / "a.jsonl.gz"), compression="gzip")
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(rows, indent=2), encoding="utf-8")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))
    write(tmp_path / "lines.json", *rows)
    for name in ("disk", "splits", "a.csv", "a.parquet", "a.jsonl.gz", "a.json", "a.csv.gz", "a.json.gz", "lines.json"):
        found = [{"prompt": p.text, **p.columns} for p in build(tmp_path / name).train]
        assert found == rows, name
    assert len(build(tmp_path / "splits", split="test").train) == 1
    for options in ({"split": "test"}, {"test": str(tmp_path / "disk"), "test_split": "train"}):
        with pytest.raises(ValueError, match=r"dataset: (test_)?split has no effect on a file or a data set without"):
            build(tmp_path / "disk", **options)
    with pytest.raises(DataError, match="has no subset 'main'"):
        build(tmp_path / "splits", subset="main")
    assert [p.text for p in DatasetConfig(path="x").with_rows(data.to_pandas()).train] == [r["prompt"] for r in rows]
    assert [p.text for p in DatasetConfig(path="x").with_rows(data).train] == [r["prompt"] for r in rows]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"prompt": "a"}, 3]', "a.json, entry 2: expected an object .* found int"),
        ("a.json", b'[{"prompt": "a"}', "a.json: not valid JSON"),
        ("a.json", b"[{}]", "a.json, entry 1: no column 'prompt'"),
        ("a.json", b"[]", "no rows"),
        ("a.csv", b"prompt,answer\na,1,2\n", "a.csv: cannot be read as CSV.*Expected 2 columns, got 3"),
        ("a.csv", b"", "a.csv: cannot be read as CSV"),
        ("a.csv", b"prompt\n12\n", "a.csv, row 1: 'prompt' must be text"),
        ("a.csv", b"prompt\n\xff\xfe\n", "a.csv.*(UTF|must be text)"),
        ("a.jsonl.gz", b'{"prompt": "a"}', "a.jsonl.gz: cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9],  # the test's name holds these bytes
            "a.jsonl.gz: cannot be read: Compressed file ended",
        ),
        ("a.csv.gz", b"prompt", "a.csv.gz: cannot be read: Not a gzipped file"),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        build(tmp_path / name)


def test_data_errors_are_configuration_errors():
    assert issubclass(DataError, ConfigError)
    assert issubclass(TargetError, ConfigError)


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', "line 2: not valid JSON"),
        (b"prompt: a", "line 2: not valid JSON"),
        (b'{"prompt": "a\0"}', r"line 2: not valid JSON: Invalid control character at \(column 14\)"),
        (b'{"prompt": "a\\u0000"}', "line 2: 'prompt' contains a NUL"),
        (b'{"prompt": "\xff"}', "line 2: byte 13 is not UTF-8"),
        (b'{"prompt": "\\ud800"}', "line 2: contains a lone surrogate"),
        (b'{"prompt": "a", "x": ["\\udc00"]}', "line 2: contains a lone surrogate"),
        (b'"prompt"', r"line 2: expected an object .* found str"),
        (b"[" * 100_000, "line 2: not valid JSON"),
        (b'{"question": "a"}', "line 2: no column 'prompt' \\(columns: question\\)"),
        (b'{"promt": "a"}', "Did you mean 'promt'"),
        (b'{"prompt": ""}', "line 2: 'prompt' is empty"),
        (b'{"prompt": " \\n"}', "line 2: 'prompt' is empty"),
        (b'{"prompt": null}', "line 2: 'prompt' must be text or a list of messages, found None"),
        (b'{"prompt": 3}', "line 2: 'prompt' must be text"),
        (b'{"prompt": []}', "line 2: 'prompt' must be text"),
        (b'{"prompt": ["a"]}', "line 2: 'prompt', message 1: expected"),
        (b'{"prompt": [{"content": "a"}]}', "line 2: 'prompt', message 1: expected"),
        (b'{"prompt": [{"role": "user"}]}', "message 1: 'content' must be text"),
        (b'{"prompt": [{"role": "user", "content": ""}]}', "message 1 is empty"),
        (b'{"prompt": "a", "id": "first"}', "line 2: id 'first' is taken already by .*line 1"),
        (b'{"prompt": "a", "id": 1.5}', "line 2: 'id' must be text or a whole number"),
        (b'{"prompt": "a", "completions": 1}', "must not be called 'completions'"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "first", "id": "first"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message) as error:
        build(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 500


def test_very_long_line(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "MAX_LINE", 1 << 20)
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b" * (1 << 20)})
    with pytest.raises(DataError, match="line 2: longer than 1 MiB"):
        build(path)


def test_equal_columns_of_a_table(tmp_path):
    (path := tmp_path / "a.csv").write_text("prompt,answer,answer\na,1,2\n")
    with pytest.raises(DataError, match=r"a\.csv: there are two columns 'answer'; keep one"):
        build(path)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_no_rows(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="no rows"):
        build(path)


def test_missing_files(tmp_path):
    write(tmp_path / "train.jsonl", {"prompt": "a"})
    with pytest.raises(DataError, match=r"no such file\. Did you mean 'train.jsonl'"):
        build(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match="no file matches"):
        build(tmp_path / "x*.jsonl")
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(DataError, match="no such file"):
        build(tmp_path / "d.jsonl")


def test_several_files_globs_and_parquet(tmp_path):
    a = write(tmp_path / "a.jsonl", {"prompt": "a"})
    write(tmp_path / "b.jsonl", {"prompt": "b"})
    table = pyarrow.Table.from_pylist([{"prompt": "c", "answer": 1}, {"prompt": "d", "answer": None}])
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    task = build([a, str(tmp_path / "c.parquet")])
    assert [p.text for p in task.train] == ["a", "c", "d"]
    assert task.train[1].columns == {"answer": 1}
    assert [p.text for p in build(tmp_path / "*.jsonl").train] == ["a", "b"]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"bad\.parquet: cannot be read as parquet"):
        build(tmp_path / "bad.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "x"}, {"prompt": ""}]), tmp_path / "e.parquet")
    with pytest.raises(DataError, match=r"e\.parquet, row 2: 'prompt' is empty"):
        build(tmp_path / "e.parquet")


def test_hugging_face_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    data = tmp_path / "data"
    data.mkdir()
    write(data / "train.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2})
    write(data / "test.jsonl", {"prompt": "c", "answer": 3})
    task = build(data, test=str(data))
    assert [p.text for p in task.train] == ["a", "b"]
    assert [(p.text, p.columns) for p in task.test] == [("c", {"answer": 3})]
    with pytest.raises(DataError, match="Hugging Face dataset"):
        build(data, split="validation")
    with pytest.raises(DataError, match="nowhere: no such file or directory"):
        build(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_split": "validation"}, "test_split has no effect without test"),
        ({"split": "validation"}, "split has no effect on a file"),
        ({"test": "b.jsonl", "test_split": "validation"}, "test_split has no effect on a file"),
        ({"subset": "main"}, "subset has no effect on a file"),
    ],
)
def test_options_without_effect(options, message, tmp_path):
    write(tmp_path / "a.jsonl", {"prompt": "a"})
    with pytest.raises(ValueError, match=f"dataset: {message}"):
        build(tmp_path / "*.jsonl", **options)
    with pytest.raises(ValueError, match=f"dataset: {message}"):
        build(tmp_path / "a.jsonl", **options)


def test_held_out_rows_and_a_size():
    with pytest.raises(DataError, match="eval_dataset: has held-out rows, so test_size has no effect"):
        DatasetConfig("x", test_size=2).with_rows([{"prompt": "a"}], [{"prompt": "b"}])


def test_own_test_set_must_not_overlap(tmp_path):
    train = write(tmp_path / "a.jsonl", *({"prompt": f"p{i}", "id": i} for i in range(9)))
    good = write(tmp_path / "b.jsonl", {"prompt": "q", "id": 1})
    bad = write(tmp_path / "c.jsonl", *({"prompt": f"p{i} ", "id": f"t{i}"} for i in range(8)), {"prompt": "q"})
    assert [p.id for p in build(train, test=good).test] == ["1"]
    with pytest.raises(DataError, match="test: 8 of 9 prompts are also in the training data: t0, t1, t2, t3, t4 and 3"):
        build(train, test=bad)
    with pytest.raises(DataError, match="eval_dataset: 1 of 1 prompts are also in the training data"):
        DatasetConfig("x").with_rows([{"prompt": "a"}], [{"prompt": "a"}])


@pytest.mark.parametrize(("size", "n"), [(0.25, 10), (7, 7)])
def test_split_by_content(tmp_path, size, n):
    values = [{"prompt": f"p{i}"} for i in range(40)]
    path = write(tmp_path / "a.jsonl", *values)
    task = build(path, test_size=size)
    train, test = ({p.text for p in part} for part in (task.train, task.test))
    assert len(test) == n
    assert train | test == {v["prompt"] for v in values}
    assert not train & test
    assert [p.ordinal for p in task.train] == list(range(40 - n))
    shuffled = write(tmp_path / "b.jsonl", *reversed(values))
    assert {p.text for p in build(shuffled, test_size=size).test} == test


def test_repeated_prompts_warn_and_stay_on_one_side_of_a_split(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"prompt": f"p{i % 10}", "n": i} for i in range(30)))
    with pytest.warns(UserWarning, match="20 of 30 prompts repeat") as caught:
        task = build(path)
    assert len(caught) == 1
    assert len({p.id for p in task.train}) == 30
    with pytest.warns(UserWarning, match="repeat"):
        task = build(path, test_size=3)
    assert len(task.test) == 9
    assert not {content_of(p) for p in task.train} & {content_of(p) for p in task.test}


@pytest.mark.parametrize("size", [40, 41, 0.001])
def test_split_that_leaves_nothing(tmp_path, size):
    path = write(tmp_path / "a.jsonl", *({"prompt": f"p{i}"} for i in range(40)))
    with pytest.raises(DataError, match=re.escape(f"test_size={size}")):
        build(path, test_size=size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "gsm8"}, "Did you mean 'gsm8k'"),
        ({"test": "x.jsonl", "test_size": 3}, "either test or test_size"),
        ({"test_size": 1.5}, "whole number"),
        ({"test_size": -1}, "test_size"),
        ({"system_prompt": "x", "prompt_format": "text"}, "no effect"),
        ({"path": ""}, "path is empty"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        DatasetConfig(**{"path": "a.jsonl", **options})


def test_fingerprint_sees_every_change(tmp_path):
    path = tmp_path / "a.jsonl"
    prints = set()
    for value in ({"prompt": "a", "x": 1}, {"prompt": "b", "x": 1}, {"prompt": "a", "x": 2}):
        write(path, value)
        prints |= {build(path).fingerprint(), build(path).fingerprint()}
    assert len(prints) == 3


def test_prompts_are_kept_on_disk_as_they_were(tmp_path, monkeypatch):
    """Whatever becomes of the file: what was read stays, with types that JSON does not have."""
    monkeypatch.setenv("WINNOW_CACHE", str(tmp_path / "cache"))
    day = datetime.date(2026, 1, 2)
    table = pyarrow.Table.from_pylist([{"prompt": f"p{i}", "day": day, "list": [i, None]} for i in range(3000)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    task = build(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").unlink()
    assert list((tmp_path / "cache").iterdir()) == []
    assert task.train[2999].columns == {"day": day, "list": [2999, None]}
    assert [p.text for p in task.train[-2:]] == ["p2998", "p2999"]
    assert [p.text for p in task.train[::1500]] == ["p0", "p1500"]
    assert task.train[np.int32(7)] == list(task.train)[7]
    assert len(list(task.train)) == 3000
    with pytest.raises(IndexError):
        task.train[3000]
    assert task.train == build_rows(table.to_pylist()).train == build_rows(table).train
    assert task.train != task.train[1:]


def test_what_cannot_be_written_down_is_kept_in_memory():
    lock = threading.Lock()
    task = build_rows([{"prompt": "a", "lock": lock}, {"prompt": "b", "lock": None}])
    assert task.train[0].columns["lock"] is lock
    assert task.train[1].columns == {"lock": None}


@pytest.mark.parametrize("buffer", [0, 1 << 20])
def test_a_full_disk_is_named(monkeypatch, buffer):
    """Whether it is full at a row or at the end."""
    monkeypatch.setattr(prompt_store, "_file_without_name", lambda: open("/dev/full", "w+b", buffer))  # noqa: SIM115
    with pytest.raises(DataError, match=r"rows cannot be kept there: No space left on device; set WINNOW_CACHE"):
        build_rows([{"prompt": "a"}])


def test_a_cache_that_cannot_be_written_to_is_no_hindrance(tmp_path, monkeypatch):
    monkeypatch.setenv("WINNOW_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    assert build_rows([{"prompt": "a"}]).train[0].text == "a"


def test_ids_are_those_of_the_plain_rule():
    """Also where rows give themselves ids that look like those which are made."""
    rng = random.Random(0)
    made = [hashlib.sha256(f"p{i}".encode()).hexdigest()[:16] for i in range(8)]
    for _ in range(30):
        own = rng.sample([*made, *(f"{m}-2" for m in made), *(f"{m}-3" for m in made), "x"], 4)
        rows = [{"prompt": f"p{rng.randrange(8)}"} for _ in range(40)]
        for name in own:  # before any row whose made id it is, or its own would be taken
            rows.insert(0, {"prompt": f"q{name}", "id": name})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert [p.id for p in build_rows(rows).train] == plain_ids(rows)
    late = [{"prompt": "p0"}, {"prompt": "q", "id": made[0]}]
    with pytest.raises(
        DataError, match=f"train_dataset, row 2: id '{made[0]}' is taken already by train_dataset, row 1"
    ):
        build_rows(late)


def test_a_fingerprint_is_the_same_under_another_home(tmp_path, monkeypatch):
    prints = set()
    for home in ("one", "two"):
        folder = tmp_path / home
        folder.mkdir()
        monkeypatch.setenv("HOME", str(folder))
        paths = [str(folder / name) for name in ("a.jsonl", "b.jsonl")]
        for path in paths:
            Path(path).write_text('{"prompt": "' + Path(path).name + '"}\n')
        prints.add(DatasetConfig(paths).build().fingerprint())
    assert len(prints) == 1


def test_fingerprints_are_what_they_were(tmp_path):
    """Runs that were saved before must be found again."""
    rows = [{"prompt": "a", "n": 1}, {"prompt": "b ", "id": "x"}, {"prompt": [{"role": "user", "content": "c"}]}]
    task = build_rows(rows)
    assert [p.id for p in task.train] == ["ca978112ca1bbdca", "x", "cf95ef7c37d02158"]
    assert task.fingerprint() == "21ecebbec67b70fd0078bae3adf31f7f65aa677a665bbf1720c9d31c7e24d942"
