"""No file knows a method by name but its own, its table, and the few that are listed here with their reason."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import winnow
from winnow.run.resolved import TABLES

SOURCE = Path(winnow.__file__).parent
KEYS = ("selector", "rollout_batch", "group_size", "gates", "filter", "advantage", "correction", "step_scale")
WORDS = {"none", "fixed", "exact", "random", "mask", "adaptive", "uniform", "ordered", "truncate", "pass_rate"}
WORDS |= {"grpo", "dr_grpo", "zero_variance"}
"""Names that are common words, loss types or columns, too; of these only imports of the class count."""
MAY_KNOW = {
    "config/__init__.py": "defaults",
    "methods/loss.py": "the default of a loss",
}


def methods() -> list[tuple[str, type]]:
    return [(name, cls) for key in KEYS for name, cls in TABLES[key].items()]


@cache
def said_in(text: str) -> tuple[set[tuple[str, str]], set[object]]:
    """Names that a file imports, each with the last part of its module, and constants other than docstrings."""
    nodes = [*ast.walk(ast.parse(text))]
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {((node.module or "").rpartition(".")[2], alias.name) for node in froms for alias in node.names}
    return imported, {node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs}


def knows(path: Path, name: str, cls: type) -> bool:
    """Whether a file imports the class, or has the name as a string of its own."""
    imported, constants = said_in(path.read_text(encoding="utf-8"))
    return (cls.__module__.rpartition(".")[2], cls.__name__) in imported or (name in constants and name not in WORDS)


@pytest.mark.parametrize(("name", "cls"), methods(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_method_is_known_to_its_file_and_its_table_alone(name: str, cls: type) -> None:
    packages = cls.__module__.split(".")[1:-1]
    table, folder = SOURCE.joinpath(*packages[:2]), SOURCE.joinpath(*packages)
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        own = path.parent in (table, folder)
        if not own and str(path.relative_to(SOURCE)) not in MAY_KNOW and knows(path, name, cls):
            found.append(str(path.relative_to(SOURCE)))
    assert found == []


def test_the_page_knows_no_method() -> None:
    names = [name for name, _ in methods() if name not in WORDS]
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b", re.IGNORECASE)
    found = {path.name: pattern.findall(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.js")}
    assert not {name: hits for name, hits in found.items() if hits}


def test_a_file_that_knows_a_method_is_found(tmp_path: Path) -> None:
    name, cls = "greso", TABLES["selector"]["greso"]
    for text, known in (
        ("from ..methods.select.greso import Greso", True),
        ("if name == 'greso': pass", True),
        ('"""greso"""', False),
        ("x = 'greso-like'", False),
    ):
        (tmp_path / "file.py").write_text(text)
        assert knows(tmp_path / "file.py", name, cls) is known
