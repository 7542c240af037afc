"""Python as a tool: what is run, what the model is shown, who judges."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from winnow.env.base import ModelTurn, OverlappingEnv
from winnow.env.workers.bubblewrap import SandboxError
from winnow.env.workers.sandbox import Outcome
from winnow.tasks import ENVS
from winnow.tasks.python_tool import PythonTool, PythonToolConfig, PythonToolEnv, _instructed
from winnow.types import Prompt

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


class Scripted:
    """In the sandbox's place: remembers what it was told to run."""

    def __init__(self, outcome: Outcome | Exception) -> None:
        self.outcome, self.run = outcome, list[str]()

    def __call__(self, code: str) -> Future[Outcome]:
        self.run.append(code)
        future: Future[Outcome] = Future()
        if isinstance(self.outcome, Exception):
            future.set_exception(self.outcome)
        else:
            future.set_result(self.outcome)
        return future


def step(text: str, outcome: Outcome | Exception, *, most: int = 2_000, calls: int = 3) -> tuple[Any, list[str]]:
    start = Scripted(outcome)
    env = PythonToolEnv(start, calls, most)
    assert isinstance(env, OverlappingEnv)
    assert env.start_reset().result() is None
    return env.start_step(text).result(), start.run


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Let me see.\n```python\nprint(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("```py\nx = 1\nprint(x)\n```\n", "x = 1\nprint(x)"),
        ("```python\nfirst\n```\nand\n```python\nsecond", "second"),
        ("```python\n", ""),
    ],
)
def test_the_last_block_is_run(text: str, code: str) -> None:
    result, run = step(text, Outcome("1\n", "", 0))
    assert run == [code]
    assert (result.observation, result.done, result.reward) == ("```output\n1\n```\n", False, None)
    assert result.action == code


@pytest.mark.parametrize("text", ["The answer is \\boxed{4}.", "", "```\nplain\n```", "```pythonista\nx\n```"])
def test_a_turn_without_a_block_ends_it_without_a_reward(text: str) -> None:
    result, run = step(text, Outcome("", "", 0))
    assert run == []
    assert (result.observation, result.done, result.reward) == (None, True, None)


@pytest.mark.parametrize("text", ["The numbers are\n```\n", "```json\n{}\n```\n"])
def test_the_fence_of_another_block_ends_no_rollout(text: str) -> None:
    """It completes the stop string in the middle of an answer."""
    result, run = step(ModelTurn(text, "stop", "\n```\n"), Outcome("", "", 0))
    assert run == []
    assert (result.done, result.reward) == (False, None)
    assert "only ```python blocks" in result.observation


def test_no_more_blocks_are_run_than_there_are_calls() -> None:
    start = Scripted(Outcome("1\n", "", 0))
    env = PythonToolEnv(start, 2, 100)
    done = [env.start_step(f"```python\n{i}").result().done for i in range(3)]
    assert (done, start.run) == ([False] * 3, ["0", "1"]), "the limit on turns ends it"


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        (Outcome("", "", 0), "(it printed nothing)"),
        (Outcome("1\n", "warning\n", 0), "1"),
        (Outcome("1\n", "Traceback\nZeroDivisionError\n", 1), "1\nTraceback\nZeroDivisionError"),
        (Outcome("1\n", "", None, timed_out=True), "1\n\n(stopped: it took too long)"),
        (Outcome("1", "", None, truncated=True), "1\n(stopped: it printed too much)"),
        (Outcome("```\n\\boxed{1}\n```output\n", "", 0), "'''\n\\boxed{1}\n'''output"),
        (Outcome("a" * 60 + "b" * 60, "", 0), "a" * 50 + "\n... (20 characters left out) ...\n" + "b" * 50),
    ],
)
def test_what_the_model_is_shown(outcome: Outcome, shown: str) -> None:
    result, _ = step("```python\nx", outcome, most=100)
    assert result.observation == f"```output\n{shown}\n```\n"


def test_a_sandbox_that_fails_is_an_exception_and_no_observation() -> None:
    env = PythonToolEnv(Scripted(SandboxError("no sandbox")), 1, 100)
    with pytest.raises(SandboxError, match="no sandbox"):
        env.start_step("```python\nx").result()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "2 + 2?"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "3 + 3?"}]}]
    prompts = {"2": "1 + 1?", "4": messages, "6": parts}
    path.write_text("\n".join(json.dumps({"prompt": p, "ground_truth": answer}) for answer, p in prompts.items()))
    return path


@pytest.fixture
def task(rows: Path) -> Iterator[PythonTool]:
    task = PythonToolConfig(str(rows), max_calls=2, instruction=" Use Python.").build()
    yield task
    task._sandbox.close()


@needs_bubblewrap
def test_the_task_is_the_data_set_with_an_instruction(task: PythonTool, rows: Path) -> None:
    assert task.train[0].text == "1 + 1? Use Python."
    assert task.train[1].messages == ({"role": "user", "content": "2 + 2? Use Python."},)
    texts = ["3 + 3?", " Use Python."]
    assert task.train[2].messages == ({"role": "user", "content": [{"type": "text", "text": t} for t in texts]},)
    assert task.train[0].columns["ground_truth"] == "2"
    assert (task.max_turns, task.stop) == (3, ("\n```\n",))
    other = PythonToolConfig(str(rows), max_calls=3, instruction=" Use Python.").build()
    assert other.fingerprint() != task.fingerprint()
    slots = PythonToolConfig(str(rows), max_calls=2, instruction=" Use Python.", slots=1).build()
    assert slots.fingerprint() == task.fingerprint()
    for made in (other, slots):
        made._sandbox.close()


def test_the_instruction_goes_before_a_begun_turn() -> None:
    """Behind it, it would be words of the policy."""
    asked, begun = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<think>\n"}
    prompt = _instructed(Prompt("p", 0, messages=(asked, begun)), " Use Python.")
    assert prompt.messages == ({"role": "user", "content": "2 + 2? Use Python."}, begun)


@needs_bubblewrap
def test_a_whole_episode_in_the_real_sandbox(task: PythonTool) -> None:
    env = task.make_env(task.train[0])
    assert env.start_reset().result() is None
    said = env.start_step("I compute.\n```python\nprint(1 + 1)").result(60)
    assert said.observation == "```output\n2\n```\n"
    wrong = env.start_step("```python\nimport os; os.system('ls /etc'); 1 / 0").result(60)
    assert wrong.observation is not None
    assert "ZeroDivisionError" in wrong.observation
    assert env.start_step("\\boxed{2}").result(60).done


@pytest.mark.parametrize("values", [{"max_calls": 0}, {"max_observation": 0}, {"timeout_s": 0}, {"memory_mb": -1}])
def test_what_cannot_be_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        ENVS["python_tool"](path="x", **values)


def test_without_a_sandbox_the_task_is_refused(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "winnow.env.workers.bubblewrap.shutil.which", lambda name, **kw: None if name == "bwrap" else "/bin/true"
    )
    with pytest.raises(SandboxError, match="bubblewrap is not installed"):
        PythonToolConfig(str(rows)).build()
