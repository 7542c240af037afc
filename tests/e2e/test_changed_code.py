"""Code of the user's own that changes between training and a resume: named, or refused by `resume: strict`."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from winnow import ConfigError, Trainer
from winnow.base import dotted
from winnow.record.user_code import code_of

from ..builders.runs import metrics_of

SOURCES = {
    "rewards.py": """
from lib.shared import share
import functools

def own(completions, **columns):
    return [share(c) for c in completions]

def twice(function):
    return functools.wraps(function)(lambda *a, **k: function(*a, **k))

decorated = twice(own)
given = functools.partial(own, unused=1)

class Judge:
    __name__ = "judge"
    def __call__(self, completions, **columns):
        from late import bonus
        return [share(c) + bonus for c in completions]
    def method(self, completions, **columns):
        return self(completions)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return share(solution_str)
""",
    "late.py": "bonus = 0.25\n",
    "lib/__init__.py": "",
    "lib/shared.py": "from . import deep\n\ndef share(text):\n    return float(len(text.split()) % 2) * deep.WEIGHT\n",
    "lib/deep.py": "WEIGHT = 1.0\n",
    "unrelated.py": "x = 1\n",
    "methods.py": """
from dataclasses import dataclass
from winnow.methods.size.fixed import FixedSize

@dataclass(frozen=True)
class Size:
    def build(self, num_generations):
        return FixedSize(num_generations)

class Note:
    def on_log(self, args, state, control, **kwargs):
        pass
