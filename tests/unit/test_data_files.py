"""Encodings of files, slices of data sets, streams without an end, and paths of a run that has moved."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from pathlib import Path

import pytest

from winnow import ConfigError, Trainer
from winnow.config.paths import absolute_paths, missing_paths
from winnow.config.settings_yaml import read_yaml
from winnow.env import row_files
from winnow.env import rows as rows_module
from winnow.env.dataset import DatasetConfig
from winnow.env.row_files import DataError

from ..builders.datasets import build, build_rows

ROWS = {
    "a.jsonl": '{"prompt": "é"}\n{"prompt": "b"}\n',
    "a.json": '[{"prompt": "é"}, {"prompt": "b"}]',
    "a.csv": "prompt,answer\né,1\nb,2\n",
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("encoding", "named"),
    [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE"), ("utf-32", "UTF-32")],
)
def test_a_file_of_another_encoding_names_it_and_the_remedy(tmp_path, name, suffix, encoding, named):
    content = ROWS[name].encode(encoding)
    path = tmp_path / (name + suffix)
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError, match=rf"{path}: is {named}, not UTF-8; save it as UTF-8, e.g. iconv -f {named} "):
        build(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_a_file_is_opened_once(tmp_path, name, monkeypatch):
    write = gzip.open if name.endswith(".gz") else open
    with write(tmp_path / name, "wb") as file:
        file.write(b'{"prompt": "a"}\n')
    opened = []
    monkeypatch.setattr(row_files.gzip, "open", lambda *args: opened.append(args) or gzip.GzipFile(*args))
    usual = Path.open
    monkeypatch.setattr(Path, "open", lambda *args: opened.append(args) or usual(*args))
    assert [row.values for row in row_files.read_file(tmp_path / name)] == [{"prompt": "a"}]
    assert len(opened) == 1


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_list_with_a_byte_order_mark(tmp_path, mark):
    (tmp_path / "a.json").write_bytes(mark + b' [{"prompt": "a"},\n {"prompt": "b"}]')
    assert [prompt.text for prompt in build(tmp_path / "a.json").train] == ["a", "b"]


def test_a_header_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.csv").write_bytes("prompt,réponse\na,b\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"a\.csv: its header perhaps is WINDOWS-1252, not UTF-8"):
        build(tmp_path / "a.csv")


def test_a_column_of_bytes_in_a_csv_file_is_refused(tmp_path):
    """Reward functions would get bytes."""
    (tmp_path / "a.csv").write_bytes("prompt,answer\na,é\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"column 'answer' perhaps is WINDOWS-1252, not UTF-8; save it as UTF-8"):
        build(tmp_path / "a.csv")


def test_columns_of_a_csv_file_are_numbers_only_where_that_changes_no_text(tmp_path):
    columns = {
        "prompt": ["a", "b", "c"],
        "mixed": ["5", "2.5", "10"],
        "small": ["1e-05", "0.5", "2e+16"],
        "long": ["12345678901234567890", "1", ""],
        "code": ["007", "8", "9"],
        "price": ["3.50", "2.25", "NA"],
        "holds": ["True", "False", ""],
        "day": ["2026-01-02", "2026-01-03", "2026-01-04"],
        "nothing": ["", "", ""],
    }
    lines = [",".join(cells) for cells in (columns, *zip(*columns.values(), strict=True))]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    found = [prompt.columns for prompt in build(tmp_path / "a.csv").train]
    read = {name: [row[name] for row in found] for name in columns if name != "prompt"}
    for numbers in ("mixed", "small"):
        assert [*map(repr, read.pop(numbers))] == columns[numbers]
    assert read.pop("long") == [12345678901234567890, 1, None]
    assert read == {name: [cell if cell not in ("", "NA") else None for cell in columns[name]] for name in read}


@pytest.mark.parametrize("content", ["", "\n", "{", "[]"])
def test_short_files_are_no_other_encoding(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=r"no rows|not valid JSON"):
        build(tmp_path / "a.json")


def test_settings_of_another_encoding(tmp_path):
    (tmp_path / "a.yaml").write_text("model: m\n", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"a\.yaml: byte 1 is not UTF-8; save the file as UTF-8"):
        read_yaml(tmp_path / "a.yaml")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(8)])
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=data, test=data.select([7])).save_to_disk(str(tmp_path / "both"))
    return tmp_path


@pytest.mark.parametrize("name", ["one", "both"])
@pytest.mark.parametrize(
    ("split", "rows"),
    [("train[:4]", "0123"), ("train[25%:]", "234567"), ("train[-2:]", "67"), ("train[:1]+train[6:]", "067")],
)
def test_slices_of_saved_data_sets(saved, name, split, rows):
    assert [prompt.text for prompt in build(saved / name, split=split).train] == [*rows]


def test_two_parts_of_one_split(saved):
    task = build(saved / "one", split="train[:6]", test=str(saved / "one"), test_split="train[6:]")
    assert (len(task.train), len(task.test)) == (6, 2)


def test_splits_that_are_not_there(saved):
    with pytest.raises(DataError, match=r"Unknown split \"dev\". Should be one of \['train', 'test'\]"):
        build(saved / "both", split="dev[:2]")


@pytest.mark.parametrize("path", ["a.jsonl", "made:gsm-1", "shards/*.csv"])
def test_slices_of_files_are_refused(path):
    with pytest.raises(ValueError, match=r"split: train\[:4\] selects from Hugging Face data sets, and .* none; put"):
        DatasetConfig(path, split="train[:4]")


def test_globs_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    values = {"env": {"name": "dataset", "path": ["shards/*.jsonl", "none/*.jsonl", "made:gsm-1"]}}
    wanted = [str(tmp_path / "shards" / "*.jsonl"), "none/*.jsonl", "made:gsm-1"]
    assert absolute_paths(values)["env"]["path"] == wanted
    assert absolute_paths(values, resumed=True) == values


def test_missing_paths(tmp_path):
    (tmp_path / "here.jsonl").write_text("")
    here, gone = str(tmp_path / "here.jsonl"), str(tmp_path / "gone")
    values = {
        "model": "owner/name",
        "reward_funcs": ["math", f"{gone}.py:f"],
        "env": {"name": "dataset", "path": [here, str(tmp_path / "*.jsonl"), gone], "test": here},
        "selector": {"name": f"{gone}.py:Own"},
        "output_dir": gone,
    }
    assert missing_paths(values) == {"reward_funcs": f"{gone}.py", "env": gone, "selector": f"{gone}.py"}


def test_a_run_that_has_moved(tmp_path, tiny_model, monkeypatch):
    """It resumes from any directory, and names what is no longer where it was; nothing is asked of objects."""
    project = tmp_path / "project"
    (project / "shards").mkdir(parents=True)
    lines = "".join(json.dumps({"prompt": f"{i} + 1 ="}) + "\n" for i in range(4))
    (project / "shards" / "a.jsonl").write_text(lines)
    (project / "mine.py").write_text(
        "def score(completions, **columns):\n    return [len(c) % 2 for c in completions]\n"
    )
    monkeypatch.chdir(project)
    sizes = {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 2, "threads": 1}
    own = {"env": {"name": "dataset", "path": "shards/*.jsonl"}, "reward_funcs": "mine.py:score", "output_dir": "run"}
    Trainer(model=str(tiny_model), config=sizes | own | {"save_steps": 1}).train()
    monkeypatch.chdir(tmp_path)
    assert Trainer.resume(project / "run", {"max_steps": 2}).train()["step"] == 2
    os.rename(project, tmp_path / "moved")
    message = rf"{project}/\S+ was there when the run began .*; move {project} back, .* ln -s NEW {project}$"
    with pytest.raises(ConfigError, match=message):
        Trainer.resume(tmp_path / "moved" / "run", {"max_steps": 3})
    os.symlink(tmp_path / "moved", project)
    assert Trainer.resume(tmp_path / "moved" / "run", {"max_steps": 3}).train()["step"] == 3


def test_what_has_no_end_is_refused(monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_UNCOUNTED_ROWS", 50)
    assert len(build_rows({"prompt": f"p{i}"} for i in range(50)).train) == 50
    for endless in (({"prompt": f"p{i}"} for i in itertools.count()), itertools.cycle([{"prompt": "a"}])):
        with pytest.raises(DataError, match=r"has no length, and no end within 50 rows; .* give itertools.islice"):
            build_rows(endless)
    assert len(build_rows([{"prompt": f"p{i}"} for i in range(51)]).train) == 51
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_list([{"prompt": f"p{i}"} for i in range(60)]).to_iterable_dataset()
    with pytest.raises(DataError, match=r"a IterableDataset has no length.* give train_dataset.take\(n\)"):
        build_rows(stream)
    assert [p.text for p in build_rows(stream.take(3)).train] == ["p0", "p1", "p2"]


def test_longest_prompts():
    task = build_rows([{"prompt": chr(97 + i) * n} for i, n in enumerate((3, 9, 1, 9, 5))])
    assert [p.ordinal for p in task.train.longest(3)] == [1, 3, 4]
    assert [p.ordinal for p in task.train.longest(9)] == [1, 3, 4, 0, 2]
