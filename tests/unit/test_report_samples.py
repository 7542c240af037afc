"""Samples on the page of a run: texts, tokens, and what gates decided."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from winnow.base.sanitize import visible

from ..builders.pages import decision, make_run, page, sample


def test_samples_show_every_fate_and_messages_as_paragraphs(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    samples = [sample(i, "trained", 1.0) for i in range(2000)]
    samples += [sample(2001, "failed", None, prompt=messages), sample(2002, "cut", 0.5, split="test")]
    shown = page(make_run(tmp_path / "run", steps=5, samples=samples)).data["runs"][0]["samples"]
    assert {s["fate"] for s in shown} == {"trained", "failed", "cut"}
    trained = [s["step"] for s in shown if s["fate"] == "trained"]
    assert len(trained) > 50
    assert trained == sorted(trained)
    assert trained[-1] > 1900
    assert next(s for s in shown if s["fate"] == "failed")["prompt"] == "user: 2+2?\n\nassistant: 4"


def js(text: str, start: int, end: int) -> str:
    """`text.slice(start, end)` in a browser."""
    return text.encode("utf-16-le")[2 * start : 2 * end].decode("utf-16-le", "replace")


def test_tokens_and_marks_are_placed_in_the_text_that_is_shown(tmp_path: Path) -> None:
    pieces = ["🙂", "\x1b[", "", "31m", "\ud800", "نص", " end"]
    text = "".join(pieces)
    turns = [{"at": 0, "chars": [len(p) for p in pieces], "logp": [-0.5, None, *[-1.0] * 5]}]
    decisions = [decision(3, True), decision(len(text) + 9, False, reason="far"), decision(6, True, overridden=0.1)]
    samples = [sample(1, "trained", 1.0, completion=text, turns=turns, decisions=decisions)]
    (shown,) = page(make_run(tmp_path / "run", steps=5, samples=samples)).data["runs"][0]["samples"]
    ((at, chars, logp),) = shown["turns"]
    ends = [at + sum(chars[:n]) for n in range(len(chars) + 1)]
    assert [js(shown["completion"], a, b) for a, b in pairwise(ends)] == [visible(p) for p in pieces]
    assert logp == [-0.5, None, *[-1.0] * 5]
    assert [stand for _, stand, _ in shown["marks"]] == ["kept", "overridden", "stopped"]
    kept, _, far = (place for place, *_ in shown["marks"])
    assert js(shown["completion"], 0, kept) == visible(text[:3])
    assert far > len(shown["completion"].encode("utf-16-le")) // 2


def test_what_a_gate_decided_is_said_with_its_numbers(tmp_path: Path) -> None:
    (first, *_) = page(make_run(tmp_path / "run")).data["runs"][0]["samples"]
    assert [said for *_, said in first["marks"]] == ["arrol kept at token 3: score 0.5, predicted success 0.625"]
    said = "arrol stopped at token 3: pruned at token 3: predicted success 0.10, survival 0.20"
    assert first["siblings"][0]["marks"] == [[5, "stopped", said]]


def test_segments_are_marked_where_they_begin(tmp_path: Path) -> None:
    common = {"prompt_tokens": 1200, "like": 0, "agent": ""}
    later = [
        {"char": 5, "shared": 1000, "new": "Summary:\n\x1b 8", **common},
        {"char": 9_000, "shared": 0, "new": "", **common, "agent": "critic"},
    ]
    more: dict[str, Any] = {
        "segments": 3,
        "agent": "solver",
        "later": later,
        "decisions": [decision(5, True, reason="r")],
    }
    (shown,) = page(make_run(tmp_path / "run", steps=5, samples=[sample(1, "trained", 1.0, **more)])).data["runs"][0][
        "samples"
    ]
    assert shown["segments"] == 3
    assert shown["marks"] == [
        [0, "segment", "segment 1, agent solver"],
        [5, "kept", "arrol kept at token 3: r"],
        [5, "segment", "segment 2: 1,200 prompt tokens, the first 1,000 as in segment 1\nSummary:\n\\x1b 8"],
        [
            len(shown["completion"]) + 1,
            "segment",
            "segment 3, agent critic: 1,200 prompt tokens, none as in an earlier segment",
        ],
    ]


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"turns": None, "decisions": 5},
        {"segments": "x", "later": 5, "agent": None},
        {"later": [{}, 5, {"char": -1, "shared": 1, "like": 0, "prompt_tokens": 2}, {"char": 1, "shared": "1"}]},
        {"turns": [{"at": "0", "chars": [1], "logp": [-1.0]}, [], {"at": 0}], "decisions": [{"char": -1}, {}, "x"]},
        {"turns": [{"at": 0, "chars": [1, 10**12], "logp": [-1.0, 0.0]}, {"at": 0, "chars": [1], "logp": ["-1"]}]},
        {"turns": [{"at": 0, "chars": [1, True], "logp": [-1.0, 0.0]}, {"at": 0, "chars": [1], "logp": [-1.0, 0.0]}]},
    ],
)
def test_samples_of_older_runs_and_damaged_ones_have_no_tokens(tmp_path: Path, odd: dict[str, Any]) -> None:
    line = {k: v for k, v in sample(1, "trained", 1.0).items() if k not in ("turns", "decisions")} | odd
    (shown,) = page(make_run(tmp_path / "run", steps=5, samples=[line])).data["runs"][0]["samples"]
    assert (shown["turns"], shown["marks"]) == ([], [])
    assert shown["completion"] == line["completion"]
