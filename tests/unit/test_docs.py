"""README and docs name only files, modules, commands and capabilities that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import typer

from winnow.cli.main import app
from winnow.engine import CAPABILITIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
FILE = re.compile(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|md))`")
FOLDER = re.compile(r"`((?:[\w-]+/)+)`")
LINK = re.compile(r"\]\(([\w./-]+\.(?:md|png))(?:#[\w-]+)?\)")
MODULE = re.compile(r"\b(?:from|import) (winnow[\w.]*)(?: import ([\w, ]+))?")


def commands() -> set[str]:
    return set(getattr(typer.main.get_command(app), "commands", {}))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    inside = page.name in (
        "README.md",
        "CONTRIBUTING.md",
        "design.md",
    )  # the others also name folders that a run or a user makes
    for named in FILE.findall(text) + (FOLDER.findall(text) if inside else []):
        places = [ROOT / named, ROOT / "src" / "winnow" / named, *(ROOT / "src" / "winnow").glob(f"*/{named}")]
        assert any(p.exists() for p in places), named
    for linked in LINK.findall(text):
        assert (page.parent / linked).exists(), linked
    for command in re.findall(r"^\W*winnow ([a-z-]+)|`winnow ([a-z-]+)", text, re.MULTILINE):
        assert "".join(command) in commands(), command
    for module, names in MODULE.findall(text):
        found = importlib.import_module(module)
        for name in filter(None, (n.partition(" as ")[0].strip() for n in names.split(","))):
            assert hasattr(found, name), f"{module}.{name}"


def test_the_tests_that_pages_name_exist() -> None:
    """Of the fault matrix above all: `file.py::test_name`, below `tests/`."""
    named = {
        found for page in PAGES for found in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 60
    for file, name in named:
        text = (ROOT / "tests" / file.removeprefix("tests/")).read_text(encoding="utf-8")
        assert re.search(rf"def {name}\(", text), f"{file}::{name}"


def test_every_capability_of_the_engine_is_explained() -> None:
    text = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    table = text.partition("`provides` names")[2].partition("\n## ")[0]
    explained = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert explained == set(CAPABILITIES)


def test_every_page_is_in_the_site() -> None:
    """As `make docs` builds it: none is left out, and none is named that is not there."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r": ([\w-]+\.md)$", text, re.MULTILINE)) == sorted(
        page.name for page in (ROOT / "docs").glob("*.md")
    )


def test_what_the_reference_names_is_there() -> None:
    named = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) > 10
    for name in named:
        module, _, member = name.rpartition(".")
        try:
            assert hasattr(importlib.import_module(module), member), name
        except ImportError:
            importlib.import_module(name)