""",
}
AGENTS = '''
from lib.shared import share

def solve(prompt, base_url):
    return share(prompt)

def look(word: str) -> str:
    """Look a word up.

    Args:
        word: the word
    """
    return word

class Room:
    def reset(self, **row):
        return None

    def get_reward(self):
        return 1.0

    def go(self, way: str) -> str:
        """Go.

        Args:
            way: which
        """
        return way
'''
MINE = {"rewards", "late", "lib", "methods", "unrelated"}


def forget() -> None:
    """As in a new process."""
    dotted.load.cache_clear()
    for name in [n for n in sys.modules if n.partition(".")[0] in MINE or n.startswith("_winnow_file_")]:
        del sys.modules[name]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "project"
    (root / "lib").mkdir(parents=True)
    for name, text in SOURCES.items():
        (root / name).write_text(text)
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget()
    yield root
    forget()


def given(how: str, root: Path) -> dict[str, Any]:
    """Arguments of a Trainer that use the project."""
    if how in ("named file", "verl"):
        function = {"named file": "own", "verl": "compute_score"}[how]
        return {"reward_funcs": [f"{root / 'rewards.py'}:{function}"]}
    if how == "named module":
        return {"reward_funcs": ["rewards:own"]}
    import methods  # type: ignore[import-not-found]
    import rewards  # type: ignore[import-not-found]

    judge = rewards.Judge()
    found = {"function": rewards.own, "partial": rewards.given, "decorated": rewards.decorated, "object": judge}
    found |= {"method": judge.method, "lambda": lambda completions, **columns: rewards.own(completions)}
    if how in found:
        return {"reward_funcs": [found[how]]}
    return {"reward_funcs": [rewards.own], "callbacks": [methods.Note]}


def warned(run: Path) -> list[str]:
    file = run / "warnings.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in (json.loads(each)["warning"] for each in lines) if "code of this run" in line]


def begin(config: dict[str, Any], how: str, root: Path) -> Path:
    data = [{"prompt": f"1 {i}", "ground_truth": "1"} for i in range(2, 6)]
    keys = config | {"max_steps": 3, "eval_steps": None, "env": "dataset"}
    if how == "size":
        keys |= {"group_size": f"{root / 'methods.py'}:Size"}
    trainer = Trainer(config=keys, train_dataset=data, **given(how, root))
    trainer.step()
    trainer.close()
    forget()
    return Path(config["output_dir"])


def go_on(run: Path, how: str, root: Path, overrides: dict[str, Any] | None = None) -> None:
    data = [{"prompt": f"1 {i}", "ground_truth": "1"} for i in range(2, 6)]
    Trainer.resume(run, overrides, train_dataset=data, **given(how, root)).train()


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(
    ("how", "file"),
    [
        ("named file", "rewards.py"),
        ("named file", "lib/deep.py"),
        ("named module", "lib/shared.py"),
        ("verl", "late.py"),
        ("function", "lib/deep.py"),
        ("partial", "rewards.py"),
        ("decorated", "lib/shared.py"),
        ("object", "late.py"),
        ("method", "lib/deep.py"),
        ("lambda", "lib/shared.py"),
        ("size", "methods.py"),
        ("callback", "methods.py"),
    ],
)
def test_a_changed_file_is_named(tiny_config: dict[str, Any], sources: Path, how: str, file: str) -> None:
    run = begin(tiny_config, how, sources)
    (sources / file).write_text((sources / file).read_text() + "\n# another version\n")
    (sources / "unrelated.py").write_text("x = 2\n")
    with pytest.raises(ConfigError, match=f"resume: strict, but code of this run has changed since step 1: {file};"):
        go_on(run, how, sources, {"resume": "strict"})
    assert [row["step"] for row in metrics_of(run)] == [1]
    forget()
    go_on(run, how, sources)
    (line,) = warned(run)
    assert line.startswith(f"code of this run has changed since step 1: {file}. The run goes on with the code as it is")
    assert [row["step"] for row in metrics_of(run)] == [1, 2, 3]


def test_what_was_only_moved_has_not_changed(tiny_config: dict[str, Any], sources: Path) -> None:
    run = begin(tiny_config | {"save_steps": 1}, "function", sources)
    moved = sources.rename(sources.parent / "elsewhere")
    sys.path[0] = str(moved)
    go_on(run, "function", moved, {"resume": "strict"})
    assert warned(run) == []
    state = json.loads(sorted((run / "checkpoints").glob("step-*"))[-1].joinpath("state.json").read_text())
    files = [name for name in state["code"] if not name.startswith("tests")]
    assert files == ["late.py", "lib/__init__.py", "lib/deep.py", "lib/shared.py", "rewards.py"]


def test_code_that_changes_while_a_run_goes_on(tiny_config: dict[str, Any], sources: Path) -> None:
    """A checkpoint holds what its run was started with."""
    data = [{"prompt": f"1 {i}", "ground_truth": "1"} for i in range(2, 6)]
    keys = tiny_config | {"max_steps": 3, "eval_steps": None, "env": "dataset"}
    trainer = Trainer(config=keys, train_dataset=data, **given("function", sources))
    trainer.step()
    (sources / "lib/deep.py").write_text("WEIGHT = 2.0\n")
    trainer.step()
    trainer.close()
    forget()
    go_on(trainer.run_dir, "function", sources)
    assert [line.partition(". The")[0] for line in warned(trainer.run_dir)] == [
        "code of this run has changed since step 2: lib/deep.py"
    ]


def test_agents_tools_and_environments(tmp_path: Path, sources: Path, tiny_config: dict[str, Any]) -> None:
    (sources / "unrelated.py").write_text(AGENTS)
    unrelated = importlib.import_module("unrelated")

    from winnow.config import validate
    from winnow.env.dataset import DatasetConfig
    from winnow.env.tools import with_tools
    from winnow.tasks.agents import with_agent

    chat = DatasetConfig("rows").with_rows([{"prompt": [{"role": "user", "content": "1"}]}])
    c = validate(tiny_config)
    files = {"lib/__init__.py", "lib/deep.py", "lib/shared.py", "unrelated.py"}
    agents = with_agent(chat, unrelated.solve)
    tools = with_tools(chat, [unrelated.look])
    rooms = with_tools(chat, environment_factory=lambda: unrelated.Room())
    for task in (agents, tools, rooms):
        assert files <= set(code_of([*c.model_dump().values(), task]))
    named = validate(
        tiny_config | {"env": {"name": "agent", "path": "x", "agent": f"{sources / 'unrelated.py'}:solve"}}
    )
    assert set(code_of(named.model_dump().values())) == files


POOLED = """
class Guess:
    def __init__(self, pool):
        self.pool = pool
        self.page = "https://example.com:80", "late: no", "train:loss", "x" * 9000 + ".py:f"

    def make_env(self, prompt):
        return self.pool.make({target!r}, {{}})
