"""Install lines name where this copy came from, and a schema, a doctor and a version that a newcomer asks for first."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from winnow import __version__
from winnow.base import machine as install_module
from winnow.base.machine import install
from winnow.cli.main import app
from winnow.cli.schema import config_schema
from winnow.config import METHODS, load_config
from winnow.env.workers.bubblewrap import SandboxError
from winnow.study import doctor

ROOT = Path(__file__).parents[2]
CHECKOUT = f"pip install -e '{ROOT}[ray]'"


class Distribution:
    def __init__(self, origin: dict[str, Any] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        ({"url": "file:///opt/winnow", "dir_info": {}}, "pip install 'winnow-rl[ray] @ file:///opt/winnow'"),
        (
            {"url": "file:///w/winnow_rl-0.2.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'winnow-rl[ray] @ file:///w/winnow_rl-0.2.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/winnow.git", "vcs_info": {"vcs": "git"}},
            "pip install 'winnow-rl[ray] @ git+https://host/winnow.git'",
        ),
        (None, "pip install 'winnow-rl[ray]'"),
    ],
)
def test_an_extra_comes_from_where_the_package_came(
    origin: dict[str, Any] | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_module, "distribution", lambda name: Distribution(origin))
    monkeypatch.setattr(install_module, "__file__", "/usr/lib/python3/site-packages/winnow/base/machine.py")
    assert install("ray") == line


def test_what_is_in_a_checkout_comes_from_it_installed_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise install_module.PackageNotFoundError(name)

    assert install("ray") == CHECKOUT
    monkeypatch.setattr(install_module, "distribution", missing)
    assert install("ray") == CHECKOUT
    assert install("") == CHECKOUT.replace("[ray]", "")


def test_no_page_or_message_names_a_registry() -> None:
    """The name is on none: whoever took it would be installed."""
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("src/winnow/**/*.py")]
    assert len(pages) > 200
    assert [str(page) for page in pages if "install 'winnow-rl" in page.read_text(encoding="utf-8")] == []


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    found = config_schema()
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


@pytest.mark.parametrize("recipe", sorted(p.name for p in (ROOT / "recipes").glob("*.yaml")))
def test_recipes_are_valid_by_the_schema(recipe: str, schema: jsonschema.Draft202012Validator) -> None:
    path = ROOT / "recipes" / recipe
    schema.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    saved = load_config(path).model_dump(mode="json")
    schema.validate(saved)
    assert set(saved) == set(schema.schema["properties"]) - {"variants"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rat": 1e-6},
        {"max_steps": 0},
        {"selector": "gresso"},
        {"selector": {"name": "greso", "alpha": 1}},
        {"gates": "arrol"},
        {"gates": [{"name": "arrol", "keep_it": 0.5}]},
        {"filter": ["zero_varianc"]},
        {"dtype": "int8"},
    ],
)
def test_the_schema_refuses(wrong: dict[str, Any], schema: jsonschema.Draft202012Validator) -> None:
    good = {"model": "m", "env": "countdown"}
    schema.validate(good | {"selector": "mine.py:Mine", "filter": ["zero_variance", "keep_all"]})
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(good | wrong)


def test_the_package_data_names_every_file_that_is_no_python() -> None:
    source = ROOT / "src" / "winnow"
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]["winnow"]
    files = {p.relative_to(source) for p in source.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert {p for p in files if not any(p.match(glob) for glob in globs)} == set()


@pytest.mark.parametrize(("lock", "kind"), [("winnow", ""), ("dev", ""), ("scale", "-scale")])
def test_locks_are_of_what_the_tests_run_with(lock: str, kind: str) -> None:
    """Every version that is pinned is the one of the lock, and what the package asks for is there."""
    lines = (ROOT / "locks" / f"{lock}.txt").read_text("utf-8").splitlines()[1:]
    locked = dict(line.partition(" --hash=sha256:")[0].split("==") for line in lines)
    assert all(re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    pins = [
        Requirement(line) for line in (ROOT / f"constraints{kind}.txt").read_text("utf-8").splitlines() if "==" in line
    ]
    for pin in pins:
        name = pin.name.lower().replace("_", "-")
        assert name not in locked or pin.specifier.contains(locked[name]), pin
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for needed in map(Requirement, project["dependencies"]):
        assert needed.name == "torch" or needed.specifier.contains(locked[needed.name.lower()]), needed


def test_the_citation_is_of_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == __version__


def test_commands() -> None:
    run = CliRunner().invoke
    assert run(app, ["--version"]).stdout.strip() == f"winnow {__version__}"
    assert set(METHODS) < set(json.loads(run(app, ["schema"]).stdout)["properties"])
    found = {finding["what"]: finding for finding in json.loads(run(app, ["doctor", "--json"]).stdout)}
    assert found["winnow"] == {"what": "winnow", "found": __version__, "remedy": ""}
    assert {"Python", "processor", "threads", "memory", "disk here", "sandbox", "GPU", "hub"} < set(found)
    assert "extra ray" in run(app, ["doctor"]).stdout


def test_a_doctor_names_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_sandbox(options: Any) -> None:
        raise SandboxError("sandbox: bwrap is not installed. apt install bubblewrap")

    monkeypatch.setattr(doctor, "Sandbox", no_sandbox)
    monkeypatch.setattr(doctor, "LITTLE_MEMORY", 2**60)
    monkeypatch.setattr(doctor, "LITTLE_DISK", 2**70)
    monkeypatch.setattr(doctor, "version", lambda name: (_ for _ in ()).throw(doctor.PackageNotFoundError(name)))
    monkeypatch.setattr(doctor, "usable_threads", lambda: 0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {finding["what"]: finding for finding in doctor.examine()}
    (tmp_path / "memory.max").write_text(f"{1 << 28}\n")
    monkeypatch.setattr(install_module, "LIMITS", tmp_path)
    assert next(doctor._room())[1] == "0.2 GiB available", "what the container leaves"
    for what, remedy in {
        "sandbox": "apt install bubblewrap",
        "memory": "need more",
        "disk here": "WINNOW_CACHE",
        "threads": "OMP_NUM_THREADS",
        "C++ compiler": "apt install g++",
        "extra peft": "[peft]'",
    }.items():
        assert remedy in found[what]["remedy"], what
    assert found["sandbox"]["found"] == "none: bwrap is not installed"
    assert found["hub"]["found"] == "not asked: HF_HUB_OFFLINE is set"
