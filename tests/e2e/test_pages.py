"""Pages of the documentation as a stranger reads them: commands and settings that exist, and the tutorial run whole."""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from winnow import Trainer
from winnow.cli.main import app
from winnow.config import METHODS, RunConfig, validate
from winnow.config.options import method
from winnow.record.stop_conditions import RunStoppedError
from winnow.run.resolved import TABLES

from ..builders.tokenizers import chat_model  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
LINE = re.compile(r"^(?: {4}|\$ )?winnow ([a-z][^`\n]*)$", re.MULTILINE)
PLACEHOLDER = re.compile(r"\b(RUN|FILE|DIRECTORY|ADDRESS)\b|\.\.\.")


def commands_of(text: str) -> list[list[str]]:
    """Lines that begin with `winnow`, without their comments; a backslash goes on in the next line."""
    lines = LINE.findall(re.sub(r"\\\n\s*", " ", text))
    return [shlex.split(line, comments=True) for line in lines]


def cases() -> list[Any]:
    found = [(page, command) for page in PAGES for command in commands_of(page.read_text(encoding="utf-8"))]
    return [pytest.param(command, id=f"{page.stem}: {' '.join(command)[:60]}") for page, command in found]


@pytest.mark.parametrize("command", cases())
def test_a_command_has_the_options_that_a_page_gives_it(command: list[str]) -> None:
    name, *arguments = command
    found = COMMANDS[name]
    while arguments and arguments[0] in getattr(found, "commands", {}):
        found = found.commands[arguments.pop(0)]
    context = found.make_context(name, [], resilient_parsing=True)
    found.make_parser(context).parse_args(args=list(arguments))
    if name in ("train", "resume", "demo", "demo-llm"):
        for override in (a for a in arguments if "=" in a and not a.startswith("-")):
            key = override.partition("=")[0].partition(".")[0]
            assert key in RunConfig.model_fields or key in ("variant", "warm_start"), override


