"""The command as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from winnow.base import machine
from winnow.cli.main import app
from winnow.run.preflight import does_not_fit

from ..builders.commands import REWARD, winnow


@pytest.fixture
def recipe(tiny_config: dict[str, Any], tmp_path: Path) -> Path:
    """A YAML file with a reward of its own, as in the tutorial."""
    (tmp_path / "reward.py").write_text(REWARD)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_config | {"reward_funcs": [f"{tmp_path / 'reward.py'}:words"]}))
    return path


def test_train_verify_report_eval_resume(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = winnow("train", recipe, "max_steps=2", "--json")
    assert trained.exit_code == 0, trained.output
    assert json.loads(trained.stdout)["step"] == 2
    verified = winnow("verify", run, "--json")
    assert verified.exit_code == 0
    assert json.loads(verified.stdout)["ok"] is True
    assert "OK" in winnow("verify", run).stdout
    page = tmp_path / "page.html"
    assert winnow("report", run, "-o", page).exit_code == 0
    assert page.stat().st_size < 2e6
    options = ("eval_temperature=0.6", "env.test_size=5")  # a key of a section changes that of the run
    evaluated = winnow("eval", run, "eval_generations=2", "eval_prompts=8", "--json", *options)
    assert evaluated.exit_code == 0, evaluated.output
    assert json.loads(evaluated.stdout)["prompts"] == 5
    assert {"pass@1", "pass@2", "greedy", "prompts"} <= set(json.loads(evaluated.stdout))
    resumed = winnow("resume", run, "max_steps=3", "--json")
    assert resumed.exit_code == 0, resumed.output
    assert json.loads(resumed.stdout)["step"] == 3


AMOUNT = ("eval_prompts=3", "eval_generations=2")


def test_eval_of_a_plain_model(tiny_model: Path) -> None:
    assert "name the task" in winnow("eval", tiny_model).output
    found = winnow("eval", tiny_model, "env.test_size=4", "env=countdown", *AMOUNT, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["prompts"] == 3


@pytest.mark.parametrize("command", ["eval", "vote"])
@pytest.mark.parametrize(
    ("override", "key"), [("temperature=0.5", "eval_temperature"), ("num_generations=4", "eval_generations")]
)
def test_an_override_that_only_training_reads_is_refused(command: str, override: str, key: str) -> None:
    refused = winnow(command, "no-model", "env=countdown", override)
    assert refused.exit_code == 1
    assert f"{override.partition('=')[0]}: has no effect on an evaluation; set {key}" in refused.output


def test_pass_rates_of_a_model(tiny_model: Path, tmp_path: Path) -> None:
    assert "name the task" in winnow("pass-rates", tiny_model).output
    path = tmp_path / "profile.jsonl"
    arguments = ["pass-rates", tiny_model, "env=countdown", "--prompts", "5", "-n", "3", "-o", path]
    arguments += ["env.train_size=8", "env.test_size=2", "max_completion_length=6", "threads=1"]
    found = winnow(*arguments, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["profiled"] == 5
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [3] * 5
    again = winnow(*arguments)
    assert again.exit_code == 0, again.output
    assert "cached" in again.stdout
    assert "dead" in again.stdout
    refused = winnow(*arguments, "temperature=0.5")
    assert refused.exit_code == 1
    assert "made for something else" in refused.output


@pytest.mark.slow
def test_compare_methods_over_seeds(recipe: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        for name in ("keep_all", "zero_variance"):
            run = tmp_path / f"{name}-s{seed}"
            trained = winnow("train", recipe, f"output_dir={run}", f"filter={name}", f"seed={seed}", "max_steps=2")
            assert trained.exit_code == 0, trained.output
    runs = sorted(tmp_path.glob("*-s?"))
    page = tmp_path / "page.html"
    found = winnow("compare", *runs, "--seeds", "--baseline", "zero_variance", "-o", page, "--json")
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert result["baseline"] == "zero_variance"
    assert [(m["name"], len(m["runs"])) for m in result["methods"]] == [("keep_all", 2), ("zero_variance", 2)]
    assert result["methods"][0]["means"]["rollouts"]["mean"] == 2 * 16
    assert page.stat().st_size < 2e6
    assert "note: No interval is given" in winnow("compare", *runs).stdout
    refused = winnow("compare", *runs, "--seeds", "--baseline", "grpo")
    assert refused.exit_code == 1
    assert "no method 'grpo'" in refused.output


def test_dry_run_writes_nothing(recipe: Path, tmp_path: Path) -> None:
    planned = winnow("train", recipe, "--dry-run", "--json")
    assert planned.exit_code == 0, planned.output
    plan = json.loads(planned.stdout)
    assert plan["rollouts_per_step"] == 16
    assert plan["max_sampled_tokens_per_step"] == 128
    assert plan["trained_parameters"] == plan["parameters"] > 0
    assert not (tmp_path / "run").exists()


def test_dry_run_with_samplers_says_what_they_need_and_what_does_not_fit(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr(machine, "LIMITS", tmp_path)
    planned = winnow("train", recipe, "--dry-run", "--json", "sync={name: processes, samplers: 3}", "max_lag=1")
    plan = json.loads(planned.stdout)
    assert (plan["samplers"]["count"], plan["samplers"]["cpus"]) == (3, 1)
    assert 500 <= plan["samplers"]["mib"] < 520
    assert [(node["node"], node["cpus"]) for node in plan["nodes"]] == [("this machine", 1)], "the container's cores"
    wanted = {
        "ranks": {"count": 2, "cpus": 2, "gpus": 0, "mib": 600},
        "samplers": {"count": 3, "cpus": 1, "gpus": 0, "mib": 500},
    }
    nodes = [{"node": "a", "cpus": 4, "gpus": 0, "mib": 2000}, {"node": "b", "cpus": 2, "gpus": 0, "mib": 900}]
    assert does_not_fit(wanted, nodes) == ["2 of 3 samplers: no node has 1 CPUs, 0 GPUs and 500 MiB left for each"]
    assert does_not_fit(wanted, [*nodes, nodes[1], nodes[1]]) == []
    wanted["samplers"]["to_start"] = 1
    assert does_not_fit(wanted, nodes)[0].endswith("left for each; the run starts without them")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learning_rte=1"], "Did you mean 'learning_rate'"),
        (["filter=zero_varience"], "Did you mean 'zero_variance'"),
        (["env.count=9"], "count: Input should be less than or equal to 6"),
        (["env=countdwn"], "Did you mean 'countdown'"),
        (["model=/no/where"], "no such directory"),
        (["reward_funcs=['json:dumpz']"], "json has no 'dumpz'"),
        (["reward_funcs=['no_such_module:f']"], "no_such_module"),
        (["device=gpu"], "device"),
    ],
)
def test_bad_input_is_one_clear_line(recipe: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = winnow("train", recipe, *arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


def test_things_that_are_not_there(tmp_path: Path) -> None:
    for command in ("verify", "resume"):
        result = winnow(command, tmp_path / "nothing")
        assert result.exit_code == 1
        assert "nothing" in result.output
    assert winnow("report", tmp_path, "-o", tmp_path / "r.html").exit_code == 1


def test_methods_lists_every_table() -> None:
    found = json.loads(winnow("methods", "--json").stdout)
    assert {"selector", "filter", "advantage", "env", "engine"} <= {m["field"] for m in found}
    assert "zero_variance" in winnow("methods").stdout


def test_warm_start_makes_a_model_that_trains(tmp_path: Path) -> None:
    model = tmp_path / "model"
    made = winnow("warm-start", "-o", model, "max_steps=3", "batch_size=8", "hidden_size=32", "num_heads=2", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["steps"] == 3
    again = winnow("warm-start", "-o", model)
    assert again.exit_code == 1
    assert "not empty" in again.output


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(recipe: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "winnow.cli.main", "train", str(recipe), "max_steps=100000", "eval_steps=null"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"COLUMNS": "200"}
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    assert f"winnow resume {tmp_path / 'run'}" in output
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_model_with_code_of_its_own_is_not_run(tiny_model: Path, recipe: Path, tmp_path: Path) -> None:
    import shutil

    model = tmp_path / "evil"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    result = winnow("train", recipe, f"model={model}")
    assert result.exit_code == 1
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_not_loaded(tiny_model: Path, recipe: Path, tmp_path: Path) -> None:
    import shutil

    import torch

    model = tmp_path / "pickled"
    shutil.copytree(tiny_model, model)
    (model / "model.safetensors").unlink()

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"x": Payload()}, model / "pytorch_model.bin")
    result = winnow("train", recipe, f"model={model}")
    assert result.exit_code == 1
    assert not (tmp_path / "ran").exists()


def every_command(group: Any, *path: str) -> list[tuple[tuple[str, ...], Any]]:
    found = [(path, group)] if path and not hasattr(group, "commands") else []
    for name, inner in getattr(group, "commands", {}).items():
        found += every_command(inner, *path, name)
    return found


def test_every_command_answers_in_json_and_no_setting_has_two_names() -> None:
    commands = every_command(typer.main.get_command(app))
    assert {path[-1] for path, _ in commands} >= {
        "train",
        "verify",
        "pass-rates",
        "warm-start",
        "gate",
        "report",
        "demo",
    }
    for path, command in commands:
        options = {option for p in command.params for option in p.opts}
        assert "--json" in options, path
        if path in (("eval",), ("vote",), ("demo",), ("warm-start",)):
            assert not options & {"-n", "--prompts", "--env", "--seed", "--steps"}, path


@pytest.mark.parametrize(("old", "new"), [("audit", "verify"), ("warmup", "warm-start"), ("profile", "pass-rates")])
def test_a_word_of_the_configuration_is_no_command(old: str, new: str) -> None:
    assert f"No such command '{old}'" in winnow(old).output
    assert new in winnow("--help").output


def test_demo_in_small(tmp_path: Path) -> None:
    small = ["max_steps=2", "warmup_steps=0", "prompts_per_step=2", "num_generations=2", "max_completion_length=4"]
    small += ["eval_prompts=2", "eval_generations=2", "eval_steps=1", "save_steps=1", "warm_start.max_steps=1"]
    small += ["warm_start.hidden_size=32", "warm_start.num_heads=2", "env.train_size=8", "env.test_size=2", "seed=3"]
    found = winnow("demo", *small, "-o", tmp_path, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["step"] == 2
    assert (tmp_path / "report.html").is_file()
    again = winnow("demo", *small, "-o", tmp_path)  # finds that all is done, and says it for people
    assert again.exit_code == 0, again.output
    assert f"winnow verify {tmp_path / 'run'}" in again.stdout
