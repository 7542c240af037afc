"""Every wait for Ray has an end: a node that is lost never says so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import winnow

SOURCE = Path(winnow.__file__).parent
WAITS = ("get", "wait")
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if re.search(r"\bray\b", path.read_text(encoding="utf-8"))]


def endless(text: str) -> list[str]:
    """Places that wait for Ray without a time to give up at."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "ray":
            found += [
                f"line {node.lineno}: say ray.{a.name}, so that it is seen" for a in node.names if a.name in WAITS
            ]
        if isinstance(node, ast.Import):
            found += [f"line {node.lineno}: ray by another name" for a in node.names if a.name == "ray" and a.asname]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in WAITS:
            continue
        limits = [k.value for k in node.keywords if k.arg in ("timeout", "timeout_seconds")]
        of_ray = ast.unparse(node.func.value) == "ray"
        if node.func.attr == "wait" and not of_ray:  # processes, events and placement groups take it by place, too
            limits += node.args[:1]
        elif not of_ray:
            continue
        if not limits or (isinstance(limits[0], ast.Constant) and limits[0].value is None):
            found.append(f"line {node.lineno}: {ast.unparse(node)} has no timeout")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_wait_for_ray_has_a_timeout(path: Path) -> None:
    assert endless(path.read_text(encoding="utf-8")) == []


def test_the_places_that_wait_are_looked_at() -> None:
    calls = sum(path.read_text(encoding="utf-8").count(f"ray.{name}(") for path in FILES for name in WAITS)
    assert calls >= 6


@pytest.mark.parametrize(
    "text",
    [
        "ray.get(x)",
        "ray.wait([x], num_returns=2)",
        "ray.get(x, timeout=None)",
        "place.wait()",
        "from ray import get",
        "import ray as r",
    ],
)
def test_a_wait_without_an_end_is_found(text: str) -> None:
    assert len(endless(text)) == 1


@pytest.mark.parametrize("text", ["ray.get(x, timeout=1)", "ray.wait([x], timeout=t)", "place.wait(3)", "d.get('ray')"])
def test_a_wait_with_an_end_is_not(text: str) -> None:
    assert endless(text) == []
