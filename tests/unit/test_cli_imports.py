"""Help, and refusals that need no model, import neither torch nor transformers, which take seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from winnow.cli.main import app
from winnow.record.ledger import Ledger

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "scipy", "pandas", "ray", "peft", "trl", "winnow.learner")
RUN = "model: m\nenv: countdown\n"
FAULTS = {
    "a missing file": (["missing.yaml"], "missing.yaml: cannot be read: No such file or directory"),
    "a duplicate key": (["model: m\nenv: countdown\nmodel: n\n"], "duplicate key 'model'; remove one"),
    "no YAML": (["model: [\n"], "not valid YAML"),
    "a list": (["- model\n"], "expected `key: value` lines, found list"),
    "a missing key": (["model: m\n"], "missing key 'env'"),
    "an unknown key": ([RUN + "learning_rte: 1\n"], "unknown key 'learning_rte'. Did you mean 'learning_rate'?"),
    "a wrong type": ([RUN + "max_steps: many\n"], "max_steps: Input should be a valid integer"),
    "a bad value": ([RUN + "top_p: 2\n"], "top_p: Input should be less than or equal to 1"),
    "a key without effect": ([RUN + "kl_in_reward: true\n"], "kl_in_reward: True has no effect with beta: 0"),
    "an unknown method": ([RUN + "selector: grso\n"], "selector: unknown name 'grso'. Did you mean 'greso'?"),
    "a method's unknown option": (
        [RUN + "filter: {name: zero_variance, refil: true}\n"],
        "filter (zero_variance): unknown option 'refil'. Did you mean 'refill'?",
    ),
    "a method's bad value": ([RUN + "gates: [{name: random, k: 0}]\n"], "gates (random): k"),
    "a bad correction": ([RUN + "correction: {name: truncate, low: 9}\n"], "bounds must satisfy 0 <= low < high"),
    "an unknown task": ([RUN.replace("countdown", "cuontdown")], "env: unknown name 'cuontdown'"),
    "a task's unknown option": (
        ["model: m\nenv: {name: countdown, cuont: 3}\n"],
        "env (countdown): unknown option 'cuont'. Did you mean 'count'?",
    ),
    "an override without =": ([RUN, "max_steps"], "override 'max_steps': expected key=value"),
    "an override of no YAML": ([RUN, "max_steps=["], "override 'max_steps=[': the value is not valid YAML"),
    "an override of an unknown key": ([RUN, "max_stps=3"], "unknown key 'max_stps'. Did you mean 'max_steps'?"),
    "an unknown variant": ([RUN, "variant=a"], "variant: unknown name 'a'"),
}


def called(commands: Sequence[Sequence[str]], cwd: Path) -> list[tuple[int, str, list[str]]]:
    """Call `winnow` with each of these arguments in one process.

    Returns exit code and output, and what of `HEAVY` is imported by then.
    """
    code = (
        "import json, sys; from typer.testing import CliRunner; from winnow.cli.main import app; found = []\n"
        f"for args in {[list(command) for command in commands]!r}:\n"
        "    done = CliRunner().invoke(app, args)\n"
        f"    found.append([done.exit_code, done.output, [name for name in {HEAVY} if name in sys.modules]])\n"
        "print(json.dumps(found))"
    )
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, check=True, cwd=cwd)
    return [tuple(found) for found in json.loads(done.stdout)]


def test_a_fault_of_form_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    commands = []
    for number, ((given, *overrides), _) in enumerate(FAULTS.values()):
        file = given
        if "\n" in given:
            file = f"{number}.yaml"
            (tmp_path / file).write_text(given)
        commands.append(["train", file, *overrides])
    found = called(commands, tmp_path)
    for (fault, (_, message)), (exit_code, output, heavy) in zip(FAULTS.items(), found, strict=True):
        assert (exit_code, heavy) == (1, []), fault
        assert message in output, fault


def test_other_commands_do_likewise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model": "m", "env": "countdown"}')
    expected = {
        ("simulate", "missing.yaml", "--rates", "rates.jsonl"): "missing.yaml: cannot be read",
        ("tune", "missing.yaml"): "missing.yaml: cannot be read",
        ("tune", "run.yaml", "-o", "out.txt"): "name another YAML file than run.yaml",
        ("eval", "m", "eval_prompts=["): "the value is not valid YAML",
        ("vote", "m", "--config", "missing.yaml"): "missing.yaml: cannot be read",
        ("pass-rates", "m", "eval_prompts"): "expected key=value",
        ("warm-start", "-o", "out", "max_steps=["): "the value is not valid YAML",
        ("demo", "max_stps=3"): "demo: unknown key 'max_stps'. Did you mean 'max_steps'?",
        ("doctor", "--measure", "dtype=["): "the value is not valid YAML",
        ("train", "run.yaml", "--gpu", "24GiB"): "--gpu: only plans a run; add --dry-run",
        ("resume", "missing"): "missing: not a run directory",
        ("resume", ".", "learning_rate=1"): "learning_rate: cannot change on a resume",
        ("push", "missing"): "missing: not a run directory",
    }
    for (command, message), (exit_code, output, heavy) in zip(
        expected.items(), called([*expected], tmp_path), strict=True
    ):
        assert (exit_code, heavy) == (1, []), command
        assert message in output, command


def test_help_imports_nothing_large(tmp_path: Path) -> None:
    names = []
    for group in app.registered_groups:
        typer_app = group.typer_instance
        own = [typer_app.info.name] if isinstance(typer_app.info.name, str) else []
        names += [[*own, command.name or command.callback.__name__] for command in typer_app.registered_commands]
    commands = [["--help"], *([*name, "--help"] for name in names)]
    assert len(commands) > 20
    for command, (exit_code, output, heavy) in zip(commands, called(commands, tmp_path), strict=True):
        assert (exit_code, heavy) == (0, []), command
        assert "Usage" in output, command


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "winnow", "verify", "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ledger" in done.stdout


@pytest.mark.slow
def test_a_command_that_succeeds_imports_no_learner(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "ledger.sqlite").close()
    ((exit_code, output, heavy),) = called([["verify", str(tmp_path)]], tmp_path)
    assert exit_code == 0, output
    assert "winnow.learner" not in heavy
