"""Every input to start from, and every input that once broke a parser, does not break one."""

from __future__ import annotations

from pathlib import Path

import pytest

from .targets import TARGETS, one_input

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_what_the_fuzzer_starts_from(name: str) -> None:
    for data in TARGETS[name].seeds():
        one_input(name, data)
        one_input(name, data[: len(data) // 2])
    one_input(name, b"")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "yaml" else ()) for n in TARGETS])
def test_what_is_nested_deeper_than_python_goes(name: str) -> None:
    for data in (b"[" * 200_000, b'{"a":' * 100_000, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        one_input(name, data)


@pytest.mark.parametrize("name", TARGETS)
def test_whole_inputs_are_taken(name: str, tmp_path: Path) -> None:
    """A target that refuses everything would test nothing."""
    TARGETS[name].run(TARGETS[name].seeds()[0], tmp_path)


@pytest.mark.parametrize("file", sorted(p for p in CORPUS.rglob("*") if p.is_file()), ids=lambda p: p.name)
def test_minimal_cases(file: Path) -> None:
    one_input(file.parent.name, file.read_bytes())
