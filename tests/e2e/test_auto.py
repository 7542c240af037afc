"""Runs with `dtype: auto` and `threads: auto`: what they say of it, and that a resume keeps what was chosen."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import winnow.base.machine as processor_module
import winnow.run.resolve as machine_module
from winnow import ConfigError, Trainer
from winnow.run.plan import plan

from ..builders.runs import assert_clean, fingerprint, resume, train
from ..parity import parity_reward

FAST, SLOW = "model name: A\nflags: avx2 amx_bf16\n", "model name: B\nflags: avx2\n"


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What describes the processor; bfloat16 pays for models of every size."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor_module, "CPUINFO", path)
    monkeypatch.setattr(machine_module, "PAYS_FROM", 0)
    return path


def saved(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "config.json").read_text())
    return values


def test_bfloat16_is_kept_on_a_processor_that_would_not_choose_it(
    tiny_config: dict[str, Any], tmp_path: Path, cpuinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo.write_text(FAST)
    whole, part, heard = Path(tiny_config["output_dir"]), tmp_path / "part", Console(file=io.StringIO(), width=1000)
    trainer = Trainer(config=tiny_config, reward_funcs=parity_reward)
    trainer.console = heard
    assert (trainer.learner.precision, trainer.engine.dtype) == ("bfloat16", "bfloat16")
    trainer.train()
    assert saved(whole)["dtype"] == "bfloat16"
    assert saved(whole)["engine"] == {"name": "local", "dtype": "bfloat16"}
    said = heard.file.getvalue()
    assert "dtype: bfloat16 (the processor multiplies it fast (amx_bf16))" in said
    assert "warning: dtype" not in said

    shutil.copytree(whole, part)
    for step in (3, 4):
        shutil.rmtree(part / "checkpoints" / f"step-{step:06d}")
    cpuinfo.write_text(SLOW)
    heard = Console(file=io.StringIO(), width=1000)
    again = Trainer.resume(part, reward_funcs=parity_reward)
    again.console = heard
    again.train()
    assert "dtype: bfloat16 (as the run began)" in heard.file.getvalue()
    assert "warning: dtype: bfloat16 is probably slower here than float32" in heard.file.getvalue()
    assert fingerprint(part) == fingerprint(whole)
    assert_clean(part)


def test_threads_are_chosen_by_a_rule_saved_and_kept(
    tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(machine_module, "PAYS_FROM", 0)
    run, config = Path(tiny_config["output_dir"]), tiny_config | {"threads": "auto", "max_steps": 1, "dtype": "float32"}
    trainer = Trainer(config=config, reward_funcs=parity_reward)
    assert plan(trainer)["threads"] == torch.get_num_threads() == 2
    trainer.train()
    assert saved(run)["threads"] == 2

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    resume(run, {"max_steps": 2})
    assert torch.get_num_threads() == saved(run)["threads"] == 2, "not chosen again"
    resume(run, {"max_steps": 3, "threads": "auto"})
    assert torch.get_num_threads() == saved(run)["threads"] == 1
    resume(run, {"max_steps": 4, "threads": 2})
    assert saved(run)["threads"] == 2
    assert_clean(run)


def test_the_plan_of_a_small_model(tiny_config: dict[str, Any]) -> None:
    planned = plan(Trainer(config=tiny_config | {"eval_steps": 3}, reward_funcs=parity_reward))
    assert planned["evaluations"] == 3, "before the first step, after the third and the last"
    assert planned["dtype"] == "float32"
    assert "million parameters" in planned["dtype_because"]
    assert (planned["threads"], planned["threads_because"]) == (1, "as configured")
    assert "warnings" not in planned


def test_the_plan_counts_the_engine_by_its_type(tiny_config: dict[str, Any], cpuinfo: Path) -> None:
    found = {}
    for info in (SLOW, FAST):
        cpuinfo.write_text(info)
        found[info] = plan(Trainer(config=tiny_config, reward_funcs=parity_reward))
    assert found[FAST]["engine_weights_mib"] == pytest.approx(found[SLOW]["engine_weights_mib"] / 2, abs=0.1)
    assert found[FAST]["weights_mib"] == found[SLOW]["weights_mib"]


def test_the_type_cannot_change_on_a_resume(tiny_config: dict[str, Any]) -> None:
    train(tiny_config | {"max_steps": 1})
    with pytest.raises(ConfigError, match="dtype: cannot change"):
        resume(Path(tiny_config["output_dir"]), {"dtype": "bfloat16"})
