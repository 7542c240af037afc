"""Benchmarks and examples, which no test runs as a whole, import nothing from Winnow that is not there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


def missing(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "winnow":
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names if not hasattr(module, alias.name)):
                try:
                    importlib.import_module(f"{node.module}.{name}")
                except ModuleNotFoundError:
                    yield f"{node.module}.{name}"


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_what_is_imported_is_there(path: Path) -> None:
    assert list(missing(path.read_text(encoding="utf-8"))) == []


def test_what_is_not_there_is_found() -> None:
    assert list(missing("def f():\n    from winnow.types import Rollout, Nothing")) == ["winnow.types.Nothing"]
