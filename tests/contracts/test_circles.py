"""No module reaches itself by imports: neither inside functions, nor for type checking, nor by a name in a string."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import winnow

SOURCE = Path(winnow.__file__).parent
NAME = re.compile(r"(winnow(?:\.\w+)+)(?::\w+)?")
"""A module, or a function of it, as pools and `import_module` name them."""


def modules(source: Path = SOURCE) -> dict[str, Path]:
    found = {}
    for path in source.rglob("*.py"):
        parts = path.relative_to(source.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(module: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := NAME.fullmatch(node.value)):
            names = [match[1]]
        yield from (name for name in names if name in known and name != module)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A path from a module to itself; empty if none has one."""
    done: set[str] = set()

    def follow(path: list[str]) -> list[str]:
        for name in sorted(graph[path[-1]] - done):
            if name in path:
                return [*path[path.index(name) :], name]
            if found := follow([*path, name]):
                return found
        done.add(path[-1])
        return []

    for name in sorted(graph):
        if found := follow([name]):
            return found
    return []


def graph_of(source: Path) -> dict[str, set[str]]:
    known = modules(source)
    return {name: set(imported(name, path, known)) for name, path in known.items()}


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = graph_of(SOURCE)
    assert len(graph) > 200
    assert "winnow.types" in graph["winnow.loop"], "relative imports are found"
    assert circle(graph) == []


def test_every_kind_of_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "winnow"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from . import b\n")
    for back in (
        "from . import a",
        "from .a import x",
        "import winnow.a",
        "if TYPE_CHECKING:\n    from .a import X",
        "def f():\n    from winnow import a",
        "ENTRY = 'winnow.a:main'",
    ):
        (package / "b.py").write_text(back)
        assert circle(graph_of(package)) == ["winnow.a", "winnow.b", "winnow.a"], back
    (package / "b.py").write_text("'''See winnow.a.'''\nimport os\n")
    assert circle(graph_of(package)) == []
