"""What a run loses without ending: failed rollouts, and steps that train nothing. Each cause is reported once."""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from winnow import Trainer
from winnow.env.base import StepResult
from winnow.record.stop_conditions import RunStoppedError
from winnow.tasks.countdown import CountdownConfig

from ..builders.commands import winnow
from ..builders.runs import metrics_of
from ..builders.watchdogs import run
from ..parity import parity_reward

QUIET = {"eval_steps": None, "max_skipped_steps": 3, "max_steps": 6}
FILE = "test_losses.py"


def line_of(text: str) -> int:
    """Line of this file that has `text` first."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def picky(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
    if sum(map(ord, prompts[0])) % 3 == 0:
        raise KeyError(prompts[0])  # another message for each prompt
    return parity_reward(completions=completions, prompts=prompts, **columns)


def test_a_reward_that_raises_on_some_prompts(tiny_config: dict[str, Any]) -> None:
    """One warning with share, cause, file, line and prompt, however the messages differ; the total is returned."""
    said = run(tiny_config | QUIET, picky)
    ((_, message),) = said.items()
    assert "of 16 rollouts failed (" in message
    assert "reward picky: KeyError: " in message
    assert f"{FILE}:{line_of('raise KeyError(prompts[0])')})" in message
    assert "first at prompt '" in message


def test_causes_at_different_lines_are_different(tiny_config: dict[str, Any]) -> None:
    def odd(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
        if sum(map(ord, prompts[0])) % 3 == 0:
            return [float("x") for _ in completions]
        if sum(map(ord, prompts[0])) % 3 == 1:
            return [float("y") for _ in completions]
        return parity_reward(completions=completions, prompts=prompts, **columns)

    options = QUIET | {"max_failed_share": 1.0, "prompts_per_step": 8}
    Trainer(config=tiny_config | options, reward_funcs=odd).train()
    lines = (Path(tiny_config["output_dir"]) / "warnings.jsonl").read_text().splitlines()
    said = [json.loads(line)["warning"] for line in lines]
    for letter in "xy":
        assert sum(f":{line_of(f'float({json.dumps(letter)})')})" in message for message in said) == 1


def test_a_resume_does_not_report_a_cause_again(tiny_config: dict[str, Any]) -> None:
    Trainer(config=tiny_config | QUIET | {"max_steps": 3}, reward_funcs=picky).train()
    file = Path(tiny_config["output_dir"]) / "warnings.jsonl"
    before = file.read_text()
    Trainer.resume(tiny_config["output_dir"], {"max_steps": 6}, reward_funcs=picky).train()
    assert file.read_text() == before


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("shown", ["table", "json"])
def test_the_end_table_counts_failures_by_cause(tiny_config: dict[str, Any], tmp_path: Path, shown: str) -> None:
    (tmp_path / "picky.py").write_text(
        "def picky(completions, prompts, **columns):\n"
        "    if sum(map(ord, prompts[0])) % 3 == 0:\n"
        "        raise RuntimeError(f'no table for {prompts[0]}')\n"
        "    return [float(len(c) % 2) for c in completions]\n"
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_config | QUIET | {"reward_funcs": [f"{tmp_path}/picky.py:picky"]}))
    told = winnow("train", recipe, *(["--json"] if shown == "json" else []))
    assert told.exit_code == 0, told.output
    if shown == "json":
        ((cause, count),) = json.loads(told.stdout)["failed rollouts"].items()
        assert count > 0
        assert count % 4 == 0
        assert cause.startswith("reward picky: RuntimeError: no table for ")
        assert cause.endswith("picky.py:3)")
    else:
        assert "failed rollouts" in told.output
        assert "x reward picky: RuntimeError" in " ".join(told.output.split())


class Broken:
    def __init__(self, numbers: Any, where: str) -> None:
        self.fails = sum(numbers) % 3 == 0 and where

    def reset(self) -> str | None:
        if self.fails == "reset":
            raise OSError("no such game")
        return None

    def step(self, text: str) -> StepResult:
        if self.fails == "step":
            raise OSError("the simulator went away")
        return StepResult(None, float(len(text) % 2), True)


@dataclass(frozen=True)
class BrokenTask:
    """Countdown prompts, whose environments break on some of them."""

    where: str

    def build(self) -> Any:
        task = CountdownConfig(train_size=24, test_size=8).build()
        task.make_env = lambda prompt: Broken(prompt.columns["numbers"], self.where)  # type: ignore[method-assign]
        return task


@pytest.mark.parametrize("where", ["reset", "step"])
def test_environments_that_break(tiny_config: dict[str, Any], where: str) -> None:
    config = tiny_config | QUIET
    trainer = Trainer(config={k: v for k, v in config.items() if k != "env"}, env=BrokenTask(where).build())
    trainer.train()
    lines = (Path(config["output_dir"]) / "warnings.jsonl").read_text().splitlines()
    (line,) = [line for line in lines if "rollouts failed" in line]
    text = "no such game" if where == "reset" else "the simulator went away"
    assert f"OSError: {text} (" in json.loads(line)["warning"]
    place = line_of(f'raise OSError("{text}")')
    assert f"{FILE}:{place})" in json.loads(line)["warning"]


def test_held_out_rollouts_that_fail(tiny_config: dict[str, Any]) -> None:
    said: list[str] = []

    def picky_later(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
        if prompts[0] in held_out[:1]:
            raise KeyError("held out")
        return parity_reward(completions=completions, prompts=prompts, **columns)

    trainer = Trainer(config=tiny_config, reward_funcs=picky_later)
    held_out = [prompt.text for prompt in trainer.task.test[:4]]
    trainer.train()
    for line in (Path(tiny_config["output_dir"]) / "warnings.jsonl").read_text().splitlines():
        said.append(json.loads(line)["warning"])
    (message,) = said
    assert message.startswith("2 of 8 held-out rollouts failed (25%): reward picky_later: KeyError: 'held out'")


def test_all_completions_cut_off_and_masked(tiny_config: dict[str, Any]) -> None:
    """ModelTurn at the first such step, and again by what ends the run."""
    config = tiny_config | QUIET | {"mask_truncated_completions": True, "max_completion_length": 1}
    config |= {"temperature": 20.0, "seed": 2}  # none of these ends by itself
    with pytest.raises(RunStoppedError) as stopped:
        Trainer(config=config, reward_funcs=parity_reward).train()
    lines = (Path(config["output_dir"]) / "warnings.jsonl").read_text().splitlines()
    (first,) = [json.loads(line) for line in lines if "trained nothing" in line]
    assert first["step"] == 1
    for said in (first["warning"], str(stopped.value)):
        assert "16 of 16 completions were cut off at max_completion_length" in said
        assert "Raise max_completion_length, or set mask_truncated_completions: false" in said


def test_groups_that_all_lack_rewards(tiny_config: dict[str, Any]) -> None:
    def fails_once(completions: list[str], **columns: Any) -> list[Any]:
        return [ValueError("down"), *(1.0 for _ in completions[1:])]

    config = tiny_config | QUIET | {"num_generations": 2}
    with pytest.raises(RunStoppedError) as stopped:
        Trainer(config=config, reward_funcs=fails_once).train()
    lines = (Path(config["output_dir"]) / "warnings.jsonl").read_text().splitlines()
    (first,) = [json.loads(line) for line in lines if "trained nothing" in line]
    assert first["step"] == 1
    for said in (first["warning"], str(stopped.value)):
        assert "none of the 4 groups could be trained on (4x: only 1 of 2 siblings have a reward)" in said
        assert "50% of the rollouts failed, most often (4x): reward fails_once: ValueError: down" in said


def test_rewards_that_are_all_none(tiny_config: dict[str, Any]) -> None:
    config = tiny_config | QUIET | {"max_failed_share": 1.0}
    with pytest.raises(RunStoppedError, match=r"trained nothing .* most often \(16x\): no reward function applied"):
        Trainer(config=config, reward_funcs=lambda completions, **columns: [None] * len(completions)).train()


@pytest.mark.parametrize("beta", [0.0, 0.01])
def test_a_correction_that_leaves_out_every_token(tiny_config: dict[str, Any], beta: float) -> None:
    """Also where a KL term keeps the gradient from being 0."""
    mask = {"name": "mask", "level": "token", "low": 1e6, "high": None}
    config = tiny_config | QUIET | {"max_steps": 2, "correction": mask, "beta": beta}
    said = run(config)
    assert [*said] == [1]
    assert "the step trained nothing: the correction left out every token" in said[1]
    rows = metrics_of(Path(config["output_dir"]))
    assert [row["correction/masked_share"] for row in rows] == [1.0, 1.0]


def test_zero_rewards_name_their_likely_causes(tiny_config: dict[str, Any]) -> None:
    """As an object: the thread, too. Each function has its own warning."""

    def zero(completions: list[str], **columns: Any) -> list[float]:
        return [0.0 for _ in completions]

    def one(completions: list[str], **columns: Any) -> list[float]:
        return [1.0 for _ in completions]

    config = tiny_config | QUIET | {"max_skipped_steps": 100, "max_completion_length": 1, "max_steps": 3}
    Trainer(config=config, reward_funcs=[zero, one]).train()
    lines = (Path(config["output_dir"]) / "warnings.jsonl").read_text().splitlines()
    said = [json.loads(line)["warning"] for line in lines if "to every completion" in line]
    assert ["'one' gave 1" in said[0], "'zero' gave 0" in said[1], len(said)] == [True, True, 2]
    assert "of the completions are cut off at max_completion_length (1)" in said[1]
    assert "runs in a thread, where the signals" in said[1]
    assert "the answer format" in said[1]


def test_by_name_no_thread_is_blamed(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "zero.py").write_text("def zero(completions, **columns):\n    return [0.0 for _ in completions]\n")
    config = tiny_config | QUIET | {"max_skipped_steps": 100, "max_steps": 2, "stop": ["="]}
    Trainer(config=config, reward_funcs=[f"{tmp_path}/zero.py:zero"]).train()
    (line,) = (Path(config["output_dir"]) / "warnings.jsonl").read_text().splitlines()
    assert "thread" not in line
    assert "completions end at a stop string ('=')" in line


@pytest.mark.skipif(sys.platform != "linux", reason="workers")
@pytest.mark.parametrize("when", ["call", "import"])
def test_a_judge_whose_key_is_not_passed_on(
    tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "a-secret-of-mine")
    looked_up = "import os\nkey = os.environ['JUDGE_API_KEY']\n"
    body = "    return [float(len(key)) for _ in completions]\n"
    (tmp_path / "judge.py").write_text(
        f"{looked_up}def judge(completions):\n{body}"
        if when == "import"
        else f"def judge(completions):\n    {looked_up.strip().replace(chr(10), chr(10) + '    ')}\n{body}"
    )
    config = tiny_config | QUIET | {"reward_funcs": [f"{tmp_path}/judge.py:judge"]}
    with pytest.raises((RunStoppedError, ValueError)) as stopped:
        Trainer(config=config).train()
    assert "JUDGE_API_KEY is set here" in str(stopped.value)
    assert "add reward_env: [JUDGE_API_KEY]" in str(stopped.value)
    assert os.environ["JUDGE_API_KEY"] not in str(stopped.value)


def test_a_sound_run_says_nothing(tiny_config: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run(tiny_config | QUIET | {"correction": "truncate"}) == {}
