"""What chat models need of prompts and stops, shown with a tokenizer that has special tokens and a template."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer, LlamaForCausalLM
from typer.testing import CliRunner

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.cli.main import app
from winnow.engine.facts import Facts
from winnow.env.dataset import DatasetConfig
from winnow.env.prompting import PromptError, encode_prompt
from winnow.env.row_files import DataError
from winnow.run.preflight import warn_of_failing_prompts
from winnow.study.report import report_data
from winnow.tasks.prompt_example import on_one_line
from winnow.types import Prompt

from ..builders.tokenizers import (
    CHATML,
    chat_model,  # noqa: F401
    chat_tokenizer,
)

NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)


def ends(model: Path, template: str | None) -> set[str]:
    tokenizer = chat_tokenizer(template)
    facts = Facts.from_model(LlamaForCausalLM.from_pretrained(model), tokenizer)
    return {tokenizer.convert_ids_to_tokens(i) for i in facts.eos_ids}


def test_a_turn_ends_a_sequence_whatever_the_tokenizer_calls_its_end(chat_model: Path) -> None:
    assert ends(chat_model, CHATML) == {"<|endoftext|>", "<|im_end|>"}


@pytest.mark.parametrize("template", [None, CHATML.replace("<|im_end|>", ""), "{{ raise_exception('no') }}"])
def test_ordinary_text_behind_a_turn_ends_nothing(chat_model: Path, template: str | None) -> None:
    assert ends(chat_model, template) == {"<|endoftext|>"}


def test_a_template_that_refuses_a_system_prompt_is_named(chat_model: Path, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(NO_SYSTEM + CHATML)
    prompt = Prompt("p", 0, messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}))
    with pytest.raises(PromptError, match="refuses its messages: System role not supported"):
        encode_prompt(tokenizer, prompt)
    tokenizer.save_pretrained(chat_model)
    with pytest.raises(ConfigError, match="System role not supported"):
        trainer(chat_model, tmp_path, ["hi", "you"], system_prompt="be brief")


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}]
    with pytest.raises(DataError, match=r"line 1: has a system message already"):
        DatasetConfig(path=jsonl(tmp_path, rows), system_prompt="c").build()


def test_prompts_that_are_too_long_are_counted_at_the_start(chat_model: Path, tmp_path: Path) -> None:
    short, long = "a" * 8, "b" * 100
    with pytest.warns(UserWarning, match=r"2 of 5 training prompts have over 80 tokens \(the longest \d+\)"):
        trainer(chat_model, tmp_path, [short, "c", long, "d", long + "e"])


def test_prompts_that_leave_a_completion_too_little_room_are_counted_at_the_start(
    chat_model: Path, tmp_path: Path
) -> None:
    engine = {"name": "local", "max_length": 64}
    with pytest.warns(UserWarning, match="training prompts have over") as said:
        trainer(chat_model, tmp_path, ["c", "d" * 42, "e" * 60], settings={"engine": engine})
    text = " ".join(str(one.message) for one in said)
    assert "1 of 3 training prompts have over 60 tokens and leave completions less room" in text
    assert "1 of 3 training prompts have over 63 tokens" in text


@pytest.mark.parametrize("by", ["role", "content"])
def test_prompts_that_the_template_refuses_are_counted_at_the_start(tmp_path: Path, by: str) -> None:
    """One unusual role among many rows; or one of several hundred texts."""
    rule = "m.role == 'system'" if by == "role" else "'no' in m.content"
    refuse = "{% for m in messages %}{% if RULE %}{{ raise_exception('Not this one') }}{% endif %}{% endfor %}"
    count, refused = (1000, (7, 501)) if by == "role" else (200, (31, 32))
    rows = [{"id": str(i), "prompt": [{"role": "user", "content": f"q{i}"}]} for i in range(count)]
    for i in refused:
        odd = [{"role": "system", "content": "s"}] if by == "role" else []
        rows[i]["prompt"] = [*odd, {"role": "user", "content": f"no{i}"}]
    task = DatasetConfig(path=jsonl(tmp_path, rows)).build()
    with pytest.warns(UserWarning, match="cannot be encoded") as said:
        warn_of_failing_prompts(512, task, chat_tokenizer(refuse.replace("RULE", rule) + CHATML))
    (message,) = [str(one.message) for one in said]
    assert message.startswith(
        f"2 of {count} training prompts cannot be encoded and fail, the first: prompt '{refused[0]}': the chat "
        "template refuses its messages: Not this one"
    )


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trainer(model: Path, folder: Path, questions: list[str], settings: Any = None, **options: Any) -> Trainer:
    rows = [{"prompt": [{"role": "user", "content": question}], "ground_truth": "x"} for question in questions]
    env = {"name": "dataset", "path": jsonl(folder, rows), **options}
    lengths = {"output_dir": str(folder / "run"), "max_prompt_length": 80, "max_completion_length": 4}
    return Trainer(str(model), env, "exact", lengths | (settings or {}))


PLAIN = "is plain text, to which the model's chat template is not applied"


def test_plain_text_for_a_chat_model_is_named_once(chat_model: Path, tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path / "run"), "max_prompt_length": 80, "max_completion_length": 4}

    def warned(text: str, model: Path = chat_model) -> int:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            Trainer(str(model), None, "exact", settings, train_dataset=[{"prompt": text, "ground_truth": "x"}] * 2)
        return sum(PLAIN in str(warning.message) for warning in seen)

    assert warned("2+2?") == 1
    assert warned("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n") == 0
    chat_tokenizer(None).save_pretrained(chat_model)
    (chat_model / "chat_template.jinja").unlink()
    assert warned("2+2?") == 0


def test_one_prompt_is_shown(chat_model: Path, tmp_path: Path) -> None:
    """In the plan, at the start of a run and on its page, as the model gets it."""
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    row = {"prompt": [{"role": "user", "content": "hi"}], "ground_truth": "x"}
    env = f"env={{name: dataset, path: {jsonl(tmp_path, [row])}}}"
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {chat_model}\nmax_completion_length: 4\nmax_steps: 1\nprompts_per_step: 2\n")
    given = [str(config), env, "num_generations=2", "reward_funcs=exact", "dtype=float32", "threads=1"]
    given += [f"output_dir={tmp_path / 'run'}"]
    plan = json.loads(CliRunner().invoke(app, ["train", *given, "--dry-run", "--json"]).stdout)
    assert plan["prompt_example"] == text
    assert plan["prompt_tokens"] == len(chat_tokenizer().encode(text, add_special_tokens=False))
    shown = CliRunner().invoke(app, ["train", *given, "--dry-run"]).stdout
    assert on_one_line(text) in "".join(line.rstrip() for line in shown.splitlines()).replace(" " * 29, "")


def test_a_run_shows_its_prompt_and_keeps_its_template(chat_model: Path, tmp_path: Path) -> None:
    """A template that the configuration gives decides the prompt, is saved with the model, and survives a resume."""
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"
    file = tmp_path / "own.jinja"
    file.write_text(template)
    rows = [{"prompt": [{"role": "user", "content": "hi" * 200}]}, {"prompt": [{"role": "user", "content": "you"}]}]
    settings: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "chat_template": str(file), "save_steps": 1}
    settings |= {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "threads": 1}
    first = Trainer(str(chat_model), None, reward, settings, train_dataset=rows)
    first.console = Console(file=io.StringIO(), width=80)
    first.train()
    said = first.console.file.getvalue()  # type: ignore[attr-defined]
    assert "(403 tokens): <|im_start|>hihi" in said
    assert "hi [...] hi" in said
    assert "hi<|im_end|><|im_start|>\n" in said
    (run,) = report_data([tmp_path / "run"])["runs"]
    assert run["prompt"]["text"] == "<|im_start|>" + "hi" * 200 + "<|im_end|><|im_start|>"
    assert "403 tokens" in run["prompt"]["caption"]
    file.unlink()
    again = Trainer.resume(
        tmp_path / "run", {"max_steps": 2}, model=str(chat_model), reward_funcs=reward, train_dataset=rows
    )
    again.train()
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert saved.chat_template == template
    with pytest.raises(ConfigError, match="chat_template"):
        Trainer.resume(tmp_path / "run", {"chat_template": CHATML})


def reward(completions: list[Any], **columns: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def test_demo_llm_in_small(chat_model: Path, tmp_path: Path) -> None:
    small = ["max_steps=2", "warmup_steps=0", "prompts_per_step=2", "num_generations=2", "max_completion_length=4"]
    small += ["max_prompt_length=256", "eval_prompts=3", "eval_steps=1", "save_steps=1", "filter=keep_all"]
    small += [f"model={chat_model}", "dtype=float32", "engine.dtype=float32", "-o", str(tmp_path / "demo")]
    found = CliRunner().invoke(app, ["demo-llm", *small, "--json"])
    assert found.exit_code == 0, found.output
    summary = json.loads(found.stdout)
    assert summary["step"] == 2
    assert [answer["question"].startswith("What is ") for answer in summary["answers"]] == [True] * 3
    assert (tmp_path / "demo" / "report.html").is_file()
    shown = CliRunner().invoke(app, ["demo-llm", *small])  # finds that all is done, and says it for people
    assert shown.exit_code == 0, shown.output
    assert "held-out question" in shown.stdout
