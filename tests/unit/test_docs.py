"""README and docs name only files, modules, commands and capabilities that exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import typer
import yaml

from winnow.cli.main import app
from winnow.config import RunConfig
from winnow.engine import CAPABILITIES
from winnow.run.resolved import TABLES

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


def test_the_folders_of_the_package() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    folders = sorted(path.parent.name for path in (ROOT / "src" / "winnow").glob("*/__init__.py"))
    assert sorted(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)) == folders
    assert len(folders) == 14
    assert "four files and fourteen folders" in text
    assert len([p for p in (ROOT / "src" / "winnow").glob("*.py") if not p.name.startswith("__")]) == 4


def defaults_of(table: str, key: str) -> dict[str, object]:
    """Of the options of a method; of all keys where no method is named."""
    if not table:
        return {name: field.default for name, field in RunConfig.model_fields.items()}
    return {field.name: field.default for field in dataclasses.fields(TABLES[table][key])}


@pytest.mark.parametrize(
    ("page", "head", "table", "method", "checked"),
    [
        ("configuration.md", "| key | default |", "", "", 60),
        ("active-rloo.md", "| option of `filter` |", "filter", "zero_variance", 3),
        ("active-rloo.md", "| option of `group_size", "group_size", "adaptive_k", 3),
        ("arrol.md", "| option | default |", "gates", "arrol", 9),
        ("gate.md", "| option | default |", "gates", "divergence", 3),
        ("greso.md", "| option of `selector` |", "selector", "greso", 7),
    ],
)
def test_defaults_in_tables_are_those_of_the_code(page: str, head: str, table: str, method: str, checked: int) -> None:
    """A default that is words, as `the task's`, is left out, and so is a dash of options that share a cell of one."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(head)[2].partition("\n\n")[0]
    defaults, found = defaults_of(table, method), 0
    for line in text.splitlines()[2:]:
        first, second = line.removeprefix("|").split("|")[:2]
        keys = re.findall(r"`(\w+)`", first)
        assert set(keys) <= defaults.keys(), line
        given = [part.strip().strip("`") for part in second.split(",")]
        for key, part in zip(keys, given * len(keys) if len(given) == 1 else given, strict=False):
            value = yaml.safe_load(part) if re.fullmatch(r"[\w.+-]+|\[\]|\{\}", part) else None
            value = 1e-6 if part == "1e-6" else 1e-8 if part == "1e-8" else value
            if value is not None and value != "none" and value not in list(RunConfig.model_fields):
                assert defaults[key] == value, f"{page}: {key}: {part}, but {defaults[key]}"
                found += 1
    assert found >= checked