def settings() -> list[Any]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        found += [pytest.param(block, id=f"{page.stem}-{i}") for i, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize("block", settings())
def test_settings_of_pages_are_settings(block: str) -> None:
    """Keys, values, and options of methods."""
    values = yaml.safe_load(block)
    config = validate({"model": "m", "env": "countdown", "output_dir": "runs/x"} | values)
    for key in METHODS:
        table, spec = TABLES.get(key), getattr(config, key)
        for each in spec if isinstance(spec, list) else [spec]:
            if table is not None and ":" not in str(each) and each != "auto":
                method(table, each, key)


def test_there_is_something_to_check() -> None:
    assert len(cases()) > 40
    assert len(settings()) > 12


SHORTER = {
    "warm-start": ["max_steps=20", "batch_size=16", "threads=1", "hidden_size=32", "num_heads=2", "num_layers=1"],
    "train": ["max_steps=2", "max_skipped_steps=3", "filter=keep_all", "threads=1"],
}


def make_files(text: str) -> list[str]:
    """In the working directory: an indented block behind the name of a file."""
    found = re.findall(r"^(?:.* )?`([\w-]+\.\w+)`(?: \(.*\))?:\n\n((?: {4}.*\n|\n)+)", text, re.MULTILINE)
    for name, content in found:
        Path(name).write_text(textwrap.dedent(content), encoding="utf-8")
    return [name for name, _ in found]


def run_commands(text: str, shorter: dict[str, list[str]]) -> list[str]:
    commands = commands_of(text)
    for command in commands:
        done = CliRunner().invoke(app, [*command, *shorter.get(command[0], [])])
        assert done.exit_code == 0, f"{command}: {done.output}"
    return [command[0] for command in commands]


def test_the_agent_that_compacts_its_history(here: Path, chat_model: Path) -> None:
    text = (ROOT / "docs" / "tutorial-agent.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"\n## An agent that compacts its history\n(.*?)\n## ", text, re.DOTALL)
    code = "\n".join(re.findall(r"^ {4}(.*)$|^$", section, re.MULTILINE))
    Path("my_agent.py").write_text("from openai import OpenAI\n" + code.replace("> 200", "> 60"))
    Path("rows.jsonl").write_text('{"prompt": "The key is 7.", "answer": "7"}\n' * 2)
    env = {"name": "agent", "path": "rows.jsonl", "agent": "my_agent.py:remember", "max_turn_length": 8}
    config = {"model": str(chat_model), "env": env, "output_dir": "run", "max_steps": 1, "prompts_per_step": 1}
    config |= {"num_generations": 2, "max_completion_length": 1024, "context_length": 400, "max_prompt_length": 128}
    Trainer(config=config | {"threads": 1, "max_skipped_steps": 5}).train()
    (line,) = Path("run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["segments/mean"] > 1


def python_of(text: str) -> str:
    (code,) = re.findall(r"\n## The same from Python\n\n((?: {4}.*\n|\n)+)", text)
    return textwrap.dedent(code)


def one_step(code: str) -> str:
    """The code of a page with one step, which trains whatever its rewards are."""
    for old, new in (('"max_steps": 10', '"max_steps": 1, "threads": 1'), ('"zero_variance"', '"keep_all"')):
        assert old in code
        code = code.replace(old, new)
    return code


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_reward", None)  # the next page has another of that name


@pytest.mark.slow
def test_the_tutorial_from_top_to_bottom(here: Path) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert make_files(text) == ["puzzles.jsonl", "my_reward.py", "mine.yaml"]
    assert run_commands(text, SHORTER) == [
        *("warm-start", "train", "train", "train", "verify", "report", "report", "pass-rates")
    ]
    assert Path("both.html").exists()
    assert Path("after.jsonl").exists()
    exec(one_step(python_of(text)), {})
    assert Path("runs/mine-py/model").is_dir()


TRL_SHORT = """max_steps=2, save_steps=1, max_completion_length=4, use_cpu=True, bf16=False, report_to=[],
per_device_train_batch_size=4, num_generations=2"""


@pytest.mark.slow
def test_the_tutorial_for_somebody_from_trl(here: Path) -> None:
    """Whole but for the page that waits for a browser and the upload, which `test_push.py` tries."""
    pytest.importorskip("trl")
    text = (ROOT / "docs" / "tutorial-trl.md").read_text(encoding="utf-8")
    for line in ("    winnow watch runs/mine\n", "    winnow push runs/mine hub_model_id=me/my-model\n"):
        assert line in text
        text = text.replace(line, "")
    assert make_files(text) == ["train.jsonl", "held-out.jsonl", "my_reward.py", "mine.yaml"]
    before, code, after = re.split(r"^```(?:python)?\n", text, maxsplit=2, flags=re.MULTILINE)
    assert run_commands(before, SHORTER) == ["warm-start"]
    assert "max_steps=100, save_steps=50" in code
    code = code.replace("max_steps=100, save_steps=50", TRL_SHORT)
    try:
        exec(code, {})
    except RunStoppedError as error:
        assert "had no signal" in str(error)  # noqa: PT017
    shorter = SHORTER | {"train": [*SHORTER["train"], "max_skipped_steps=9"], "resume": ["max_steps=3"]}
    assert run_commands(after, shorter) == [
        *("verify", "report", "doctor", "train", "train", "train", "resume"),
        *("eval", "eval", "verify", "report", "train", "compare"),
    ]
    assert Path("runs/mine/model").is_dir()


@pytest.mark.slow
def test_the_tutorial_of_an_agent(here: Path, chat_model: Path) -> None:
    """Whole but for the fetching; the model is one that nobody taught anything."""
    text = (ROOT / "docs" / "tutorial-agent.md").read_text(encoding="utf-8")
    assert make_files(text) == ["sums.jsonl", "my_agent.py", "agent.yaml"]
    fetch = "    winnow models get smollm2-135m\n"
    assert fetch in text
    shorter = {"train": [*SHORTER["train"], f"model={chat_model}", *LONGER]}
    assert run_commands(text.replace(fetch, ""), shorter) == ["train", "train", "verify", "report"]
    code = python_of(text).replace("smollm2-135m", str(chat_model)).replace('"max_prompt_length": 96, ', "")
    exec(one_step(code).replace(": 128", ": 256"), {})
    assert Path("runs/agent-py/model").is_dir()


LONGER = ["max_prompt_length=256", "max_completion_length=256"]  # a letter is a token of the model that stands in
