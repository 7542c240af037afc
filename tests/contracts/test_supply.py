"""What Winnow is made of and how it reads: locks with hashes, known licences, and nothing that runs what it reads."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
OWN = {
    ("engine/vllm/core.py", "pickle"): "between a process and a child of its own, by the child's standard input",
    ("env/prompt_store.py", "pickle"): "a file without a name, which only the process that wrote it can read",
    ("config/settings_yaml.py", "yaml.load"): "with a loader derived from SafeLoader",
}
"""Where it is right, and why."""
FORBIDDEN_CALLS = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "marshal.loads", "joblib.load"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "locks" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lock", ["winnow", "dev", "scale"])
def test_every_package_of_a_lock_has_a_version_and_a_hash(audit: ModuleType, lock: str) -> None:
    assert len(audit.locked(lock)) > 20


def test_licences_and_vendored_files(audit: ModuleType) -> None:
    found = [text for text in audit.problems("dev") if "not installed" not in text and "the lock says" not in text]
    assert found == []


def test_a_changed_file_or_licence_is_found(audit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "VENDORED", dict.fromkeys(audit.VENDORED, "0" * 64))
    rich = audit.installed()["rich"].version
    monkeypatch.setattr(audit, "locked", lambda name: {"pytest": "0.0", "no-such": "1", "rich": rich})
    monkeypatch.setattr(audit, "licence", lambda distribution: "GNU General Public License v3 (GPLv3)")
    found = "\n".join(audit.problems("dev"))
    for words in ("pytest is", "no-such 1 is in the lock", "is under GNU General", "is not the file that was vendored"):
        assert words in found


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def breaches(text: str) -> list[str]:
    """Calls and imports that could run what is read; `trust_remote_code` and `shell` that are anything but off."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            found += [name] if name in FORBIDDEN_CALLS else []
            options = {k.arg: k.value for k in node.keywords}
            found += [
                f"{name}({option}=...)"
                for option in ("trust_remote_code", "shell", "allow_pickle")
                if option in options and not (isinstance(options[option], ast.Constant) and not options[option].value)
            ]
            weights_only = options.get("weights_only")
            if name == "torch.load" and not (isinstance(weights_only, ast.Constant) and weights_only.value is True):
                found.append("torch.load without weights_only=True")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in FORBIDDEN_IMPORTS]
        elif isinstance(node, ast.ImportFrom) and node.module in FORBIDDEN_IMPORTS:
            found.append(node.module)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_nothing_runs_what_it_reads(path: Path) -> None:
    name = path.relative_to(ROOT / "src" / "winnow").as_posix()
    assert [found for found in breaches(path.read_text(encoding="utf-8")) if (name, found) not in OWN] == []


@pytest.mark.parametrize(
    "text",
    [
        "eval(x)",
        "import pickle",
        "from pickle import loads",
        "yaml.load(x)",
        "subprocess.run(x, shell=True)",
        "f(trust_remote_code=a)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)",
    ],
)
def test_what_would_is_found(text: str) -> None:
    assert breaches(text)