"""


@pytest.mark.parametrize("form", ["file", "script"])
def test_environments_that_a_pool_makes_by_name(sources: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The file is named by a constant alone, inside a function."""
    monkeypatch.chdir(sources)
    (sources / "unrelated.py").write_text(AGENTS)
    text = POOLED.format(target="unrelated.py:Room")
    (sources / "methods.py").write_text(text)
    files = {"lib/__init__.py", "lib/deep.py", "lib/shared.py", "unrelated.py"}
    if form != "script":
        task = importlib.import_module("methods").Guess(None)
        assert set(code_of([task])) == {"methods.py", *files}
        return
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<cell>", "exec"), names)
    assert set(code_of([names["Guess"](None)])) == {"Guess.__init__", "Guess.make_env", *files}


SCRIPT = """
import sys
from winnow import Trainer
{import_}
BONUS = {bonus}
def helper(text):
    return float(len(text.split()) % 2){edit}
def mine(completions, **columns):
    return [helper(c) + BONUS for c in completions]
rows = [{{"prompt": f"1 {{i}}"}} for i in range(2, 6)]
if len(sys.argv) > 2:
    Trainer.resume(sys.argv[1], train_dataset=rows, reward_funcs=[{function}]).train()
else:
    keys = {config} | {{"output_dir": sys.argv[1], "max_steps": 2, "eval_steps": None, "env": "dataset"}}
    trainer = Trainer(config=keys, train_dataset=rows, reward_funcs=[{function}])
    trainer.step()
    trainer.close()
"""


@pytest.mark.slow  # a process a run
@pytest.mark.parametrize("function", ["mine", "lambda completions, **k: mine(completions)"])
def test_functions_of_a_script_count_by_themselves(tiny_config: dict[str, Any], tmp_path: Path, function: str) -> None:
    """The rest of the script may change: it resumes now."""
    plain = {"import_": "", "bonus": 0.0, "edit": "", "config": tiny_config, "function": function}
    expected = {"import_": ("import json", ""), "edit": (" * 2", "helper"), "bonus": (0.5, "mine")}
    name = "<lambda>" if function != "mine" else "mine"
    (tmp_path / "train.py").write_text(SCRIPT.format(**plain))
    subprocess.run([sys.executable, tmp_path / "train.py", tmp_path / "begun"], check=True, capture_output=True)
    for key, (value, what) in expected.items():
        run = tmp_path / key
        shutil.copytree(tmp_path / "begun", run)
        (tmp_path / "train.py").write_text(SCRIPT.format(**plain | {key: value}))
        subprocess.run([sys.executable, tmp_path / "train.py", run, "again"], check=True, capture_output=True)
        found = [line.partition(". The")[0] for line in warned(run)]
        assert found == ([f"code of this run has changed since step 1: {what}"] if what else [])
        code = json.loads(sorted((run / "checkpoints").glob("step-*"))[-1].joinpath("state.json").read_text())["code"]
        assert set(code) == {"helper", "mine", name}


def test_functions_of_a_notebook() -> None:
    """Their source is not on disk; without any source their byte code counts."""

    def code(text: str) -> dict[str, str]:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, "<cell>", "exec"), names)
        return code_of([names["f"]])

    first = code("def g(x): return x in {'a', 'b', 'c'}\ndef f(completions): return [g(c) for c in completions]")
    same = code(
        "\n\ndef g(x):\n    return x in {'a', 'b', 'c'}\ndef f(completions): return [g(c) for c in completions]"
    )
    other = code("def g(x): return x in {'a', 'b', 'd'}\ndef f(completions): return [g(c) for c in completions]")
    assert set(first) == {"f", "g"}
    assert first == same
    assert {name for name in first if first[name] != other[name]} == {"g"}


def test_a_run_of_before_says_nothing(tiny_config: dict[str, Any], sources: Path) -> None:
    run = begin(tiny_config, "function", sources)
    from winnow.record.user_code import changes

    assert changes({}, {"rewards.py": "a"}, 1, strict=True) == ""
    assert changes({"a.py": "1", "b.py": "2"}, {"c.py": "1", "b.py": "2"}, 1, strict=True) == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go_on(run, "function", sources)
