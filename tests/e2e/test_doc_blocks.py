"""Every Python block of README and docs runs, with tiny models and data in the place of those that a page names.

A block that cannot run has `<!-- not run: reason -->` in the line above it; these are counted here.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from winnow import Trainer
from winnow.config import load_config
from winnow.record.stop_conditions import RunStoppedError
from winnow.types import Prompt

from ..builders.judges import write as write_judge
from ..builders.tools import make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^(<!-- not run: .+ -->\n)?```(?:python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"\n\n((?: {4}(?:from [\w.]+ import|import|def|class) .*\n)(?: {4}.*\n|\n)*)")
FENCED = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    "python.md": "test_python_page.py",
    "design.md": "test_design_examples.py",
    "tutorial.md": "test_pages.py",
    "tutorial-agent.md": "test_pages.py",
    "tutorial-trl.md": "test_pages.py",
}
"""Pages whose blocks are one story, and the file that runs it."""
NOT_RUN = {"training.md": 1, "trl.md": 1}
"""Blocks that say why they are not run."""
SHORT = {
    r'"max_steps": \d+': '"max_steps": 1, "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 64, '
    '"max_skipped_steps": 1, "threads": 1, "learning_rate": 1e-3',
    r"max_steps=\d+, save_steps=\d+": "max_steps=1, save_steps=1, max_completion_length=4, use_cpu=True, bf16=False, "
    "per_device_train_batch_size=4, num_generations=2, report_to=[]",
}


def blocks_of(page: Path) -> list[str]:
    return [code for skipped, code in BLOCK.findall(page.read_text(encoding="utf-8")) if not skipped]


def runnable() -> list[Path]:
    return [page for page in PAGES if page.name not in ELSEWHERE and blocks_of(page)]


def test_no_block_is_left_out() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(BLOCK.findall(text)) == len(re.findall(r"^```(?:python|py)\b", text, re.MULTILINE)), page.name
        assert sum(bool(skipped) for skipped, _ in BLOCK.findall(text)) == NOT_RUN.get(page.name, 0), page.name
        assert page.name in ELSEWHERE or not INDENTED.search(FENCED.sub("", text)), f"{page.name}: fence its Python"
    assert len(runnable()) >= 7
    for name, file in ELSEWHERE.items():
        assert name in (ROOT / "tests" / "e2e" / file).read_text(encoding="utf-8")


@pytest.fixture
def world(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("models/small", "models/s0", "path/or/hub-name"):
        shutil.copytree(tiny_model, tmp_path / name)
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("Qwen/Qwen3-0.6B")
    tokenizer.save_pretrained("Qwen/Qwen3-0.6B")
    shutil.move(write_judge(tmp_path / "judge"), "models/judge")
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    lines = {
        "train.jsonl": {"prompt": "What is 2 + 2?", "answer": "e"},
        "shopping.jsonl": {"prompt": question, "budget": 3},
        "questions.jsonl": {"prompt": question, "question": "What is 2 + 2?", "answer": "4"},
    }
    for name, row in lines.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    Path("my_reward.py").write_text("def exact(completions, answer, **columns):\n    return [0.0 for _ in answer]\n")
    Path("profiles").mkdir()
    Path("profiles/s0.jsonl").write_text('{"id": "a", "n": 4, "correct": 1, "mean_reward": 0.25}\n')
    return tmp_path


def run(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """The blocks of a page, one after the other, as of one file. A model that nobody taught may get all wrong."""
    for number, block in enumerate(blocks_of(ROOT / page), 1):
        for pattern, short in SHORT.items():
            block = re.sub(pattern, short, block)
        shutil.rmtree("runs/winnow", ignore_errors=True)
        try:
            exec(compile(block, f"block {number} of {page}", "exec"), names)
        except RunStoppedError as error:
            assert "no group with a signal" in str(error)  # noqa: PT017
    return names


def test_readme(world: Path) -> None:
    names = run("README.md", {})
    assert names["my_reward"](["4", "5"], ["4", "4"]) == [1.0, 0.0]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (settings,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    Path("mine.yaml").write_text(settings)
    rows = [{"prompt": f"What is 2 + {i}?", "answer": "e"} for i in range(8)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("my_reward.py").write_text(blocks_of(ROOT / "README.md")[0])
    short = ["max_steps=1", "prompts_per_step=2", "num_generations=4", "max_completion_length=64", "threads=1"]
    config = load_config("mine.yaml", [*short, "max_skipped_steps=1", "learning_rate=1e-3", "env.test_size=2"])
    try:
        Trainer(config=config).train()
    except RunStoppedError as error:
        assert "no group with a signal" in str(error)  # noqa: PT017
    assert Path("runs/winnow/metrics.jsonl").exists()


def test_data(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("docs/data.md", {})
    assert Path("sums.jsonl").exists()
    assert found["right"](["a", "b"], ["a", "c"]) == [1.0, 0.0]
    assert re.search(r"\[-?\d+\.\d+\]", capsys.readouterr().out), "what the judge gives"


def test_engine(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("docs/engine.md", {})
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_environments(world: Path) -> None:
    pytest.importorskip("openai")
    code = next(block for block in blocks_of(ROOT / "docs" / "environments.md") if "class Guess:" in block)
    Path("my_envs.py").write_text(code)
    names = run("docs/environments.md", {})
    task = names["GuessTask"]()
    assert task.make_env(task.train[3]).step(" 3 ").reward == 1.0
    prompt = Prompt("g", 0, text="guess", columns={"secret": 7})
    env = names["make_env"](None, prompt)
    try:
        assert env.start_reset().result(60) is None
        assert env.start_step("7").result(60).done
    finally:
        names["pool"].close()


def test_ledger(world: Path, tiny_config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(config=tiny_config | {"output_dir": "runs/countdown", "max_steps": 1, "eval_steps": None}).train()
    capsys.readouterr()
    run("docs/ledger.md", {})
    assert re.fullmatch(r"\d+ True\n", capsys.readouterr().out)


def test_pass_rates(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("docs/pass-rates.md", {})
    assert names["rates"]["a"].correct == 1
    assert len(capsys.readouterr().out.splitlines()) == 9
    assert names["profiler"].rollouts == 32


def test_trl(world: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset

    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(8)]

    def length(completions: list[Any], **columns: Any) -> list[float]:
        return [float(len(c[0]["content"])) for c in completions]

    run("docs/trl.md", {"my_reward": length, "dataset": Dataset.from_list(rows)})
    assert Path("out/winnow/ledger.sqlite").exists()


def test_pages_with_blocks_have_a_test() -> None:
    tested = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    assert {page.stem.lower() for page in runnable()} <= tested
