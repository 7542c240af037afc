"""`winnow doctor --measure`: on a CPU, on the pretended device, and with faults put in."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.pretend_cuda import PretendCuda
from winnow.cli.main import app
from winnow.study import measure as module
from winnow.study.measure import CHECKS, SkippedError, measure

SHORT = {"prompts_per_step": 2, "num_generations": 2, "max_prompt_length": 16, "max_completion_length": 16}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRESH", (9, 10))
    monkeypatch.setattr(module, "BACKENDS", {"as set": None, "cudnn": module.BACKENDS["cudnn"]})


@pytest.fixture
def model(tmp_path: Path) -> str:
    return module._made(tmp_path, large=False)


def checks_of(model: str, **values: Any) -> dict[str, Any]:
    found: dict[str, Any] = measure(model, SHORT | values, lambda line: None)["checks"]
    return found


def test_a_processor_is_measured_as_far_as_it_can_be(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    settings = [f"{key}={value}" for key, value in SHORT.items()]
    ended = CliRunner().invoke(app, ["doctor", "--measure", "--out", str(tmp_path / "report.json"), *settings])
    assert ended.exit_code == 0, ended.output
    report = json.loads((tmp_path / "report.json").read_text())
    checks = report["checks"]
    assert list(checks) == list(CHECKS)
    assert {name: found["verdict"] for name, found in checks.items() if found["verdict"] != "right"} == {
        "vLLM": "skipped",
        "memory": "skipped",
    }
    assert checks["threads"]["chosen"] == 1
    assert checks["threads"]["fastest"] in (1, 2)
    assert checks["threads"]["share_of_one"]["1"] == 1
    assert torch.get_num_threads() == 1, "as before it was measured"
    assert checks["repeats"]["bit_for_bit"]
    assert checks["embedded engine"]["nats_from_learner"]["mean"] < 1e-5
    assert checks["embedded engine"]["nats_from_learner"]["tokens"] > 32
    assert checks["attention"]["cudnn"].startswith("not available")
    assert report["versions"]["torch"] == torch.__version__
    for name in CHECKS:
        assert f"\n{name} " in ended.output


@pytest.mark.slow
def test_a_gpu_is_measured(quick: None, model: str) -> None:
    """Memory of each phase about as predicted; a processor that multiplies bfloat16 itself keeps fewer copies."""
    with PretendCuda() as gpu:
        report = measure(model, module.SIZES["cpu"], lambda line: None)
        assert not gpu.mixed, gpu.report()
    assert report["right"], report["checks"]
    assert (report["gpu"]["name"], report["gpu"]["capability"]) == ("pretended GPU", "9.0")
    memory = report["checks"]["memory"]
    for phase in ("update", "generation", "publish"):
        assert memory[phase]["measured_gib"] == pytest.approx(memory[phase]["predicted_gib"], rel=0.25)


@pytest.mark.slow
def test_memory_that_is_not_as_predicted_is_wrong(quick: None, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 0.8)
    with PretendCuda():
        found = checks_of(model)["memory"]
    assert found["verdict"] == "wrong"
    assert "times what was predicted" in found["wrong"]
    assert found["generation"]["parts_gib"]["engine weights"] > 0


@pytest.mark.slow
def test_attention_that_plans_for_each_length_is_wrong(
    quick: None, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, attend = set(), module.scaled_dot_product_attention

    def planning(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        if inputs[0].shape not in planned:
            planned.add(inputs[0].shape)
            time.sleep(0.5)
        return attend(*inputs, **options)

    monkeypatch.setattr(module, "scaled_dot_product_attention", planning)
    with PretendCuda():
        found = checks_of(model)["attention"]
    assert found["verdict"] == "wrong"
    assert "is cuDNN's attention on?" in found["wrong"]


def test_other_log_probabilities_are_wrong_and_a_failure_hides_nothing(
    quick: None, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: module.Bench) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def skips(bench: module.Bench) -> dict[str, Any]:
        raise SkippedError("not here")

    rollout = module._rollout
    monkeypatch.setattr(module, "_rollout", lambda request, ids, logp: rollout(request, ids, logp - 1.0))
    monkeypatch.setattr(module, "CHECKS", CHECKS | {"update": fails, "vLLM": skips})
    settings = [f"{key}={value}" for key, value in SHORT.items()]
    ended = CliRunner().invoke(app, ["doctor", "--measure", "--model", model, "--json", *settings])
    assert ended.exit_code == 1
    checks = json.loads(ended.stdout)["checks"]
    assert checks["update"]["verdict"] == "failed"
    assert checks["update"]["error"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert checks["embedded engine"]["verdict"] == "wrong"
    assert "its log-probabilities are not the learner's" in checks["embedded engine"]["wrong"]
    assert checks["vLLM"] | {"check_s": 0} == {"verdict": "skipped", "because": "not here", "check_s": 0}
    assert checks["attention"]["verdict"] == "right"


def test_settings_without_a_measurement_are_refused() -> None:
    ended = CliRunner().invoke(app, ["doctor", "lora.r=4"])
    assert ended.exit_code == 1
    assert "need --measure" in ended.output
